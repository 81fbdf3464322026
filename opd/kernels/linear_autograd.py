"""What is done to each chunk of logits behind `opd.kernels.linear`, and its two autograd functions.

Shape legend: N rows, c rows of a chunk, H and T hidden sizes of student and teacher, V columns in use, M ids a row.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from opd.kernels.chunks import ChunkLoss, fused_head, logits_buffer
from opd.kernels.divergence import divergence_grad, divergence_stats, divergence_with_grad
from opd.kernels.gather import gather_grad, gather_stats
from opd.kernels.head import OutputHead
from opd.kernels.partials import DivergenceStats, RowStats, astuple_of
from opd.kernels.shapes import Float, Int

Upstream = Callable[[RowStats, slice], tuple[Tensor, Tensor, Tensor | None]]
"""Of some rows: their loss, and its gradients with respect to log-probs [c, M] and entropy [c]."""


@dataclass
class Chunked:
    """Statistics of all rows, and passes over the chunks that `fused_head` makes: each pass is a loss of a chunk."""

    head: OutputHead
    vocab: int
    temperature: float
    chunks: Sequence[slice]
    want: tuple[bool, bool, bool]  # gradients of hidden states, weight, bias
    kept: tuple[Tensor, ...] = field(init=False)
    """Statistics of all rows, there before the first chunk is: small tensors that outlive the large ones of a chunk would
    fragment the heap by hundreds of megabytes."""

    def fused(self) -> ChunkLoss:
        """The loss; leaves its gradient in the logits, and statistics."""
        raise NotImplementedError

    def statistics(self) -> ChunkLoss:
        """Leaves statistics; its value means nothing."""
        raise NotImplementedError

    def gradient(self, *upstream: Tensor | None) -> ChunkLoss:
        """From statistics, leaves the gradient for these upstream gradients of `outputs` in the logits."""
        raise NotImplementedError

    def outputs(self) -> tuple[Tensor, ...]:
        """From statistics, for all rows; new tensors."""
        raise NotImplementedError

    def fused_loss(self, hidden: Float[Tensor, "N H"]) -> Tensor:
        """The sum of `fused`, differentiable once. Its gradients are there already."""
        return _Fused.apply(hidden, self.head.weight, self.head.bias, self)  # type: ignore[return-value]

    def recomputed(self, hidden: Float[Tensor, "N H"]) -> tuple[Tensor, ...]:
        """`outputs`, differentiable. Logits are computed again in the backward pass."""
        return _Recomputed.apply(hidden, self.head.weight, self.head.bias, self)  # type: ignore[return-value]

    def _keep(self, rows: slice, *parts: Tensor) -> None:
        for whole, part in zip(self.kept, parts):
            whole[rows] = part


@dataclass
class ChunkedDivergence(Chunked):
    """From a teacher's hidden states; one output, the divergence [N]."""

    teacher: Float[Tensor, "N T"]  # hidden states
    teacher_head: OutputHead
    weight: Float[Tensor, " N"]  # of the rows in the fused loss, in the type of the statistics
    how: tuple[str, float]  # kind and beta

    def __post_init__(self) -> None:
        self.kept = tuple(torch.zeros_like(self.weight) for _ in fields(DivergenceStats))

    def fused(self) -> ChunkLoss:
        teacher, options = self._teacher_logits(), self._options()

        def loss(logits: Tensor, rows: slice) -> Tensor:
            weight = self.weight[rows]
            stats = divergence_with_grad(logits, teacher(rows), weight, *options, out=logits)
            self._keep(rows, *astuple_of(stats))
            return (weight * stats.divergence).sum()

        return loss

    def statistics(self) -> ChunkLoss:
        teacher, options = self._teacher_logits(), self._options()

        def loss(logits: Tensor, rows: slice) -> Tensor:
            self._keep(rows, *astuple_of(divergence_stats(logits, teacher(rows), None, *options)))
            return _NOTHING

        return loss

    def gradient(self, *upstream: Tensor | None) -> ChunkLoss:
        teacher, options, (grad,) = self._teacher_logits(), self._options(), upstream
        assert grad is not None

        def loss(logits: Tensor, rows: slice) -> Tensor:
            stats = DivergenceStats(*(whole[rows] for whole in self.kept))
            divergence_grad(logits, teacher(rows), stats, grad[rows], *options, out=logits)
            return _NOTHING

        return loss

    def outputs(self) -> tuple[Tensor, ...]:
        return (DivergenceStats(*self.kept).divergence.clone(),)

    def _options(self) -> tuple[Any, ...]:
        return *self.how, self.head.form(self.temperature), self.teacher_head.form(self.temperature)

    def _teacher_logits(self) -> Callable[[slice], Tensor]:
        """Of a chunk, in a buffer that the next one overwrites."""
        hidden, head = self.teacher, self.teacher_head
        if head.weight is None:
            return lambda rows: head.raw(hidden[rows], self.vocab)
        buffer = logits_buffer(self.chunks, self.vocab, head.weight.dtype, hidden.device)
        return lambda rows: head.raw(hidden[rows], self.vocab, out=buffer[: rows.stop - rows.start])


