"""Divergences over a teacher's most likely tokens.

The same tests run on the torch twins and, under TRITON_INTERPRET=1, on the Triton kernels (see test_interpreter.py).
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from opd.kernels import topk_reverse_kl
from opd.kernels.topk import OUTSIDE, topk_divergence

KINDS = [("reverse_kl", 0.5), ("forward_kl", 0.5), ("jsd", 0.1), ("jsd", 0.9)]


def rows(c: int, vocab: int, seed: int = 0, sharpness: float = 2.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [c, V] of student and teacher, the latter not far away."""
    generator = torch.Generator().manual_seed(seed)
    student = sharpness * torch.randn(c, vocab, generator=generator)
    return student, student + torch.randn(c, vocab, generator=generator)


def told(teacher: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(log-probs, tail, present) at `ids` [c, K]; -1 is absent."""
    log_p, present = teacher.log_softmax(-1).gather(-1, ids.clamp(min=0)), ids >= 0
    mass = (log_p.double().exp() * present).sum(-1)
    return log_p.masked_fill(~present, 0.0), (1 - mass).clamp(min=0).float(), present


def topk(student, teacher, ids, kind="reverse_kl", beta=0.5, outside="tail", weight=None):
    """(weighted divergence of each row, gradient of their sum with respect to the student's logits)."""
    logits = student.detach().requires_grad_()
    log_p, tail, _ = told(teacher, ids)
    values = topk_reverse_kl(logits, ids, log_p, tail, weight, outside=outside, kind=kind, beta=beta)
    return values.detach(), torch.autograd.grad(values.sum(), logits)[0]


def full(student, teacher, kind, beta):
    exact = student.double().requires_grad_()
    log_q, log_p = exact.log_softmax(-1), teacher.double().log_softmax(-1)
    q, p = log_q.exp(), log_p.exp()
    log_m = (beta * p + (1 - beta) * q).log()
    values = {
        "reverse_kl": q * (log_q - log_p),
        "forward_kl": p * (log_p - log_q),
        "jsd": beta * p * (log_p - log_m) + (1 - beta) * q * (log_q - log_m),
    }[kind].sum(-1)
    return values.detach().float(), torch.autograd.grad(values.sum(), exact)[0].float()


@pytest.mark.parametrize("outside", OUTSIDE)
@pytest.mark.parametrize(("kind", "beta"), KINDS)
@pytest.mark.parametrize("vocab", [1, 2, 50, 1000])
def test_all_tokens_are_the_full_divergence(vocab, kind, beta, outside):
    student, teacher = rows(4, vocab)
    ids = torch.argsort(torch.rand(4, vocab, generator=torch.Generator().manual_seed(1)), -1)
    values, gradient = topk(student, teacher, ids, kind, beta, outside)
    exact, exact_gradient = full(student, teacher, kind, beta)
    torch.testing.assert_close(values, exact, rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(gradient, exact_gradient, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize(("kind", "beta"), KINDS)
def test_the_tail_bucket_approaches_the_full_divergence_from_below(kind, beta):
    student, teacher = rows(20, 1000, sharpness=4.0)
    exact, exact_gradient = full(student, teacher, kind, beta)
    errors, directions = [], []
    for k in (1, 8, 64, 512):
        values, gradient = topk(student, teacher, student.topk(k).indices, kind, beta)
        assert (values <= exact + 1e-5).all()  # merging tokens loses information
        errors.append(float((exact - values).mean() / exact.mean()))
        directions.append(float(torch.cosine_similarity(gradient.flatten(), exact_gradient.flatten(), dim=0)))
    assert errors == sorted(errors, reverse=True)
    assert errors[2] < 0.05
    assert directions[2] > 0.99


@given(st.integers(0, 10**6), st.sampled_from(OUTSIDE), st.sampled_from(KINDS), st.integers(1, 12))
@settings(max_examples=100, deadline=None, derandomize=True, database=None)
def test_never_negative(seed, outside, kind, k):
    student, teacher = rows(8, 12, seed)
    ids = torch.argsort(torch.rand(8, 12, generator=torch.Generator().manual_seed(seed)), -1)[:, :k]
    values, gradient = topk(student, teacher, ids, kind[0], kind[1], outside)
    assert (values >= -3e-7).all()
    assert gradient.isfinite().all()


@pytest.mark.parametrize("outside", OUTSIDE)
@pytest.mark.parametrize(("kind", "beta"), KINDS)
def test_equal_distributions_have_no_divergence(kind, beta, outside):
    student, _ = rows(5, 50)
    for k in (2, 50):
        values, gradient = topk(student, student, student.topk(k).indices, kind, beta, outside)
        torch.testing.assert_close(values, torch.zeros(5), rtol=0, atol=3e-7)
        torch.testing.assert_close(gradient, torch.zeros(5, 50), rtol=0, atol=1e-6)


@pytest.mark.parametrize("outside", OUTSIDE)
@pytest.mark.parametrize(("kind", "beta"), KINDS)
def test_absent_entries_change_nothing(kind, beta, outside):
    student, teacher = rows(3, 50)
    ids = student.topk(6).indices
    absent = torch.full((3, 2), -1)
    values, gradient = topk(student, teacher, ids, kind, beta, outside)
    padded = topk(student, teacher, torch.cat([absent, ids[:, :3], absent, ids[:, 3:]], 1), kind, beta, outside)
    torch.testing.assert_close(padded, (values, gradient))
    nothing = topk(student, teacher, absent, kind, beta, outside)
    torch.testing.assert_close(nothing, (torch.zeros(3), torch.zeros(3, 50)))


def test_the_three_treatments_of_the_tail_by_hand():
    log_q, log_p = torch.tensor([[0.5, 0.2]]).log(), torch.tensor([[0.4, 0.4]]).log()
    given = log_q, log_p, torch.tensor([0.2]), torch.ones(1, 2, dtype=torch.bool)
    value = {outside: topk_divergence(*given, outside=outside).item() for outside in OUTSIDE}
    inside = 0.5 * math.log(0.5 / 0.4) + 0.2 * math.log(0.2 / 0.4)
    assert value["tail"] == pytest.approx(inside + 0.3 * math.log(0.3 / 0.2))
    assert value["truncate"] == pytest.approx(inside - 0.7 + 0.8)
    five, two = 5 / 7, 2 / 7
    assert value["renormalise"] == pytest.approx(five * math.log(five / 0.5) + two * math.log(two / 0.5))


@pytest.mark.parametrize("outside", OUTSIDE)
@pytest.mark.parametrize(("kind", "beta"), KINDS)
def test_probabilities_that_underflow_are_no_nan(kind, beta, outside):
    log_q, log_p = torch.tensor([[-0.1, -200.0]], requires_grad=True), torch.tensor([[-0.2, -150.0]])
    present = torch.ones(1, 2, dtype=torch.bool)
    value = topk_divergence(log_q, log_p, torch.tensor([0.0]), present, outside=outside, kind=kind, beta=beta)
    (gradient,) = torch.autograd.grad(value.sum(), log_q)
    assert value.isfinite().all()
    assert gradient.isfinite().all()


@pytest.mark.parametrize("outside", OUTSIDE)
def test_tokens_that_the_teacher_does_not_have_are_conditioned_away(outside):
    logits = torch.randn(8, generator=torch.Generator().manual_seed(0)).double().requires_grad_()
    own, unknown = [0, 2, 3, 5], torch.tensor([[False, True, False, True]])
    log_p, tail = torch.tensor([[0.5, 0.3]]).log().double(), torch.tensor([0.2]).double()
    spread = torch.tensor([[log_p[0, 0], 0.0, log_p[0, 1], 0.0]]).double()
    present = torch.ones(1, 4, dtype=torch.bool)
    loss = topk_divergence(logits.log_softmax(-1)[own][None], spread, tail, present, outside=outside, unknown=unknown)
    (gradient,) = torch.autograd.grad(loss.sum(), logits)
    kept = [0, 1, 3, 4, 6, 7]  # all but the two that the teacher does not have
    conditioned = logits.detach()[kept].requires_grad_()
    expected = topk_divergence(conditioned.log_softmax(-1)[[0, 2]][None], log_p, tail, present[:, :2], outside=outside)
    torch.testing.assert_close(loss, expected)
    (plain,) = torch.autograd.grad(expected.sum(), conditioned)
    torch.testing.assert_close(gradient[kept], plain)
    torch.testing.assert_close(gradient[[2, 5]], torch.zeros(2, dtype=torch.float64))  # nothing pushes these up or down


@pytest.mark.parametrize("outside", OUTSIDE)
@pytest.mark.parametrize(("kind", "beta"), KINDS)
@pytest.mark.parametrize("vocab", [127, 5000])
def test_the_same_in_float64(vocab, kind, beta, outside):
    student, teacher = rows(5, vocab)
    ids, weight = student.topk(16).indices, torch.tensor([1.0, 0.5, 0.0, -2.0, 1.0])
    values, gradient = topk(student, teacher, ids, kind, beta, outside, weight)
    exact, exact_gradient = topk(student.double(), teacher.double(), ids, kind, beta, outside, weight.double())
    torch.testing.assert_close(values.double(), exact, rtol=2e-6, atol=1e-6)
    atol = 4e-6 * float(exact_gradient.abs().max())
    torch.testing.assert_close(gradient.double(), exact_gradient, rtol=0, atol=atol)


def test_more_ids_than_tokens():
    student, teacher = rows(3, 5)
    ids = torch.cat([torch.arange(5).expand(3, 5), torch.full((3, 4), -1)], 1)
    values, gradient = topk(student, teacher, ids)
    exact, exact_gradient = full(student, teacher, "reverse_kl", 0.5)
    torch.testing.assert_close(values, exact, rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(gradient, exact_gradient, rtol=1e-5, atol=2e-6)


def test_rows_of_weight_zero_are_not_read():
    student, teacher = rows(4, 50)
    ids, weight = student.topk(6).indices, torch.tensor([1.0, 0.0, 2.0, 0.0])
    student[1] = torch.nan
    values, gradient = topk(student, teacher, ids, weight=weight)
    alone = topk(student[::2], teacher[::2], ids[::2], weight=weight[::2])
    torch.testing.assert_close((values[::2], gradient[::2]), alone, rtol=0, atol=0)
    assert not values[1::2].any()
    assert not gradient[1::2].any()


def test_gradcheck_in_float64():
    student, teacher = (logits.double() for logits in rows(3, 9))
    ids = torch.tensor([[0, 3, -1], [8, 1, 2], [-1, -1, 4]])
    log_p, tail, _ = told(teacher, ids)
    assert torch.autograd.gradcheck(
        lambda leaf: topk_reverse_kl(leaf, ids, log_p, tail.double()), student.requires_grad_(), fast_mode=False
    )


def test_mistakes_are_named():
    logits, ids = torch.zeros(2, 5), torch.zeros(2, 1, dtype=torch.long)
    with pytest.raises(ValueError, match="outside: one of tail, renormalise, truncate, not 'drop'"):
        topk_reverse_kl(logits, ids, torch.zeros(2, 1), torch.zeros(2), outside="drop")
    with pytest.raises(ValueError, match=r"logps, tail: of shapes \(2, 1\) and \(2,\)"):
        topk_reverse_kl(logits, ids, torch.zeros(2, 2), torch.zeros(2))
