"""Reverse KL, forward KL and JSD with their gradients against float64 autograd."""

import pytest
import torch

from opd.kernels import blocks
from opd.kernels.divergence import full_divergence_

KINDS = [("reverse_kl", 0.5), ("forward_kl", 0.5), ("jsd", 0.1), ("jsd", 0.5), ("jsd", 0.9)]
SCALES = [(1.0, 1.0), (0.5, 2.0), (2.0, 1.0), (1 / 0.7, 1 / 0.7)]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Blocks of a few rows, so that several of them meet even here."""
    monkeypatch.setattr(blocks, "CACHE_BYTES", 8 * 5000 * 4)


def pair(c: int, vocab: int, case: str = "random") -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(c * vocab)
    student, other = (3 * torch.randn(c, vocab, generator=generator) for _ in range(2))
    peaked = student.clone()
    peaked[:, 0] += 50
    return {
        "random": (student, other),
        "near": (student, student + 1e-3 * other),
        "far offsets": (student + 1e4, other - 1e4),
        "near at an offset": (student + 1e4, (student + 1e4) + 1e-2 * other),
        "peaked student": (peaked, other),
        "peaked teacher": (other, peaked),
        "both peaked apart": (peaked, peaked.flip(-1)),
    }[case]


def reference(student, teacher, weight, kind, beta, student_scale=1.0, teacher_scale=1.0):
    """(divergence of each row, gradient of the weighted sum) in float64."""
    exact = student.double().requires_grad_()
    log_q, log_p = (exact * student_scale).log_softmax(-1), (teacher.double() * teacher_scale).log_softmax(-1)
    if kind == "reverse_kl":
        rows = (log_q.exp() * (log_q - log_p)).sum(-1)
    elif kind == "forward_kl":
        rows = (log_p.exp() * (log_p - log_q)).sum(-1)
    else:
        shares = torch.tensor([beta, 1 - beta], dtype=torch.float64).log()
        log_m = torch.logaddexp(log_p + shares[0], log_q + shares[1])
        rows = (beta * log_p.exp() * (log_p - log_m) + (1 - beta) * log_q.exp() * (log_q - log_m)).sum(-1)
    (rows * weight.double()).sum().backward()
    assert exact.grad is not None
    return rows.detach(), exact.grad


def check(student, teacher, kind, beta, student_scale=1.0, teacher_scale=1.0):
    weight = torch.rand(len(student), generator=torch.Generator().manual_seed(0)) + 0.5
    exact_rows, exact_grad = reference(student, teacher, weight, kind, beta, student_scale, teacher_scale)
    before, grad = student.clone(), teacher.clone()
    rows = full_divergence_(student, grad, weight, kind, beta, student_scale, teacher_scale)
    # logits times a scale that is no power of two are rounded before they are compared
    rounding = 1e-6 if student_scale == 1 / 0.7 else 0.0
    torch.testing.assert_close(rows.double(), exact_rows, rtol=1e-6, atol=3e-7 + rounding)
    # the log-ratio of a row far apart is a large number, and forward KL and JSD keep the rounding of probabilities
    floor = 1e-7 * exact_rows.sum() + (2e-8 if kind == "reverse_kl" else 3e-7) + rounding
    atol = (2e-6 * exact_grad.abs().amax() if len(rows) else 0.0) + student_scale * floor
    torch.testing.assert_close(grad.double(), exact_grad, rtol=0, atol=float(atol))
    assert torch.equal(student, before)


@pytest.mark.parametrize(("kind", "beta"), KINDS)
@pytest.mark.parametrize("vocab", [1, 2, 127, 1000, 5000])
@pytest.mark.parametrize("c", [0, 1, 3, 70])
def test_shapes(c, vocab, kind, beta):
    check(*pair(c, vocab), kind, beta)


@pytest.mark.parametrize(("kind", "beta"), KINDS)
@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize(
    "case",
    ["random", "near", "far offsets", "near at an offset", "peaked student", "peaked teacher", "both peaked apart"],
)
def test_hard_rows(case, scales, kind, beta):
    check(*pair(3, 1000, case), kind, beta, *scales)


@pytest.mark.parametrize(("kind", "beta"), KINDS)
@pytest.mark.parametrize("scale", [0.5, 1.0, 1 / 0.7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_rows_give_exactly_nothing(kind, beta, scale, dtype):
    student = pair(20, 1000)[0].to(dtype)
    grad = student.clone()
    rows = full_divergence_(student, grad, torch.ones(20), kind, beta, scale, scale)
    assert not rows.any()
    assert not grad.any()


@pytest.mark.parametrize(("kind", "beta"), KINDS)
def test_bfloat16_rounds_only_where_it_is_written(kind, beta):
    student, teacher = (logits.bfloat16() for logits in pair(7, 1000))
    weight = torch.ones(7)
    exact_rows, exact_grad = reference(student, teacher, weight, kind, beta)
    rows = full_divergence_(student, teacher, weight, kind, beta)
    torch.testing.assert_close(rows.double(), exact_rows, rtol=1e-6, atol=3e-7)
    torch.testing.assert_close(teacher.double(), exact_grad, rtol=2**-8, atol=2e-6 * float(exact_grad.abs().max()))


@pytest.mark.parametrize(("kind", "beta"), KINDS)
def test_rows_of_wider_matrices(kind, beta):
    student, teacher = pair(6, 300)
    for wide in (student, teacher):
        wide[:, 200:] = torch.nan
    weight = torch.ones(6)
    exact_rows, exact_grad = reference(student[:, :200], teacher[:, :200], weight, kind, beta)
    rows = full_divergence_(student[:, :200], teacher[:, :200], weight, kind, beta)
    torch.testing.assert_close(rows.double(), exact_rows, rtol=1e-6, atol=3e-7)
    torch.testing.assert_close(teacher[:, :200].double(), exact_grad, rtol=0, atol=5e-6)
    assert teacher[:, 200:].isnan().all()


@pytest.mark.parametrize(("kind", "beta"), KINDS)
def test_a_row_of_weight_zero_has_no_gradient(kind, beta):
    student, teacher = pair(3, 127)
    full_divergence_(student, teacher, torch.tensor([1.0, 0.0, 1.0]), kind, beta)
    assert teacher[0].any()
    assert not teacher[1].any()


def test_the_direction_of_each_divergence():
    """The teacher has two modes, the student one of them: the reverse KL hardly minds, the forward KL does."""
    student, teacher = torch.tensor([[0.0, -12.0, -12.0]]), torch.tensor([[0.0, 0.0, -12.0]])
    rows = {kind: float(full_divergence_(student, teacher.clone(), torch.ones(1), kind)) for kind, _ in KINDS}
    assert rows["reverse_kl"] == pytest.approx(0.693, abs=1e-2)
    assert rows["forward_kl"] == pytest.approx(5.3, abs=0.1)
    assert 0 < rows["jsd"] < 0.693
