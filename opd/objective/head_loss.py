"""The loss of a micro-batch from its hidden states: output head, terms, and gradient in one pass over chunks of rows.

No more than one chunk of logits [c, V] of the student, and one of each teacher whose head is used, exists at a time:
the gradient with respect to the logits is formed at once, in their place, and taken back through the head.

Shape legend: N rows, c rows of a chunk, H hidden size, V columns of the vocabulary in use, M ids a row.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from opd.kernels import LogitForm, OutputHead, linear_gather_logprob
from opd.kernels.chunks import chunk_rows, fused_head, logits_buffer, row_chunks
from opd.kernels.divergence import divergence_stats, divergence_with_grad
from opd.kernels.gather import gather_grad, gather_stats
from opd.kernels.topk import topk_divergence
from opd.objective.batching import MicroBatch, PackedTerm, select_rows
from opd.objective.terms import KINDS
from opd.records import Hidden, TopK


@dataclass(frozen=True)
class LossSpec:
    """What the loss needs beside the batch."""

    heads: Mapping[str, OutputHead]  # of the teachers, by the name in `Hidden.head`
    vocab: int  # columns in use: student and teacher agree on these ids, later rows are padding
    temperature: float
    chunk_bytes: int

    def chunk_rows(self, hidden: Tensor) -> int:
        """Rows of one chunk of the student's logits."""
        return chunk_rows(self.chunk_bytes, self.vocab, hidden.element_size())


@dataclass
class RowSums:
    """Sums over rows, for metrics; nothing here carries a gradient."""

    values: dict[str, Tensor] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)

    def add(self, name: str, rows: Tensor) -> None:
        """Adds the rows [c] of a figure."""
        total = rows.detach().double().sum()
        self.values[name] = self.values[name] + total if name in self.values else total
        self.counts[name] += rows.numel()

    def merge(self, other: "RowSums") -> None:
        for name, total in other.values.items():
            self.values[name] = self.values[name] + total if name in self.values else total
            self.counts[name] += other.counts[name]

    @staticmethod
    def means(parts: Sequence["RowSums"]) -> dict[str, float]:
        """Mean of each figure over all rows of all parts."""
        whole = RowSums()
        for part in parts:
            whole.merge(RowSums({name: total.cpu() for name, total in part.values.items()}, part.counts))
        return {name: float(total) / max(1, whole.counts[name]) for name, total in whole.values.items()}


def head_loss(
    hidden: Float[Tensor, "N H"], head: OutputHead, batch: MicroBatch, spec: LossSpec
) -> tuple[Float[Tensor, ""], RowSums]:
    """The scaled sum of all terms (a scalar with a gradient to `hidden` and the head), and sums for metrics.

    `head` is the student's. The products run in the type of `hidden`; everything after them in fp32.
    """
    sums = RowSums()
    parts = hidden, head.weight, head.bias
    want = tuple(torch.is_grad_enabled() and part is not None and part.requires_grad for part in parts)
    return _HeadLoss.apply(*parts, head, batch, spec, sums, want), sums  # type: ignore[return-value]


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, head, batch, spec, sums, want):  # type: ignore[no-untyped-def]
        chunks = row_chunks(len(hidden), spec.chunk_rows(hidden), batch.unit_starts)
        chunk_loss = _ChunkLoss(batch, head.form(spec.temperature), spec, sums, any(want), chunks)
        loss, *grads = fused_head(hidden, head, spec.vocab, chunks, chunk_loss, want)
        ctx.save_for_backward(*grads)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_loss):  # type: ignore[no-untyped-def]
        return *(None if grad is None else grad.mul_(grad_loss) for grad in ctx.saved_tensors), *[None] * 5


@torch.no_grad()
def row_logps(hidden: Float[Tensor, "N H"], head: OutputHead, batch: MicroBatch, spec: LossSpec) -> Float[Tensor, " N"]:
    """The student's log-prob of each row's token."""
    options = {"temperature": spec.temperature, "vocab": spec.vocab, "max_bytes": spec.chunk_bytes}
    return linear_gather_logprob(hidden, head, batch.token_ids[:, None], **options).logp[:, 0]


