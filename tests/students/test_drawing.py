"""Drawing from logits: the right distribution, and its log-probs."""

import numpy as np
import pytest
import torch

from opd.records import Sampling
from opd.students.drawing import BLOCK, draw, student_topk
from opd.students.noise import uniform

SAMPLINGS = [
    Sampling(),
    Sampling(temperature=0.7),
    Sampling(temperature=2.0),
    Sampling(top_k=5),
    Sampling(top_p=0.8),
    Sampling(temperature=0.7, top_k=10, top_p=0.9),
    Sampling(top_p=1e-6),
    Sampling(top_k=1),
    Sampling(top_k=1000),
]
LAST = 1 - 2.0**-53  # the largest number below 1


def logits_of(rows: int, vocab: int, seed: int = 0) -> torch.Tensor:
    return 2 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))


def truncated(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """[B, V] float64 probabilities: temperature, then top-k, then the smallest set with probability top-p."""
    logp = (logits.double() / sampling.temperature).log_softmax(-1)
    values, order = logp.sort(-1, descending=True)
    probs = values.exp()
    if sampling.top_k:
        probs[:, sampling.top_k :] = 0
        probs /= probs.sum(-1, keepdim=True)
    for row in probs:
        size = int((row.cumsum(-1) < sampling.top_p - 1e-9).sum()) + 1
        row[size:] = 0
    probs /= probs.sum(-1, keepdim=True)
    return torch.zeros_like(probs).scatter(-1, order, probs)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_the_distribution_and_its_log_probs(sampling):
    logits = logits_of(1, 40)
    exact = truncated(logits, sampling)[0]
    noise = torch.from_numpy(uniform(np.arange(20_000), np.full(20_000, 3)))
    ids, logps = draw(logits.expand(20_000, -1), noise, sampling)
    torch.testing.assert_close(logps.double(), exact[ids].log(), rtol=0, atol=2e-6)
    counts = torch.bincount(ids, minlength=40)
    assert not counts[exact == 0].any()
    expected = 20_000 * exact[exact > 0]
    statistic = float(((counts[exact > 0] - expected) ** 2 / expected).sum())
    degrees = len(expected) - 1
    assert statistic < degrees + 4 * (2 * degrees) ** 0.5 + 1e-9


@pytest.mark.parametrize("vocab", [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 7])
def test_the_cumulative_distribution_is_inverted(vocab):
    logits = logits_of(1, vocab)
    ends = logits[0].double().softmax(-1).cumsum(-1)
    noise = torch.linspace(0, LAST, 500, dtype=torch.float64)
    ids, _ = draw(logits.expand(500, -1), noise, Sampling())
    exact = torch.searchsorted(ends, noise * ends[-1], right=True).clamp(max=vocab - 1)
    assert ((ids - exact).abs() <= 1).all()
    assert (ids == exact).double().mean() > 0.98  # rounding of the softmax may move an edge
    assert ids.min() >= 0
    assert ids.max() < vocab


@pytest.mark.parametrize("vocab", [5, 2 * BLOCK + 5])
def test_impossible_tokens_are_never_drawn(vocab):
    logits = torch.full((4, vocab), -torch.inf)
    possible = torch.tensor([1, vocab // 2, vocab - 2])
    logits[:, possible] = torch.tensor([0.0, -20.0, -40.0])
    noise = torch.tensor([0.0, 0.5, LAST, 1 - 1e-9], dtype=torch.float64)
    for sampling in (Sampling(), Sampling(top_p=0.999), Sampling(top_k=4)):
        ids, logps = draw(logits, noise, sampling)
        assert torch.isin(ids, possible).all()
        assert logps.isfinite().all()


def test_greedy():
    logits = logits_of(6, 40)
    ids, logps = draw(logits, torch.zeros(6, dtype=torch.float64), Sampling(temperature=0.0, top_p=0.5))
    assert torch.equal(ids, logits.argmax(-1))
    assert not logps.any()


def test_low_precision_logits_give_fp32_log_probs():
    logits = logits_of(6, 40).bfloat16()
    ids, logps = draw(logits, torch.full((6,), 0.4, dtype=torch.float64), Sampling(temperature=0.7))
    exact = truncated(logits, Sampling(temperature=0.7))
    assert logps.dtype == torch.float32
    torch.testing.assert_close(logps.double(), exact.gather(-1, ids[:, None])[:, 0].log(), rtol=0, atol=2e-6)


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_the_students_own_most_likely_tokens_are_untruncated(temperature):
    logits = logits_of(6, 40)
    ids, logps = student_topk(logits, Sampling(temperature=temperature, top_k=2, top_p=0.5, num_topk=7))
    top = (logits.double() / (temperature or 1.0)).log_softmax(-1).topk(7)
    assert torch.equal(ids, top.indices)
    torch.testing.assert_close(logps.double(), top.values, rtol=0, atol=2e-6)


def test_no_more_than_all_tokens():
    assert student_topk(logits_of(2, 5), Sampling(num_topk=9))[0].shape == (2, 5)
