"""Log-probs, entropy and gradient against float64 autograd."""

import jaxtyping
import pytest
import torch

from opd.kernels import blocks
from opd.kernels.gather import RowStats, gather_logprob, gather_logprob_grad_


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Blocks of a few rows, so that several of them meet even here."""
    monkeypatch.setattr(blocks, "CACHE_BYTES", 8 * 5000 * 4)


def logits_of(c: int, vocab: int, kind: str = "plain", dtype: torch.dtype = torch.float32) -> torch.Tensor:
    logits = 3 * torch.randn(c, vocab, generator=torch.Generator().manual_seed(c * vocab))
    if kind == "peaked":
        logits[:, vocab // 2] += 50
    return (logits + {"high": 1e4, "low": -1e4}.get(kind, 0.0)).to(dtype)


def ids_of(c: int, vocab: int) -> torch.Tensor:
    """Both ends, an absent one, and a repeated one."""
    inner = torch.arange(c) % vocab
    return torch.stack(
        [torch.zeros_like(inner), torch.full_like(inner, vocab - 1), inner, torch.full_like(inner, -1), inner], dim=1
    )


def reference(
    logits: torch.Tensor, ids: torch.Tensor, scale: float, grad: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(log-probs, entropy, gradient) in float64."""
    exact = logits.double().requires_grad_()
    logp = (exact * scale).log_softmax(-1)
    picked = logp.gather(-1, ids.clamp(min=0)).masked_fill(ids < 0, 0.0)
    (picked * (torch.ones_like(picked) if grad is None else grad.double())).sum().backward()
    assert exact.grad is not None
    return picked.detach(), -(logp.exp() * logp).sum(-1).detach(), exact.grad


def run(logits: torch.Tensor, ids: torch.Tensor, scale: float, grad: torch.Tensor, add: torch.Tensor | None = None):
    stats = gather_logprob(logits, ids, scale)
    out = logits.clone()
    gather_logprob_grad_(out, ids, stats, grad, scale, add)
    return stats, out


@pytest.mark.parametrize("vocab", [1, 2, 127, 1000, 5000])
@pytest.mark.parametrize("c", [0, 1, 3, 70])
def test_shapes(c, vocab):
    logits, ids = logits_of(c, vocab), ids_of(c, vocab)
    grad = torch.randn(ids.shape, generator=torch.Generator().manual_seed(1))
    stats, out = run(logits, ids, 1.0, grad)
    logp, entropy, exact = reference(logits, ids, 1.0, grad)
    torch.testing.assert_close(stats.logp.double(), logp, rtol=1e-6, atol=2.5e-6)
    torch.testing.assert_close(stats.entropy.double(), entropy, rtol=1e-6, atol=2e-6)
    torch.testing.assert_close(out.double(), exact, rtol=0, atol=2e-6 * float(grad.abs().sum(-1).max() if c else 0) + 1e-9)


@pytest.mark.parametrize("scale", [0.5, 1.0, 2.0, 1 / 0.7])
@pytest.mark.parametrize("kind", ["plain", "peaked", "high", "low"])
def test_offsets_peaks_and_scales(kind, scale):
    logits, ids = logits_of(3, 1000, kind), ids_of(3, 1000)
    stats, out = run(logits, ids, scale, torch.ones(ids.shape))
    logp, entropy, exact = reference(logits, ids, scale)
    torch.testing.assert_close(stats.logp.double(), logp, rtol=2e-7, atol=2.5e-6)
    torch.testing.assert_close(stats.entropy.double(), entropy, rtol=1e-6, atol=2e-6)
    torch.testing.assert_close(out.double(), exact, rtol=0, atol=5e-6 * scale)


def test_bfloat16_rounds_only_where_it_is_written():
    logits, ids = logits_of(7, 1000, dtype=torch.bfloat16), ids_of(7, 1000)
    stats, out = run(logits, ids, 2.0, torch.ones(ids.shape))
    logp, _, exact = reference(logits, ids, 2.0)
    torch.testing.assert_close(stats.logp.double(), logp, rtol=0, atol=2.5e-6)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), exact, rtol=2**-8, atol=1e-6)


def test_rows_of_a_wider_matrix():
    wide = logits_of(6, 300)
    wide[:, 200:] = torch.nan
    logits, ids = wide[:, :200], ids_of(6, 200)
    stats = gather_logprob(logits, ids)
    logp, _, exact = reference(logits, ids, 1.0)
    gather_logprob_grad_(logits, ids, stats, torch.ones(ids.shape))
    torch.testing.assert_close(stats.logp.double(), logp, rtol=0, atol=2.5e-6)
    torch.testing.assert_close(wide[:, :200].double(), exact, rtol=0, atol=1e-5)
    assert wide[:, 200:].isnan().all()


def test_a_repeated_id_gets_both_gradients():
    logits = logits_of(4, 50)
    once, twice = torch.full((4, 1), 7), torch.full((4, 2), 7)
    _, single = run(logits, once, 1.0, torch.ones(4, 1))
    _, double = run(logits, twice, 1.0, torch.ones(4, 2))
    torch.testing.assert_close(double, 2 * single)


def test_absent_ids_give_nothing():
    logits = logits_of(4, 50)
    ids = torch.full((4, 3), -1)
    stats, out = run(logits, ids, 1.0, torch.full((4, 3), torch.nan))
    assert not stats.logp.any()
    assert not out.any()


def test_no_ids_at_all():
    stats = gather_logprob(logits_of(4, 50), torch.zeros(4, 0, dtype=torch.long))
    assert stats.logp.shape == (4, 0)


def test_another_gradient_is_added():
    logits, ids = logits_of(70, 127), ids_of(70, 127)
    added = torch.randn(70, 127)
    _, alone = run(logits, ids, 1.0, torch.ones(ids.shape))
    _, both = run(logits, ids, 1.0, torch.ones(ids.shape), added)
    torch.testing.assert_close(both, alone + added)


def test_annotations_are_checked_here():
    with pytest.raises(jaxtyping.TypeCheckError):
        gather_logprob(torch.zeros(3), torch.zeros(3, 1, dtype=torch.long))
    with pytest.raises(jaxtyping.TypeCheckError):
        gather_logprob(torch.zeros(3, 5), torch.zeros(2, 1, dtype=torch.long))


def test_the_result_has_a_figure_a_row():
    stats = gather_logprob(logits_of(3, 10), ids_of(3, 10))
    assert isinstance(stats, RowStats)
    assert stats.max.shape == stats.log_z.shape == stats.entropy.shape == (3,)