class _ChunkLoss:
    """Loss of the rows of one chunk from their raw logits [c, V], which it overwrites by their gradient if one is wanted."""

    def __init__(
        self, batch: MicroBatch, form: LogitForm, spec: LossSpec, sums: RowSums, wanted: bool, chunks: Sequence[slice]
    ) -> None:
        self.batch, self.form, self.spec, self.sums, self.wanted, self.chunks = batch, form, spec, sums, wanted, chunks
        self._buffers: dict[int, Tensor] = {}  # of teachers' logits, by the place of the term

    def __call__(self, logits: Tensor, rows: slice) -> Tensor:
        batch = select_rows(self.batch, rows)
        dense = [term for term in batch.terms if isinstance(term.inputs.get("target"), Hidden)]
        others = [term for term in batch.terms if not isinstance(term.inputs.get("target"), Hidden)]
        tops = [term.inputs["target"] for term in others if isinstance(term.inputs.get("target"), TopK)]
        ids = torch.cat([batch.token_ids[:, None], *(top.ids for top in tops)], dim=1)
        stats = gather_stats(logits, ids, self.form)
        self.sums.add("entropy", stats.entropy)
        self.sums.add("mismatch", (stats.logp[:, 0] - batch.sampler_logps).abs())
        with torch.enable_grad():
            logp = stats.logp.requires_grad_(self.wanted)
            loss = _gathered_loss(logp, others, batch, self.sums)
        total, added = loss.detach(), None
        alone = logits if len(dense) == 1 and not others else None
        for place, term in enumerate(dense):
            value, gradient = self._dense(logits, term, place, alone)
            total = total + value
            added = gradient if added is None or gradient is None else added.add_(gradient)
        if self.wanted and alone is None:
            (grad,) = torch.autograd.grad(loss, logp) if loss.requires_grad else (torch.zeros_like(logp),)
            gather_grad(logits, ids, stats, grad, form=self.form, add=added)
        return total

    def _dense(self, logits: Tensor, term: PackedTerm, place: int, out: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Loss of a full-vocabulary divergence, and its gradient [c, V]: in `out`, or in place of the teacher's logits."""
        inputs, target = term.inputs, term.inputs["target"]
        head, (states,) = self.spec.heads[target.head], target.states
        dtype = states.dtype if head.weight is None else head.weight.dtype
        if place not in self._buffers:
            self._buffers[place] = logits_buffer(self.chunks, self.spec.vocab, dtype, logits.device)
        teacher = head.raw(states, self.spec.vocab, out=self._buffers[place][: len(states)])
        how = inputs["divergence"], inputs["beta"], self.form, head.form(self.spec.temperature)
        if self.wanted:
            out = teacher if out is None else out
            stats = divergence_with_grad(logits, teacher, term.scale, *how, out=out)
        else:
            stats, out = divergence_stats(logits, teacher, term.scale != 0, *how), None
        self.sums.add(inputs["divergence"], stats.divergence[term.scale != 0])
        return (term.scale * stats.divergence).sum(), out


def _gathered_loss(logp: Tensor, terms: Iterable[PackedTerm], batch: MicroBatch, sums: RowSums) -> Tensor:
    """The terms that depend on log-probs [c, M] at a few ids: the sampled token in column 0, then each TopK's own."""
    loss, column = logp.new_zeros(()), 1
    for term in terms:
        if isinstance(term.inputs.get("target"), TopK):
            inputs, target = term.inputs, term.inputs["target"]
            width = target.ids.shape[1]
            value = topk_divergence(
                logp[:, column : column + width],
                target.logps,
                target.tail,
                target.ids >= 0,
                outside=inputs["tail"],
                kind=inputs["divergence"],
                beta=inputs["beta"],
                unknown=target.unknown,
            )
            column += width
            sums.add(term.inputs.get("figure", term.inputs["divergence"]), value[term.scale != 0])
        else:
            function = KINDS[term.kind]
            assert function is not None
            value, figures = function(
                logp[:, 0],
                {
                    **term.inputs,
                    "sampler_logps": batch.sampler_logps,
                    "old_logps": batch.old_logps,
                    "reference_logps": batch.reference_logps,
                },
            )
            live = term.scale != 0
            for name, rows in figures.items():
                sums.add(name, rows[live])
        loss = loss + (term.scale * value).sum()
    return loss