@dataclass
class ChunkedGather(Chunked):
    """Three outputs: log-probs at ids [N, M], entropy [N] and log-sum-exp [N]."""

    ids: Int[Tensor, "N M"]
    upstream: Upstream  # of the fused loss
    dtype: torch.dtype  # of the statistics

    def __post_init__(self) -> None:
        logp = self.ids.new_zeros(self.ids.shape, dtype=self.dtype)
        self.kept = logp, *(logp.new_zeros(len(logp)) for _ in range(3))

    def fused(self) -> ChunkLoss:
        form = self.head.form(self.temperature)

        def loss(logits: Tensor, rows: slice) -> Tensor:
            stats = self._gathered(logits, rows)
            value, grad_logp, grad_entropy = self.upstream(stats, rows)
            gather_grad(logits, self.ids[rows], stats, grad_logp, grad_entropy, form=form)
            return value

        return loss

    def statistics(self) -> ChunkLoss:
        def loss(logits: Tensor, rows: slice) -> Tensor:
            self._gathered(logits, rows)
            return _NOTHING

        return loss

    def gradient(self, *upstream: Tensor | None) -> ChunkLoss:
        form = self.head.form(self.temperature)

        def loss(logits: Tensor, rows: slice) -> Tensor:
            stats = RowStats(*(whole[rows] for whole in self.kept), scale=form.scale)
            grad_logp, *others = (None if grad is None else grad[rows] for grad in upstream)
            grad_logp = torch.zeros_like(stats.logp) if grad_logp is None else grad_logp
            gather_grad(logits, self.ids[rows], stats, grad_logp, *others, form=form)
            return _NOTHING

        return loss

    def outputs(self) -> tuple[Tensor, ...]:
        stats = RowStats(*self.kept, scale=self.head.form(self.temperature).scale)
        return stats.logp.clone(), stats.entropy.clone(), stats.lse

    def _gathered(self, logits: Tensor, rows: slice) -> RowStats:
        stats = gather_stats(logits, self.ids[rows], self.head.form(self.temperature))
        self._keep(rows, stats.logp, stats.entropy, stats.max, stats.log_z)
        return stats


_NOTHING = torch.zeros(())


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, job):  # type: ignore[no-untyped-def]
        head = replace(job.head, weight=weight, bias=bias)
        loss, *grads = fused_head(hidden, head, job.vocab, job.chunks, job.fused(), job.want)
        ctx.save_for_backward(*grads)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream):  # type: ignore[no-untyped-def]
        return *(None if grad is None else grad.mul_(upstream) for grad in ctx.saved_tensors), None


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, job):  # type: ignore[no-untyped-def]
        head = replace(job.head, weight=weight, bias=bias)
        fused_head(hidden, head, job.vocab, job.chunks, job.statistics(), (False, False, False))
        ctx.save_for_backward(hidden, weight, bias)
        ctx.job = job
        ctx.set_materialize_grads(False)
        return job.outputs()

    @staticmethod
    @once_differentiable
    def backward(ctx, *upstream):  # type: ignore[no-untyped-def]
        if all(grad is None for grad in upstream):
            return None, None, None, None
        (hidden, weight, bias), job = ctx.saved_tensors, ctx.job
        head = replace(job.head, weight=weight, bias=bias)
        upstream = [None if grad is None else grad.contiguous() for grad in upstream]  # sums send one number for all rows
        _, *grads = fused_head(hidden, head, job.vocab, job.chunks, job.gradient(*upstream), job.want)
        return *grads, None
