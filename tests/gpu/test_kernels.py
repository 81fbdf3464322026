"""The kernels on a CUDA device: what the interpreter cannot show. Needs torch, triton and the checkout.

`OPD_GPU_TESTS_ON=cpu TRITON_INTERPRET=1` tries the tests themselves on a CPU: with smaller inputs, and with a whole unit of
bf16's last digit for a half, since the interpreter truncates.
"""

import os

import pytest
import torch
from torch import Tensor

from benchmarks.kernels.check import CHECKS, run
from opd.kernels.divergence import divergence
from opd.kernels.gather import gather_logprob
from opd.kernels.head import LogitForm

DEVICE = os.environ.get("OPD_GPU_TESTS_ON", "cuda")
ON_GPU = DEVICE == "cuda"
KINDS = ["reverse_kl", "forward_kl", "jsd"]
BF16 = torch.bfloat16

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(ON_GPU and not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def logits(c: int, vocab: int, seed: int = 0, dtype: torch.dtype = BF16) -> Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return (3 * torch.randn(c, vocab, generator=generator, device=DEVICE)).to(dtype)


def ids_of(c: int, vocab: int, num_ids: int = 70) -> Tensor:
    """Some absent, some named twice."""
    return torch.randint(-1, vocab, (c, num_ids), generator=torch.Generator(DEVICE).manual_seed(2), device=DEVICE)


def distilled(student: Tensor, teacher: Tensor, **options) -> tuple[Tensor, Tensor]:
    """(rows, gradient of their sum)."""
    leaf = student.detach().requires_grad_()
    rows = divergence(leaf, teacher, mode="recompute", **options)
    return rows.detach(), torch.autograd.grad(rows.sum(), leaf)[0]


def gathered(source: Tensor, ids: Tensor, **options) -> tuple[list[Tensor], Tensor]:
    """(log-probs, entropy, log-sum-exp), gradient of their sum with unequal weights."""
    leaf = source.detach().requires_grad_()
    outputs = gather_logprob(leaf, ids, **options)
    upstream = [torch.linspace(0.5, 2, out.numel(), device=DEVICE).view(out.shape) for out in outputs]
    return [out.detach() for out in outputs], torch.autograd.grad(list(outputs), leaf, upstream)[0]


def exact_divergence(student: Tensor, teacher: Tensor, kind: str, beta: float = 0.5) -> tuple[Tensor, Tensor]:
    leaf = student.double().requires_grad_()
    log_q, log_p = leaf.log_softmax(-1), teacher.double().log_softmax(-1)
    q, p = log_q.exp(), log_p.exp()
    log_m = (beta * p + (1 - beta) * q).log()
    jsd = beta * p * (log_p - log_m) + (1 - beta) * q * (log_q - log_m)
    rows = {"reverse_kl": q * (log_q - log_p), "forward_kl": p * (log_p - log_q), "jsd": jsd}[kind].sum(-1)
    return rows.detach(), torch.autograd.grad(rows.sum(), leaf)[0]


def exact_gathered(source: Tensor, ids: Tensor) -> tuple[list[Tensor], Tensor]:
    leaf = source.double().requires_grad_()
    logp = leaf.log_softmax(-1)
    outputs = [
        logp.gather(-1, ids.clamp(min=0)).masked_fill(ids < 0, 0.0),
        -(logp.exp() * logp).sum(-1),
        leaf.logsumexp(-1),
    ]
    upstream = [torch.linspace(0.5, 2, out.numel(), device=DEVICE).double().view(out.shape) for out in outputs]
    return [out.detach() for out in outputs], torch.autograd.grad(outputs, leaf, upstream)[0]


def assert_rounded_once(gradient: Tensor, exact: Tensor) -> None:
    """Within half a unit of bf16's last digit, entry by entry, and what fp32 maths may be off; not biased towards 0."""
    assert gradient.dtype == BF16
    half_unit = torch.exp2(exact.abs().clamp(min=1e-30).log2().floor() - 8) * (1 if ON_GPU else 2)
    off = (gradient.double() - exact).abs() - 2e-6 * exact.abs().max()
    assert (off <= half_unit).all()
    if ON_GPU:
        large = exact.abs() > 1e-3 * exact.abs().max()
        smaller = (gradient.double().abs() < exact.abs())[large].double().mean()
        assert 0.4 < smaller < 0.6


@pytest.mark.parametrize("check", CHECKS)
def test_against_float64(check):
    findings = run(check, DEVICE, small=not ON_GPU)
    assert findings
    assert [finding for finding in findings if not finding.ok] == []


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_rounded_to_nearest(kind):
    student, teacher = logits(64 if ON_GPU else 8, 5000), logits(64 if ON_GPU else 8, 5000, 1)
    if kind == "jsd":
        teacher = (student + 0.3 * teacher).to(BF16)
    assert_rounded_once(distilled(student, teacher, kind=kind)[1], exact_divergence(student, teacher, kind)[1])


def test_gradients_at_ids_are_rounded_to_nearest_once():
    source, ids = logits(64 if ON_GPU else 8, 500), ids_of(64 if ON_GPU else 8, 500)
    assert_rounded_once(gathered(source, ids)[1], exact_gathered(source, ids)[1])


@pytest.mark.parametrize("softcap", [None, 30.0])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("kind", KINDS)
def test_equal_rows_give_exactly_nothing(kind, temperature, softcap):
    """No fused multiply-add may leave the rounding of one side's product behind."""
    form = LogitForm(1 / temperature, softcap)
    for dtype in (BF16, torch.float32):
        student = logits(40, 5000, dtype=dtype)
        for found in distilled(student, student.clone(), kind=kind, student_form=form, teacher_form=form):
            assert not found.any()


def assert_all_close(ours: list[Tensor], exact: list[Tensor]) -> None:
    for own, value in zip(ours, exact, strict=True):
        torch.testing.assert_close(own.double(), value, rtol=1e-6, atol=3e-6)


@pytest.mark.parametrize("in_place", [False, True])
def test_rows_beyond_two_to_the_31_elements(in_place):
    """The last of three rows, 2^30 + 8 elements apart."""
    vocab, apart = 1000, 2**30 + 8
    if ON_GPU and torch.cuda.mem_get_info()[0] < 9 * apart:
        pytest.skip("needs 9 GiB of device memory")
    wide = torch.empty(2 * apart + vocab, dtype=BF16, device=DEVICE).as_strided((3, vocab), (apart, 1))
    teacher, ids = logits(3, vocab, 1), ids_of(3, vocab, 4)
    wide.copy_(logits(3, vocab))
    rows, gradient = distilled(wide, teacher, inplace=in_place)
    exact_rows, exact_gradient = exact_divergence(logits(3, vocab), teacher, "reverse_kl")
    assert_all_close([rows], [exact_rows])
    assert_rounded_once(gradient, exact_gradient)
    wide.copy_(logits(3, vocab))
    outputs, gradient = gathered(wide, ids, inplace=in_place)
    exact_outputs, exact_gradient = exact_gathered(logits(3, vocab), ids)
    assert_all_close(outputs, exact_outputs)
    assert_rounded_once(gradient, exact_gradient)


def test_seventy_thousand_rows():
    c, vocab = 70_000 if ON_GPU else 70, 1000
    student, teacher, ids = logits(c, vocab), logits(c, vocab, 1), ids_of(c, vocab, 4)
    last = slice(c - 5, c)
    rows, gradient = distilled(student, teacher)
    exact_rows, exact_gradient = exact_divergence(student[last], teacher[last], "reverse_kl")
    assert_all_close([rows[last]], [exact_rows])
    assert_rounded_once(gradient[last], exact_gradient)
    outputs, _ = gathered(student, ids)
    assert_all_close([out[last] for out in outputs], exact_gathered(student[last], ids[last])[0])


@pytest.mark.parametrize("c", [2, 2000 if ON_GPU else 20])
@pytest.mark.parametrize("kind", [*KINDS, "gather"])
def test_the_same_bits_every_time(kind, c):
    """A few rows are cut into slices, many are not."""
    student, teacher, ids = logits(c, 20_000), logits(c, 20_000, 1), ids_of(c, 20_000)

    def once() -> list[Tensor]:
        if kind == "gather":
            outputs, gradient = gathered(student, ids)
            return [*outputs, gradient]
        return list(distilled(student, teacher, kind=kind))

    first = once()
    for _ in range(5 if ON_GPU else 1):
        assert all(torch.equal(one, other) for one, other in zip(first, once(), strict=True))
