"""The same over a vocabulary that is split among processes (tensor parallel heads): every process holds some columns.

Each process reduces its own columns to a few floats a row (`opd.kernels.partials`); these are gathered and merged, and the
gradient with respect to a process's own columns needs no more. What crosses the processes is 6 floats a row for a divergence
(the JSD 2 more, after its normalisers are known) and 3 + 2 M for log-probs at M ids, whatever the size of the vocabulary.

Shape legend: N rows, V columns of this process, M ids a row. All processes hold the same rows in the same order.
"""

from dataclasses import replace
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from opd.kernels.checks import check_divergence, check_shape
from opd.kernels.divergence import divergence_grad, divergence_partials, jsd_sums
from opd.kernels.gather import Gathered, gather_grad, gather_partials
from opd.kernels.head import PLAIN, LogitForm
from opd.kernels.partials import (
    DivergencePartials,
    DivergenceStats,
    GatherPartials,
    RowStats,
    astuple_of,
    divergence_stats_of,
    merge_divergence,
    merge_gather,
    row_stats_of,
)

P = TypeVar("P", DivergencePartials, GatherPartials)


def parallel_divergence(
    student: Tensor,
    teacher: Tensor,
    weight: Tensor | None = None,
    *,
    kind: str = "reverse_kl",
    beta: float = 0.5,
    student_form: LogitForm = PLAIN,
    teacher_form: LogitForm = PLAIN,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """weight * divergence of each row [N], in nats, fp32, the same on all processes, as `opd.kernels.divergence.divergence`.

    `student` and `teacher`: this process's columns [N, V] of both models' logits. Differentiable in `student`: each process
    gets the gradient of its own columns of the one loss, so the upstream gradient must be the same on all of them.
    """
    check_divergence(kind, beta)
    check_shape("weight", weight, student.shape[:1])
    if student.shape != teacher.shape:
        raise ValueError(f"teacher: the same columns as the student, {tuple(student.shape)}, not {tuple(teacher.shape)}")
    weight = torch.ones(len(student), device=student.device) if weight is None else weight
    return _Divergence.apply(student, teacher, weight, (kind, beta, student_form, teacher_form), group)  # type: ignore[return-value]


def parallel_gather_logprob(
    logits: Tensor, ids: Tensor, first: int, *, form: LogitForm = PLAIN, group: dist.ProcessGroup | None = None
) -> Gathered:
    """Log-probs of `ids` [N, M], entropy and log-sum-exp of each row, the same on all processes, as
    `opd.kernels.gather.gather_logprob`.

    `logits`: this process's columns [N, V], of which the first is the one of id `first`. Differentiable as
    `parallel_divergence` is.
    """
    return Gathered(*_Gather.apply(logits, ids, first, form, group))  # type: ignore[misc]


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, student, teacher, weight, options, group):  # type: ignore[no-untyped-def]
        kind, beta, *forms = options
        used, live = (student.detach(), teacher.detach()), weight != 0
        parts = _gathered(divergence_partials(*used, live, kind, *forms), group)
        stats = divergence_stats_of(merge_divergence(parts, kind, *(form.scale for form in forms)), kind)
        if kind == "jsd":
            sums = torch.stack(jsd_sums(*used, stats, live, beta, *forms))
            dist.all_reduce(sums, group=group)
            stats = replace(stats, divergence=sums[0], mean=sums[1])
        ctx.options = options
        ctx.save_for_backward(student, teacher, weight, *stats.saved(kind))
        return weight * stats.divergence

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream):  # type: ignore[no-untyped-def]
        student, teacher, weight, *saved = ctx.saved_tensors
        stats = DivergenceStats.restored(ctx.options[0], tuple(saved))
        out = torch.empty(student.shape, dtype=student.dtype, device=student.device)
        divergence_grad(student.detach(), teacher.detach(), stats, upstream * weight, *ctx.options, out=out)
        return out, None, None, None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, ids, first, form, group):  # type: ignore[no-untyped-def]
        own = _own(ids, first, logits.shape[1])
        parts = _gathered(gather_partials(logits.detach(), own, None, form), group)
        owned = _all(own >= 0, group)
        stats = row_stats_of(merge_gather(parts, owned, form.scale), ids, form.scale)
        ctx.first, ctx.form = first, form
        ctx.save_for_backward(logits, ids, *astuple_of(stats)[:4])
        ctx.set_materialize_grads(False)
        return stats.logp, stats.entropy, stats.lse

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_logp, grad_entropy, grad_lse):  # type: ignore[no-untyped-def]
        logits, ids, *saved = ctx.saved_tensors
        stats = RowStats(*saved, scale=ctx.form.scale)
        own = _own(ids, ctx.first, logits.shape[1])
        grad_logp = torch.zeros_like(stats.logp) if grad_logp is None else grad_logp.masked_fill(ids < 0, 0.0)
        # of ids that lie with others, this process's columns feel the normaliser alone
        elsewhere = -grad_logp.masked_fill(own >= 0, 0.0).sum(-1)
        grad_lse = elsewhere if grad_lse is None else grad_lse + elsewhere
        out = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
        gather_grad(logits.detach(), own, stats, grad_logp, grad_entropy, grad_lse, form=ctx.form, out=out)
        return out, None, None, None, None


def _own(ids: Tensor, first: int, width: int) -> Tensor:
    """Columns of this process that hold the ids; -1 where another one does."""
    inside = (ids >= first) & (ids < first + width)
    return (ids - first).masked_fill(~inside, -1)


def _gathered(parts: P, group: dist.ProcessGroup | None) -> P:
    """All processes' parts, each field stacked along a new first dimension, in one exchange."""
    columns = astuple_of(parts)
    flat = torch.cat([column.reshape(len(column), column.shape[1:].numel()) for column in columns], dim=1)
    every = _all(flat, group)
    widths = [column.shape[1:].numel() for column in columns]
    fields = [part.reshape(len(every), *column.shape) for part, column in zip(every.split(widths, dim=-1), columns)]
    return type(parts)(*fields)


def _all(value: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """[processes, ...] in the order of their ranks."""
    out = [torch.empty_like(value) for _ in range(dist.get_world_size(group))]
    dist.all_gather(out, value.contiguous(), group=group)
    return torch.stack(out)
