"""Checks of the kernels that start from logits: see `benchmarks.kernels.check`.

Shape legend: N rows, V columns in use, R columns of the matrix (the rest holds NaN), M or K ids a row.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels.finding import ABSOLUTE, NOTHING, RELATIVE, Finding, gradient_finding, loss_finding, truncating
from opd.kernels.checks import KINDS
from opd.kernels.divergence import divergence
from opd.kernels.gather import gather_logprob
from opd.kernels.head import LogitForm
from opd.kernels.topk import OUTSIDE, topk_divergence, topk_reverse_kl

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
VOCABS, WIDE = (1, 127, 1000, 4096, 5000), 151_936
PADDING = 24  # columns of NaN
MANY_ROWS = 65_536 + 4  # above what the second dimension of a grid takes
BETA, CAP, SUMS = 0.3, 5.0, 8  # SUMS: units of the last digit that a sum over the columns may be off


@dataclass(frozen=True)
class Setting:
    """How a pair of matrices is made, and what is asked of it."""

    vocab: int
    dtype: torch.dtype = FP32
    rows: int = 5
    distance: float | None = None  # of the teacher's logits from the student's; None: independent
    offset: float = 0.0  # of the student's logits; the teacher's have the opposite one
    temperature: float = 1.0
    softcap: float | None = None
    masked: str = "no"  # rows of weight 0: no, some, all
    slack: float = 1.0  # what bounds of values are multiplied by: they are for a few rows, and many have a worse one

    def __str__(self) -> str:
        default = Setting(0)
        said = {name: value for name, value in vars(self).items() if value != getattr(default, name)}
        return " ".join(f"{name}={str(value).removeprefix('torch.')}" for name, value in said.items())

    @property
    def form(self) -> LogitForm:
        return LogitForm(1 / self.temperature, self.softcap)


def settings(small: bool) -> Iterator[Setting]:
    """What every kernel goes through."""
    for place, vocab in enumerate(VOCABS[1::2] if small else (*VOCABS, WIDE)):
        temperature = (1.0, 0.5, 2.0)[place % 3]
        yield Setting(vocab, temperature=temperature)
        yield Setting(vocab, BF16, temperature=temperature)
        yield Setting(vocab, offset=1e4, temperature=temperature)
    base = Setting(1000 if small else 5000)
    for distance in (1e-1, 1e-3, 0.0):
        yield replace(base, distance=distance)
    yield replace(base, distance=1e-3, offset=1e4)
    yield replace(base, dtype=FP16)
    yield replace(base, softcap=CAP, temperature=2.0)
    yield replace(base, masked="some")
    yield replace(base, masked="all")
    yield replace(base, rows=0)


def matrix(setting: Setting, device: torch.device, like: Tensor | None = None) -> Tensor:
    """Logits [N, R] of which every other row of a larger matrix is used; columns from V on are NaN."""
    whole = torch.full((2 * setting.rows, setting.vocab + PADDING), torch.nan, device=device)
    used = whole[::2, : setting.vocab]
    if like is None or setting.distance is None:
        sign = 1 if like is None else -1
        used.normal_().mul_(2 * min(1.0, setting.temperature)).add_(sign * setting.offset)
    else:
        used.normal_().mul_(setting.distance).add_(like[:, : setting.vocab])
    return whole.to(setting.dtype)[::2]


def row_weight(setting: Setting, device: torch.device) -> Tensor:
    """[N]; unequal numbers up to 1, some of them 0 where rows are masked."""
    weight = torch.rand(setting.rows, device=device) * 0.5 + 0.5
    if setting.masked == "all":
        weight.zero_()
    if setting.masked == "some":
        weight[::3] = 0.0
    return weight


def exact(logits: Tensor, setting: Setting) -> tuple[Tensor, Tensor]:
    """(float64 leaf [N, V], log-probs [N, V])."""
    values = logits[:, : setting.vocab].detach().double().requires_grad_()
    capped = values if setting.softcap is None else setting.softcap * (values / setting.softcap).tanh()
    return values, torch.log_softmax(capped / setting.temperature, -1)


def exact_divergence(log_q: Tensor, log_p: Tensor, kind: str) -> Tensor:
    """[N] in nats."""

    def kl(a: Tensor, b: Tensor) -> Tensor:
        return (a.exp() * (a - b)).sum(-1)

    if kind == "jsd":
        mixture = (BETA * log_p.exp() + (1 - BETA) * log_q.exp()).log()
        return BETA * kl(log_p, mixture) + (1 - BETA) * kl(log_q, mixture)
    return kl(log_q, log_p) if kind == "reverse_kl" else kl(log_p, log_q)


def unread(logits: Tensor, weight: Tensor) -> Tensor:
    """With NaN in the rows of weight 0, which must not be read."""
    return logits.masked_fill_((weight == 0)[:, None], torch.nan)


def divergences(device: torch.device, small: bool) -> Iterator[Finding]:
    """Values and gradients of all kinds, in both modes, and rounding."""
    for setting, kind in product(settings(small), KINDS):
        full = setting.vocab in (1000, 5000)
        if kind != "reverse_kl" and not (full or (setting.vocab == WIDE and setting.dtype == FP32)):
            continue
        if kind == "jsd" and setting.distance is None:  # distributions without a common token have no gradient to speak of
            setting = replace(setting, distance=1.0)
        yield from one_divergence(setting, kind, "recompute", device)
        if full and setting.offset == 0:
            yield from one_divergence(setting, kind, "fused", device)
    for kind in KINDS:
        yield rounding(kind, 1000 if small else 5000, device)
        yield repeatable(kind, 1000 if small else 5000, device)


def one_divergence(setting: Setting, kind: str, mode: str, device: torch.device) -> Iterator[Finding]:
    student, weight = matrix(setting, device), row_weight(setting, device)
    teacher = unread(matrix(setting, device, student), weight)
    (values, log_q), (_, log_p) = exact(student, setting), exact(teacher, setting)
    live = weight != 0
    truth = weight.double() * exact_divergence(log_q, log_p.detach().masked_fill(~live[:, None], -1.0), kind)
    upstream = torch.rand(setting.rows, device=device) - 0.3
    truth.backward(upstream.double())
    student = unread(student, weight).detach().requires_grad_()
    forms = {"student_form": setting.form, "teacher_form": setting.form}
    asked: dict[str, Any] = forms | {"kind": kind, "beta": BETA, "vocab": setting.vocab, "mode": mode}
    ours = divergence(student, teacher, weight, **asked)
    ours.backward(upstream)
    case = f"{setting} {mode}"
    bounds = RELATIVE * setting.slack, ABSOLUTE * setting.slack
    yield loss_finding(kind, case, ours.detach(), truth.detach(), *bounds)
    # between near rows the gradient is a difference of probabilities, whose sums have fp32's digits and no more
    share = (weight * upstream)[:, None].abs() * log_q.detach().exp() / setting.temperature
    floor = SUMS * torch.finfo(FP32).eps * share.max().item() if len(share) else 0.0
    options = {"floor": floor + NOTHING, "roundings": 2 if mode == "fused" else 1}
    yield from gradients(kind, case, student.grad, values.grad, setting, **options)


def gradients(
    check: str, case: str, ours: Tensor | None, truth: Tensor | None, setting: Setting, **options: Any
) -> Iterator[Finding]:
    """In the columns in use, and zeros in the others."""
    assert ours is not None
    name = f"{check} {str(setting.dtype).removeprefix('torch.')}"
    yield gradient_finding(name, case, ours[:, : setting.vocab], truth, **options)
    padding = ours[:, setting.vocab :]
    yield gradient_finding(f"{check} padding", case, padding, torch.zeros_like(padding, dtype=torch.float64))


def rounding(kind: str, vocab: int, device: torch.device) -> Finding:
    """A gradient in bf16 is that of the same logits in fp32, rounded to nearest; the interpreter may be a unit off."""
    student, teacher = (matrix(Setting(vocab, BF16), device)[:, :vocab].contiguous() for _ in range(2))
    found = []
    for dtype in (BF16, FP32):
        leaf = student.to(dtype, copy=True).requires_grad_()
        divergence(leaf, teacher.to(dtype), kind=kind, beta=BETA, mode="recompute").sum().backward()
        assert leaf.grad is not None
        found.append(leaf.grad)
    low, high = found
    if truncating():
        return gradient_finding("rounding", kind, low, high.double())
    different = (low != high.to(BF16)).double().mean().item()
    return Finding("rounding", f"{kind}: share of entries that differ", different / 1e-3)


def repeatable(kind: str, vocab: int, device: torch.device) -> Finding:
    """The same call gives the same bits."""
    student, teacher = (matrix(Setting(vocab), device)[:, :vocab] for _ in range(2))
    found = []
    for _ in range(3):
        leaf = student.detach().requires_grad_()
        loss = divergence(leaf, teacher, kind=kind, beta=BETA)
        loss.sum().backward()
        assert leaf.grad is not None
        found.append((loss.detach(), leaf.grad))
    same = all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other))
    return Finding("repeatable", kind, 0.0 if same else float("inf"))


def gathers(device: torch.device, small: bool) -> Iterator[Finding]:
    """Log-probs, entropy and log-sum-exp, with gradients through all three; ids at both ends, twice, absent, and K > V."""
    for setting in settings(small):
        for num_ids in (1, 6, 200) if setting.vocab in (127, 1000, 5000) else (6,):
            yield from one_gather(setting, num_ids, device)


def some_ids(setting: Setting, num_ids: int, device: torch.device) -> Tensor:
    """[N, M]: the last column, the first one, it again, none, and random ones."""
    ids = torch.randint(setting.vocab, (setting.rows, num_ids), device=device)
    special = torch.tensor([setting.vocab - 1, 0, 0, -1], device=device)[:num_ids]
    ids[:, : len(special)] = special
    return ids


def one_gather(setting: Setting, num_ids: int, device: torch.device) -> Iterator[Finding]:
    logits, weight, ids = matrix(setting, device), row_weight(setting, device), some_ids(setting, num_ids, device)
    live = weight != 0
    values, log_q = exact(logits, setting)
    present = (ids >= 0) & live[:, None]
    logp = log_q.gather(-1, ids.clamp(min=0)).where(present, 0.0)
    entropy = -(log_q.exp() * log_q).sum(-1).where(live, 0.0)
    capped = values if setting.softcap is None else setting.softcap * (values / setting.softcap).tanh()
    truths = (logp, entropy, torch.logsumexp(capped / setting.temperature, -1).where(live, 0.0))
    upstream = [torch.rand_like(value) - 0.3 for value in truths]
    sum((value * grad).sum() for value, grad in zip(truths, upstream)).backward()  # type: ignore[union-attr]
    logits = unread(logits, weight).detach().requires_grad_()
    mask = None if setting.masked == "no" else live
    ours = gather_logprob(logits, ids, mask, vocab=setting.vocab, form=setting.form)
    sum((value * grad).sum() for value, grad in zip(ours, upstream)).backward()  # type: ignore[union-attr]
    case = f"{setting} M={num_ids}"
    for name, value, truth in zip(("log-probs", "entropy", "log-sum-exp"), ours, truths):
        bounds = RELATIVE * setting.slack, ABSOLUTE * setting.slack
        yield loss_finding(name, case, value.detach(), truth.detach(), *bounds)
    yield from gradients("gather", case, logits.grad, values.grad, setting)


def topks(device: torch.device, small: bool) -> Iterator[Finding]:
    """Top-K divergences with what becomes of the mass outside."""
    for setting in settings(small):
        if setting.vocab >= 127 and (setting.distance is None or setting.distance > 1e-2):
            for outside in OUTSIDE:
                yield from one_topk(setting, outside, device)


def one_topk(setting: Setting, outside: str, device: torch.device) -> Iterator[Finding]:
    student, weight = matrix(setting, device), row_weight(setting, device)
    _, log_p = exact(matrix(replace(setting, dtype=FP32), device, student.float()), setting)
    logps, ids = log_p.detach().topk(min(8, setting.vocab), -1)
    logps, ids[:, -1:] = logps.float(), -1
    tail = 1 - logps[:, :-1].double().exp().sum(-1).float()
    values, log_q = exact(student, setting)
    options: dict[str, Any] = {"outside": outside, "kind": "reverse_kl"}
    present = ids >= 0
    truth = topk_divergence(log_q.gather(-1, ids.clamp(min=0)), logps.double(), tail.double(), present, **options) * weight
    truth.sum().backward()
    student = unread(student, weight).detach().requires_grad_()
    asked = options | {"vocab": setting.vocab, "form": setting.form}
    ours = topk_reverse_kl(student, ids, logps, tail, weight, **asked)
    ours.sum().backward()
    # the mass outside, or the share of a token in the K, is a difference of log-probs: its digits are those of the larger
    yield loss_finding(f"top-k {outside}", str(setting), ours.detach(), truth.detach(), relative=2e-6)
    assert student.grad is not None
    case, used = f"{setting} {outside}", student.grad[:, : setting.vocab]
    yield gradient_finding(f"top-k {str(setting.dtype).removeprefix('torch.')}", case, used, values.grad, bound=1e-5)


def launches(device: torch.device, small: bool) -> Iterator[Finding]:
    """More rows than a grid's second dimension takes, and rows beyond 2^31 entries; under the interpreter fewer."""
    setting = Setting(5, rows=300 if small or truncating() else MANY_ROWS, slack=3.0)
    yield from one_divergence(setting, "reverse_kl", "recompute", device)
    yield from one_gather(setting, 2, device)
    if device.type == "cuda" and not small:
        yield from far_rows(device)


