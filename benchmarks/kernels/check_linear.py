"""Checks of the losses that start from hidden states: see `benchmarks.kernels.check`. Several chunks, both modes.

Shape legend: N rows, H hidden size, R rows of a head, of which V are tokens, M or K ids a row. A head's logits are rounded
to its type, in the reference, too; in bf16 the gradient of the logits is rounded as well, which the bounds allow for.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels.finding import Finding, gradient_finding, loss_finding
from opd.kernels.head import OutputHead
from opd.kernels.linear import (
    TeacherSampled,
    TeacherStates,
    TeacherTopK,
    linear_gather_logprob,
    linear_reverse_kl,
)
from opd.kernels.topk import topk_divergence

ROWS, HIDDEN, TEACHER_HIDDEN, VOCAB, PADDED, CHUNK_ROWS = 70, 64, 96, 1000, 8, 32
BOUNDS = {torch.float32: (1e-5, 1e-5), torch.bfloat16: (2e-3, 2e-2)}  # of losses and of gradients, relative
ABSOLUTE = 1e-5  # of log-probs that products in another order give, and of their differences
TEMPERATURE = 2.0


@dataclass(frozen=True)
class Head:
    """A head's tensors, and how its logits are formed."""

    weight: Tensor  # [R, H]
    bias: Tensor | None  # [R]
    scale: float
    softcap: float | None

    def exact(self, hidden: Tensor, dtype: torch.dtype) -> Tensor:
        """Log-probs [N, V] in float64 from float64 inputs, of logits rounded to `dtype`."""
        raw = hidden @ self.weight[:VOCAB].t()
        raw = raw if self.bias is None else raw + self.bias[:VOCAB]
        raw = raw + (raw.to(dtype) - raw).detach()
        capped = raw if self.softcap is None else self.softcap * (raw / self.softcap).tanh()
        return torch.log_softmax(capped * self.scale / TEMPERATURE, -1)

    def doubled(self) -> "Head":
        weight, bias = (None if part is None else part.detach().double() for part in (self.weight, self.bias))
        assert weight is not None
        return Head(weight, bias, self.scale, self.softcap)

    @property
    def leaves(self) -> list[Tensor]:
        return [part.requires_grad_() for part in (self.weight, self.bias) if part is not None]

    def ours(self) -> OutputHead:
        return OutputHead(self.weight, self.scale, self.bias, self.softcap)


def linear(device: torch.device, small: bool) -> Iterator[Finding]:
    """All teachers, both modes, plain heads and heads with bias, scale and soft cap."""
    for dtype, mode, plain in product(BOUNDS, ("fused", "recompute"), (True, False)):
        if small and plain:
            continue
        case = f"{str(dtype).removeprefix('torch.')} {mode}{'' if plain else ' bias scale softcap'}"
        head = make_head(HIDDEN, dtype, plain, device)
        hidden = (torch.randn(ROWS, HIDDEN, device=device)).to(dtype)
        for teacher in ("states", "top-k", "sampled"):
            yield from one_divergence(f"{teacher} {case}", teacher, mode, head, hidden)
        yield from one_gather(f"gather {case}", mode, head, hidden)


def make_head(hidden: int, dtype: torch.dtype, plain: bool, device: torch.device) -> Head:
    weight = torch.randn(VOCAB + PADDED, hidden, device=device) * 2 * hidden**-0.5
    weight[VOCAB:] = torch.nan
    if plain:
        return Head(weight.to(dtype), None, 1.0, None)
    return Head(weight.to(dtype), torch.randn(len(weight), device=device).to(dtype), 1.5, 4.0)


def one_divergence(case: str, teacher: str, mode: str, head: Head, hidden: Tensor) -> Iterator[Finding]:
    """The loss as it is with `fused`, rows with an upstream gradient of their own with `recompute`."""
    device, dtype = hidden.device, hidden.dtype
    weight = torch.rand(ROWS, device=device) + 0.5
    weight[::3] = 0.0
    exact_head, values = head.doubled(), hidden.double().requires_grad_()
    leaves = [values, *exact_head.leaves]
    log_q = exact_head.exact(values, dtype)
    asked, rows = taught(teacher, log_q, dtype, device)
    upstream = torch.ones(ROWS, device=device) if mode == "fused" else torch.rand(ROWS, device=device) - 0.3
    rows = rows.where(weight != 0, 0.0)
    (rows * weight * upstream).sum().backward()
    own = [hidden.detach().clone().requires_grad_(), *head.leaves]
    options: dict[str, Any] = {"temperature": TEMPERATURE, "vocab": VOCAB, "mode": mode}
    options["max_bytes"] = CHUNK_ROWS * VOCAB * dtype.itemsize
    loss = linear_reverse_kl(own[0], head.ours(), asked, weight, **options)
    (loss.loss if mode == "fused" else (loss.rows * weight * upstream).sum()).backward()
    yield loss_finding("linear", case, loss.rows.detach(), rows.detach(), BOUNDS[dtype][0], ABSOLUTE)
    yield from gradients(case, own, leaves)


