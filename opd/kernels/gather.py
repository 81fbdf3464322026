"""Log-probs at given ids, entropy and normaliser of rows of logits, without a [N, V] log-softmax.

`gather_logprob` is differentiable in the logits; the other functions are what it is made of, for those who hold the logits
of one chunk at a time. Kernels: `gather_triton` on CUDA, `gather_torch` elsewhere.
Shape legend: N or c rows, V columns in use, R columns of the matrix, M ids a row.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from opd.kernels import gather_torch
from opd.kernels.checks import check_shape, check_temperature
from opd.kernels.dispatch import on_triton
from opd.kernels.head import PLAIN, LogitForm
from opd.kernels.partials import GatherPartials, RowStats, row_stats_of
from opd.kernels.shapes import Bool, Float, Int


class Gathered(NamedTuple):
    """Of each row, fp32; 0 in rows that were not read."""

    logp: Tensor  # [N, M] natural log; 0 where the id is -1
    entropy: Tensor  # [N] nats
    lse: Tensor  # [N] log of the sum of the exponentials


def gather_logprob(
    logits: Tensor,
    ids: Tensor,
    mask: Tensor | None = None,
    *,
    temperature: float = 1.0,
    vocab: int | None = None,
    form: LogitForm | None = None,
    inplace: bool = False,
) -> Gathered:
    """Log-probs of `ids` under softmax(logits / temperature), with entropy and log-sum-exp of the row, in one pass.

    All three are differentiable in `logits` [N, R] (fp32, bf16, fp16 or float64, any row stride). Negative `ids` [N, M] are
    absent; an id may be named twice. Columns from `vocab` on are never read, nor are rows outside `mask` [N]. `form` says
    what is done to the logits before the softmax, instead of `temperature`. A few floats a row are saved; the backward pass
    computes the gradient, with `inplace` over `logits`, whose values are then lost.

    Raises `ValueError` for shapes that do not agree, and for ids from `vocab` on; on CUDA, where to look would make the host
    wait, their log-probs are NaN.
    """
    vocab = logits.shape[-1] if vocab is None else vocab
    check_temperature(temperature)
    if logits.ndim != 2:
        raise ValueError(f"logits: a matrix, not {tuple(logits.shape)}")
    if ids.ndim != 2 or len(ids) != len(logits):
        raise ValueError(f"ids: a matrix with a row for each of {tuple(logits.shape)}, not {tuple(ids.shape)}")
    if not 1 <= vocab <= logits.shape[1]:
        raise ValueError(f"vocab: between 1 and {logits.shape[1]}, not {vocab}")
    check_shape("mask", mask, logits.shape[:1])
    form = LogitForm(1 / temperature) if form is None else form
    mask = None if mask is None else mask.bool()
    return Gathered(*_Gather.apply(logits, ids, mask, vocab, form, inplace))  # type: ignore[misc]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, ids, mask, vocab, form, inplace):  # type: ignore[no-untyped-def]
        stats = gather_stats(logits.detach()[:, :vocab], ids, form, mask)
        ctx.vocab, ctx.form, ctx.inplace = vocab, form, inplace
        ctx.save_for_backward(logits)
        ctx.others = ids, mask, stats.logp, stats.entropy, stats.max, stats.log_z  # none has a gradient
        ctx.set_materialize_grads(False)
        return stats.logp, stats.entropy, stats.lse if mask is None else stats.lse.masked_fill(~mask, 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_logp, grad_entropy, grad_lse):  # type: ignore[no-untyped-def]
        (logits,), (ids, mask, *saved) = ctx.saved_tensors, ctx.others
        stats = RowStats(*saved, scale=ctx.form.scale)
        grads = [torch.zeros_like(stats.logp) if grad_logp is None else grad_logp, grad_entropy, grad_lse]
        if mask is not None:
            grads = [None if grad is None else (grad.mT * mask).mT if grad.ndim == 2 else grad * mask for grad in grads]
        whole = logits.detach() if ctx.inplace else torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
        whole[:, ctx.vocab :] = 0.0
        used = logits.detach()[:, : ctx.vocab]
        gather_grad(used, ids, stats, *grads, form=ctx.form, out=whole[:, : ctx.vocab])
        return whole, *[None] * 5


def gather_stats(
    logits: Float[Tensor, "c V"],
    ids: Int[Tensor, "c M"],
    form: LogitForm = PLAIN,
    live: Bool[Tensor, " c"] | None = None,
) -> RowStats:
    """What `gather_logprob` returns, and what its gradient needs; 0 in rows that are not live."""
    return row_stats_of(gather_partials(logits, ids, live, form), ids, form.scale)


def gather_partials(
    logits: Float[Tensor, "c V"], ids: Int[Tensor, "c M"], live: Bool[Tensor, " c"] | None, form: LogitForm
) -> GatherPartials:
    """One pass over these columns, which may be some of a row's alone."""
    return _twin(logits).partials(logits, ids, live, form)


def gather_grad(
    logits: Float[Tensor, "c V"],
    ids: Int[Tensor, "c M"],
    stats: RowStats,
    grad_logp: Float[Tensor, "c M"],
    grad_entropy: Float[Tensor, " c"] | None = None,
    grad_lse: Float[Tensor, " c"] | None = None,
    form: LogitForm = PLAIN,
    add: Float[Tensor, "c V"] | None = None,
    out: Float[Tensor, "c V"] | None = None,
) -> None:
    """Writes the gradient with respect to `logits`, plus `add` where given, to `out`, by default over the logits."""
    out = logits if out is None else out
    _twin(logits).grad(logits, ids, stats, grad_logp, grad_entropy, grad_lse, form, add, out)


def _twin(logits: Tensor) -> Any:
    """The module that computes on this device."""
    if on_triton(logits):
        from opd.kernels import gather_triton

        return gather_triton
    return gather_torch