def far_rows(device: torch.device) -> Iterator[Finding]:
    """The last row of matrices of more than 2^31 entries; the others are masked."""
    rows, setting = 2**31 // WIDE + 2, Setting(WIDE, BF16)
    student, teacher = (torch.empty(rows, WIDE, dtype=BF16, device=device).normal_() for _ in range(2))
    weight = torch.zeros(rows, device=device)
    weight[-1] = 1.0
    (values, log_q), (_, log_p) = exact(student[-1:], setting), exact(teacher[-1:], setting)
    truth = exact_divergence(log_q, log_p.detach(), "reverse_kl")
    (true_gradient,) = torch.autograd.grad(truth.sum(), values, retain_graph=True)
    student.requires_grad_()
    ours = divergence(student, teacher, weight, mode="recompute")
    (gradient,) = torch.autograd.grad(ours.sum(), student)
    yield loss_finding("far rows", "reverse_kl", ours[-1:].detach(), truth.detach())
    yield gradient_finding("far rows", "reverse_kl", gradient[-1:], true_gradient)
    del gradient, teacher
    ids = torch.full((rows, 1), WIDE - 1, device=device)
    truth = log_q[:, -1:]
    (true_gradient,) = torch.autograd.grad(truth.sum(), values)
    logp = gather_logprob(student, ids, weight > 0).logp
    (gradient,) = torch.autograd.grad(logp.sum(), student)
    yield loss_finding("far rows", "log-probs", logp[-1:].detach(), truth.detach())
    yield gradient_finding("far rows", "log-probs", gradient[-1:], true_gradient)
