"""The loss of a micro-batch from its hidden states: output head, terms, and gradient in one pass over chunks of rows.

No more than one chunk of logits [c, V] of the student, and one of each teacher whose head is used, exists at a time:
the gradient with respect to the logits is formed at once, in their place, and taken back through the head.

Shape legend: N rows, c rows of a chunk, H hidden size, V columns of the vocabulary in use, M ids a row.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from opd.kernels.divergence import full_divergence_
from opd.kernels.gather import gather_logprob, gather_logprob_grad_
from opd.models import OutputHead
from opd.objective.batching import MicroBatch, PackedTerm, select_rows
from opd.objective.terms import KINDS, topk_divergence
from opd.records import Hidden, TopK


@dataclass(frozen=True)
class LossSpec:
    """What the loss needs beside the batch."""

    heads: Mapping[str, OutputHead]  # of the teachers, by the name in `Hidden.head`
    vocab: int  # columns in use: student and teacher agree on these ids, later rows are padding
    temperature: float
    chunk_bytes: int


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
    hidden: Float[Tensor, "N H"], weight: Float[Tensor, "R H"], scale: float, batch: MicroBatch, spec: LossSpec
) -> tuple[Tensor, RowSums]:
    """The scaled sum of all terms (a scalar with a gradient to `hidden` and `weight`), and sums for metrics.

    `weight` is the student's output head, whose first V rows are in use; its logits are multiplied by `scale`. The GEMMs
    run in the type of `hidden`; everything after them in fp32.
    """
    sums = RowSums()
    return _HeadLoss.apply(hidden, weight, scale, batch, spec, sums), sums  # type: ignore[return-value]


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, scale, batch, spec, sums):  # type: ignore[no-untyped-def]
        with torch.autocast(hidden.device.type, enabled=False):
            loss, grad_hidden, grad_weight = _forward(
                hidden, weight, scale, batch, spec, sums, ctx.needs_input_grad[0], ctx.needs_input_grad[1]
            )
        ctx.save_for_backward(grad_hidden, grad_weight)
        return loss

    @staticmethod
    def backward(ctx, grad_loss):  # type: ignore[no-untyped-def]
        scaled = [None if grad is None else grad.mul_(grad_loss) for grad in ctx.saved_tensors]
        return *scaled, None, None, None, None


def _forward(hidden, weight, scale, batch, spec, sums, want_hidden, want_weight):  # type: ignore[no-untyped-def]
    n, vocab = hidden.shape[0], spec.vocab
    used = weight[:vocab].to(hidden.dtype)
    grad_hidden = torch.empty_like(hidden) if want_hidden else None
    grad_weight = torch.zeros_like(weight) if want_weight else None
    chunks = row_chunks(n, max(1, spec.chunk_bytes // (vocab * hidden.element_size())), batch.unit_starts)
    largest = max((rows.stop - rows.start for rows in chunks), default=0)
    logits = torch.empty(largest, vocab, dtype=hidden.dtype, device=hidden.device)
    spare = torch.empty_like(used) if want_weight and len(chunks) > 1 and used.dtype != weight.dtype else None
    loss = torch.zeros((), device=hidden.device)
    for rows in chunks:
        chunk = logits[: rows.stop - rows.start]
        torch.mm(hidden[rows], used.t(), out=chunk)
        loss += _chunk_loss_(chunk, select_rows(batch, rows), scale, spec, sums)
        if grad_hidden is not None:
            torch.mm(chunk, used, out=grad_hidden[rows])
        if grad_weight is not None:
            if used.dtype == weight.dtype:
                grad_weight[:vocab].addmm_(chunk.t(), hidden[rows])
            else:  # a low-precision product, added up in the master type
                grad_weight[:vocab] += torch.mm(chunk.t(), hidden[rows], out=spare)
    return loss, grad_hidden, grad_weight


def row_chunks(num_rows: int, size: int, unit_starts: Tensor | None) -> list[slice]:
    """All rows, about `size` at a time: no unit is cut in two, so that a chunk may be longer by the rest of one."""
    if unit_starts is None:
        return [slice(start, min(start + size, num_rows)) for start in range(0, num_rows, size)]
    allowed = [*unit_starts.nonzero()[:, 0].tolist(), num_rows]
    chunks, start = [], 0
    while start < num_rows:
        stop = allowed[min(bisect_left(allowed, start + size), len(allowed) - 1)]
        chunks.append(slice(start, stop))
        start = stop
    return chunks


@torch.no_grad()
def row_logps(
    hidden: Float[Tensor, "N H"], weight: Float[Tensor, "R H"], scale: float, batch: MicroBatch, spec: LossSpec
) -> Float[Tensor, " N"]:
    """The student's log-prob of each row's token."""
    head = OutputHead(weight[: spec.vocab].to(hidden.dtype), scale)
    size = max(1, spec.chunk_bytes // (spec.vocab * hidden.element_size()))
    parts = [
        gather_logprob(head.logits(states, spec.vocab), ids[:, None], scale / spec.temperature).logp[:, 0]
        for states, ids in zip(hidden.split(size), batch.token_ids.split(size))
    ]
    return torch.cat(parts) if parts else hidden.new_zeros(0, dtype=torch.float32)


def _chunk_loss_(logits: Tensor, batch: MicroBatch, scale: float, spec: LossSpec, sums: RowSums) -> Tensor:
    """Loss of one chunk; overwrites `logits` [c, V] by its gradient."""
    student_scale = scale / spec.temperature
    dense = [t for t in batch.terms if isinstance(t.inputs.get("target"), Hidden)]
    others = [t for t in batch.terms if not isinstance(t.inputs.get("target"), Hidden)]
    columns = [
        batch.token_ids[:, None],
        *(t.inputs["target"].ids for t in others if isinstance(t.inputs.get("target"), TopK)),
    ]
    ids = torch.cat(columns, dim=1)
    stats = gather_logprob(logits, ids, student_scale)
    sums.add("entropy", stats.entropy)
    sums.add("mismatch", (stats.logp[:, 0] - batch.sampler_logps).abs())
    with torch.enable_grad():
        logp = stats.logp.requires_grad_()
        loss = _gathered_loss(logp, others, batch, sums)
    (grad,) = torch.autograd.grad(loss, logp) if loss.requires_grad else (torch.zeros_like(logp),)
    total, added = loss.detach(), None
    for term in dense:
        value, gradient = _dense_loss(logits, term, student_scale, spec, sums)
        total, added = total + value, gradient if added is None else added.add_(gradient)
    if added is not None and not others:
        logits.copy_(added)
    else:
        gather_logprob_grad_(logits, ids, stats, grad, student_scale, add=added)
    return total


def _gathered_loss(logp: Tensor, terms: Iterable[PackedTerm], batch: MicroBatch, sums: RowSums) -> Tensor:
    """The terms that depend on log-probs [c, M] at a few ids: the sampled token in column 0, then each TopK's own."""
    loss, column = logp.new_zeros(()), 1
    for term in terms:
        target = term.inputs.get("target")
        if isinstance(target, TopK):
            width = target.ids.shape[1]
            inputs = {
                **term.inputs,
                "target_logps": target.logps,
                "target_tail": target.tail,
                "present": target.ids >= 0,
                "unknown": target.unknown,
            }
            value = topk_divergence(logp[:, column : column + width], inputs)
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


def _dense_loss(logits: Tensor, term: PackedTerm, scale: float, spec: LossSpec, sums: RowSums) -> tuple[Tensor, Tensor]:
    """Loss of one full-vocabulary divergence, and its gradient [c, V] with respect to the student's logits."""
    target = term.inputs["target"]
    head, (states,) = spec.heads[target.head], target.states
    teacher = head.logits(states, spec.vocab)
    kind = term.inputs["divergence"]
    rows = full_divergence_(
        logits, teacher, term.scale, kind, term.inputs["beta"], scale, teacher_scale=head.scale / spec.temperature
    )
    sums.add(kind, rows)
    return (term.scale * rows).sum(), teacher