def taught(teacher: str, log_q: Tensor, dtype: torch.dtype, device: torch.device) -> tuple[Any, Tensor]:
    """(the teacher as the loss takes it, divergence [N] in float64)."""
    head = make_head(TEACHER_HIDDEN, dtype, plain=False, device=device)
    hidden = torch.randn(ROWS, TEACHER_HIDDEN, device=device).to(dtype)
    log_p = head.doubled().exact(hidden.double(), dtype)
    if teacher == "states":
        return TeacherStates(hidden, head.ours()), (log_q.exp() * (log_q - log_p)).sum(-1)
    if teacher == "sampled":
        ids = torch.randint(VOCAB, (ROWS,), device=device)
        own, logps = (log.gather(-1, ids[:, None])[:, 0] for log in (log_q, log_p.float()))
        advantage = own.detach() - logps
        return TeacherSampled(ids, logps), advantage + advantage * (own - own.detach())
    logps, ids = log_p.float().topk(8, -1)
    tail = 1 - logps.exp().sum(-1)
    rows = topk_divergence(log_q.gather(-1, ids), logps.double(), tail.double(), ids >= 0)
    return TeacherTopK(ids, logps, tail), rows


def one_gather(case: str, mode: str, head: Head, hidden: Tensor) -> Iterator[Finding]:
    device, dtype = hidden.device, hidden.dtype
    ids = torch.randint(VOCAB, (ROWS, 4), device=device)
    ids[:, 1], ids[:, 2] = ids[:, 0], -1
    mask = torch.arange(ROWS, device=device) % 3 > 0
    by_logp, by_entropy = (torch.rand(shape, device=device) - 0.3 for shape in (ids.shape, (ROWS,)))
    exact_head, values = head.doubled(), hidden.double().requires_grad_()
    leaves = [values, *exact_head.leaves]
    log_q = exact_head.exact(values, dtype)
    logp = log_q.gather(-1, ids.clamp(min=0)).where((ids >= 0) & mask[:, None], 0.0)
    entropy = -(log_q.exp() * log_q).sum(-1).where(mask, 0.0)
    ((logp * by_logp).sum() + (entropy * by_entropy).sum()).backward()
    own = [hidden.detach().clone().requires_grad_(), *head.leaves]
    options: dict[str, Any] = {"temperature": TEMPERATURE, "vocab": VOCAB, "mode": mode}
    options["max_bytes"] = CHUNK_ROWS * VOCAB * dtype.itemsize
    if mode == "fused":
        options |= {"grad_logp": by_logp, "grad_entropy": by_entropy}
    found = linear_gather_logprob(own[0], head.ours(), ids, mask, **options)
    loss = (found.logp * by_logp).sum() + (found.entropy * by_entropy).sum() if found.loss is None else found.loss
    loss.backward()
    bound, _ = BOUNDS[dtype]
    yield loss_finding("linear", f"{case} log-probs", found.logp.detach(), logp.detach(), relative=bound, absolute=ABSOLUTE)
    yield loss_finding(
        "linear", f"{case} entropy", found.entropy.detach(), entropy.detach(), relative=bound, absolute=ABSOLUTE
    )
    yield from gradients(case, own, leaves)


def gradients(case: str, ours: list[Tensor], truths: list[Tensor]) -> Iterator[Finding]:
    """Of hidden states, weight and bias; the last two are 0 beyond the vocabulary. Drops them."""
    for name, own, truth in zip(("hidden", "weight", "bias"), ours, truths):
        _, bound = BOUNDS[own.dtype]
        assert truth.grad is not None
        yield gradient_finding("linear", f"{case} {name}", own.grad, truth.grad, bound)
        own.grad = None
