"""Rollouts and their terms as padded micro-batches of a bounded number of tokens.

A sequence is a passage of a rollout (`opd.passages`): turns that continue one another are read once. Rows are trainable
tokens alone, so that what stands before and between them, reused turns and observations, is context.

Shape legend: B sequences, T tokens of the longest, N rows (sampled tokens with a loss), K ids a row, H hidden size.
Sequences are padded on the right and attention is causal, so padding changes nothing and needs no mask.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from opd.objective.terms import unit_means
from opd.passages import Passage, passages
from opd.records import Array, Hidden, Rollout, Term, TopK

Taught = tuple[Rollout, list[Term]]


@dataclass(frozen=True)
class PackedTerm:
    """One term on all rows of a micro-batch."""

    kind: str
    scale: Tensor  # [N] fp32: coef * mask * weight / normaliser; 0 where the row's rollout lacks the term
    inputs: Mapping[str, Any]  # tensors [N, ...], TopK and Hidden of tensors, and scalars


@dataclass(frozen=True)
class MicroBatch:
    """What one forward pass takes."""

    input_ids: Tensor  # [B, T] int64
    rows: Tensor  # [N] int64 into B * T: the position whose hidden state predicts the row's token
    token_ids: Tensor  # [N] int64
    sampler_logps: Tensor  # [N] fp32
    terms: tuple[PackedTerm, ...]
    old_logps: Tensor | None = None  # [N] fp32: the trainer's, under the policy that the batch began with
    reference_logps: Tensor | None = None  # [N] fp32: of the student's frozen start
    domain: str = ""  # of all its prompts, where batches are of one domain each

    @property
    def unit_starts(self) -> Tensor | None:
        """[N] bool: where every term begins a unit of tokens judged together; None without such units."""
        starts = [term.inputs["unit_starts"] for term in self.terms if "unit_starts" in term.inputs]
        return torch.stack(starts).all(0) if starts else None


@dataclass(frozen=True)
class _Segment:
    """One passage of a rollout."""

    passage: Passage
    number: int  # of the passage
    sampler_logps: Array  # [n] of the whole rollout
    terms: list[Term]
    divisor: float
    domain: str


def num_trainable(taught: Sequence[Taught]) -> tuple[int, int]:
    """(tokens, rollouts) that count in the normaliser: those under the mask of at least one term."""
    counts = [int(counted(rollout, terms).sum()) for rollout, terms in taught]
    return sum(counts), sum(count > 0 for count in counts)


def micro_batches(
    taught: Sequence[Taught],
    budget: int,
    normalizer: str,
    num_tokens: int,
    num_rollouts: int,
    device: torch.device,
    by_domain: bool = False,
) -> list[MicroBatch]:
    """Micro-batches of rollouts with the same kinds of terms (and the same teacher head), longest sequences first, each at
    most `budget` tokens with padding (one sequence may exceed it); `by_domain`: of one domain each. Passages without a
    token that counts are left out.

    `num_tokens` and `num_rollouts` are those of the whole optimizer step over all processes: each row's loss is divided
    by the former (`token_mean`), or by the latter times its rollout's own tokens (`sequence_mean`).
    """
    segments: list[_Segment] = []
    for rollout, terms in taught:
        mask = counted(rollout, terms)
        if not mask.any():
            continue
        domain = rollout.prompt.domain if by_domain else ""
        divisor = num_tokens if normalizer == "token_mean" else num_rollouts * int(mask.sum())
        sampler_logps = np.concatenate([turn.sampler_logps for turn in rollout.turns])
        for number, passage in enumerate(passages(rollout)):
            if mask[passage.rows].any():
                segments.append(_Segment(passage, number, sampler_logps, terms, float(divisor), domain))
    segments.sort(key=lambda segment: (_signature(segment), -_length(segment)))
    groups: list[list[_Segment]] = []
    for segment in segments:
        joins = groups and _signature(groups[-1][0]) == _signature(segment)
        if joins and _length(groups[-1][0]) * (len(groups[-1]) + 1) <= budget:
            groups[-1].append(segment)
        else:
            groups.append([segment])
    return [_pack(group, device) for group in groups]


def _signature(segment: _Segment) -> str:
    """What must agree for two rollouts' terms to lie in one tensor: kinds, scalars, widths and heads; and the domain."""

    def shape(value: Any) -> str:
        if isinstance(value, Hidden):
            return f"head {value.head}"
        if isinstance(value, TopK):
            return f"top {value.ids.shape[1]} {value.unknown is None}"
        return f"array {value.shape[1:]}" if isinstance(value, np.ndarray) else repr(value)

    terms = segment.terms
    kinds = [(term.kind, sorted((name, shape(value)) for name, value in term.inputs.items())) for term in terms]
    return repr((segment.domain, kinds))


def _length(segment: _Segment) -> int:
    return len(segment.passage.context_ids) + len(segment.passage.token_ids)


def counted(rollout: Rollout, terms: Iterable[Term]) -> np.ndarray:
    """[n] bool: trainable, and under the mask of at least one term."""
    masks = [term.mask for term in terms]
    return np.logical_or.reduce(masks) & rollout.trainable if masks else np.zeros(rollout.num_tokens, bool)


def _pack(group: Sequence[_Segment], device: torch.device) -> MicroBatch:
    width = _length(group[0])
    input_ids = np.zeros((len(group), width), np.int64)
    rows, token_ids, sampler_logps = [], [], []
    for b, segment in enumerate(group):
        passage = segment.passage
        input_ids[b, : _length(segment)] = np.concatenate([passage.context_ids, passage.token_ids])
        rows.append(b * width + len(passage.context_ids) - 1 + passage.at)
        token_ids.append(passage.token_ids[passage.at])
        sampler_logps.append(segment.sampler_logps[passage.rows])

    def to(parts: Sequence[np.ndarray], dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(np.concatenate(parts)).to(device, dtype)

    batch = MicroBatch(
        torch.from_numpy(input_ids).to(device),
        to(rows, torch.int64),
        to(token_ids, torch.int64),
        to(sampler_logps, torch.float32),
        tuple(_pack_term(index, group, device) for index in range(len(group[0].terms))),
        domain=group[0].domain,
    )
    live, starts = torch.stack([term.scale != 0 for term in batch.terms]).any(0), batch.unit_starts
    if starts is not None:
        live = unit_means(live.float(), starts) > 0  # of a unit all rows or none: its mean is over all of them
    return batch if live.all() else select_rows(batch, live.nonzero()[:, 0])


def _pack_term(index: int, group: Sequence[_Segment], device: torch.device) -> PackedTerm:
    """The terms at one place of the rollouts' lists, side by side."""
    scales, parts = [], []
    for segment in group:
        term = segment.terms[index]
        weight = term.mask if term.weight is None else term.mask * term.weight
        scales.append(weight[segment.passage.rows].astype(np.float32) * np.float32(term.coef / segment.divisor))
        parts.append({name: _cut(name, value, segment) for name, value in term.inputs.items()})
    inputs = {name: _join([part[name] for part in parts], device) for name in parts[0]}
    return PackedTerm(group[0].terms[index].kind, torch.from_numpy(np.concatenate(scales)).to(device), inputs)


def _cut(name: str, value: Any, segment: _Segment) -> Any:
    """A rollout's input at the trainable tokens of one passage."""
    rows = segment.passage.rows
    if isinstance(value, Hidden):
        return Hidden((value.states[segment.number],), value.head)
    if name == "unit_starts":  # a unit does not go on where tokens between are missing, as behind reused ones
        return value[rows] | (np.diff(rows, prepend=-2) != 1)
    return _each(value, lambda array: array[rows])


def _join(values: Sequence[Any], device: torch.device) -> Any:
    """One input of all passages, [N, ...]; equal scalars stay what they are."""
    first = values[0]
    if isinstance(first, Hidden):
        return Hidden((torch.cat([value.states[0] for value in values]).to(device),), first.head)
    if isinstance(first, TopK):
        names = ("ids", "logps", "tail", "unknown")[: 3 if first.unknown is None else 4]
        arrays = [np.concatenate([getattr(value, name) for value in values]) for name in names]
        ids, *others = (torch.from_numpy(array).to(device) for array in arrays)
        return TopK(ids.long(), *others)  # type: ignore[arg-type]
    return torch.from_numpy(np.concatenate(values)).to(device) if isinstance(first, np.ndarray) else first


def _each(value: Any, change: Callable[[Any], Any]) -> Any:
    """`change` applied to the arrays or tensors inside one input."""
    if isinstance(value, TopK):
        unknown = None if value.unknown is None else change(value.unknown)
        return TopK(change(value.ids), change(value.logps), change(value.tail), unknown)
    if isinstance(value, Hidden):
        return Hidden(tuple(change(state) for state in value.states), value.head)
    return change(value) if isinstance(value, np.ndarray | Tensor) else value


def empty_batch(device: torch.device) -> MicroBatch:
    """A forward pass without rows, for a process that has fewer micro-batches than the others."""
    none = torch.zeros(0, dtype=torch.int64, device=device)
    return MicroBatch(torch.zeros(1, 1, dtype=torch.int64, device=device), none, none, none.float(), ())


def select_rows(batch: MicroBatch, rows: Tensor | slice) -> MicroBatch:
    """The same sequences with only some of the rows: an index [n] or a slice."""
    terms = tuple(
        PackedTerm(t.kind, t.scale[rows], {k: _each(v, lambda x: x[rows]) for k, v in t.inputs.items()}) for t in batch.terms
    )
    return replace(
        batch,
        rows=batch.rows[rows],
        token_ids=batch.token_ids[rows],
        sampler_logps=batch.sampler_logps[rows],
        terms=terms,
        old_logps=None if batch.old_logps is None else batch.old_logps[rows],
        reference_logps=None if batch.reference_logps is None else batch.reference_logps[rows],
    )
