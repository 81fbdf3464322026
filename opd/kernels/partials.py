"""What a row of logits is reduced to, and how the parts of a row, slices or shards of the vocabulary, come together.

Shape legend: S parts, c rows, M ids a row. With student's logits s and teacher's t, each capped where the model does so:
m = max s, n = max t, x = scale (s - m), w = scale_t (t - n). Forming x and w in this order loses no digits to an offset that
the logits carry. log q = x - log z and log p = w - log y are the log-probs of student and teacher.
"""

from dataclasses import dataclass, fields
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

NEAR_MAXIMA = 1.0  # maxima closer than this may belong to near-equal rows
Kind = Literal["reverse_kl", "forward_kl", "jsd"]
T = TypeVar("T")


@dataclass(frozen=True)
class DivergencePartials:
    """Sums over some columns, relative to the maxima over these columns. All fp32 [c]; 0 in rows that were not read."""

    max: Tensor  # m
    z: Tensor  # sum of e^x
    teacher_max: Tensor  # n
    y: Tensor  # sum of e^w
    cross: Tensor  # reverse KL: sum of e^x (x - w); forward KL: sum of e^w (w - x); else 0
    gap: Tensor  # forward KL, JSD: z - y, summed as e^x - e^w so that near rows keep its digits; else 0


@dataclass(frozen=True)
class DivergenceStats:
    """A row's figures and what the gradient is computed from. All fp32 [c]; 0 in rows that were not read."""

    divergence: Tensor  # nats
    max: Tensor  # m
    log_z: Tensor
    teacher_max: Tensor  # n
    log_ratio: Tensor  # log(z / y)
    mean: Tensor  # reverse KL: E_q[x - w]; JSD: E_q[h], see `divergence_torch`

    def saved(self, kind: Kind) -> tuple[Tensor, ...]:
        """The floats of a row that the gradient needs: four for a KL divergence, five for the JSD."""
        last = {"reverse_kl": (self.mean,), "forward_kl": (self.log_ratio,), "jsd": (self.log_ratio, self.mean)}
        return self.max, self.log_z, self.teacher_max, *last[kind]

    @staticmethod
    def restored(kind: Kind, saved: tuple[Tensor, ...]) -> "DivergenceStats":
        """From `saved`; figures that it does not hold are 0."""
        row_max, log_z, teacher_max, *last = saved
        zero = torch.zeros_like(log_z)
        log_ratio = zero if kind == "reverse_kl" else last[0]
        mean = zero if kind == "forward_kl" else last[-1]
        return DivergenceStats(zero, row_max, log_z, teacher_max, log_ratio, mean)


@dataclass(frozen=True)
class GatherPartials:
    """Sums over some columns and log-probs at some of them, relative to the maximum over these columns."""

    max: Tensor  # [c]
    z: Tensor  # [c]
    entropy_sum: Tensor  # [c]
    at: Tensor  # [c, M] x at the ids; 0 where the id is -1


@dataclass(frozen=True)
class RowStats:
    """What a row of logits is known by. log q_j = x_j - log_z, which keeps its digits under any offset."""

    logp: Tensor  # [c, M] fp32, natural log; 0 where the id is -1
    entropy: Tensor  # [c] fp32, nats
    max: Tensor  # [c] fp32
    log_z: Tensor  # [c] fp32
    scale: float

    @property
    def lse(self) -> Tensor:
        """[c] fp32: log of the sum of exp(scale * logits)."""
        return self.scale * self.max + self.log_z


def merge_divergence(parts: DivergencePartials, kind: Kind, scale: float, teacher_scale: float) -> DivergencePartials:
    """One row from its parts: fields [S, c] to [c]. Exact up to rounding: every sum is moved to the common maxima."""
    row_max, shift, weight = _rebased(parts.max, parts.z, scale)
    teacher_max, teacher_shift, teacher_weight = _rebased(parts.teacher_max, parts.y, teacher_scale)
    cross, gap, apart = parts.cross, parts.gap, shift - teacher_shift
    if scale == teacher_scale:  # before it is multiplied in, which rounds: differences of near numbers are exact
        near = (row_max - teacher_max).abs() <= NEAR_MAXIMA
        crossed = (parts.max - parts.teacher_max) - (row_max - teacher_max)
        along = (parts.max - row_max) - (parts.teacher_max - teacher_max)
        apart = (scale * torch.where(near, crossed, along)).masked_fill(parts.z == 0, 0.0)
    if kind == "reverse_kl":
        cross = weight * (cross + parts.z * apart)
    elif kind == "forward_kl":
        cross = teacher_weight * (cross - parts.y * apart)
    if kind != "reverse_kl":
        less = torch.where(apart.abs() < 1, teacher_weight * torch.expm1(apart), weight - teacher_weight)
        gap = weight * gap + parts.y * less
    return DivergencePartials(
        row_max,
        (weight * parts.z).sum(0),
        teacher_max,
        (teacher_weight * parts.y).sum(0),
        cross.sum(0),
        gap.sum(0),
    )


def merge_gather(parts: GatherPartials, owned: Tensor, scale: float) -> GatherPartials:
    """One row from its parts: fields [S, c, ...] to [c, ...]. `owned` [S, c, M]: the part that holds the id."""
    row_max, shift, weight = _rebased(parts.max, parts.z, scale)
    return GatherPartials(
        row_max,
        (weight * parts.z).sum(0),
        (weight * (parts.entropy_sum + parts.z * shift)).sum(0),
        ((parts.at + shift[..., None]) * owned).sum(0),
    )


def _rebased(part_max: Tensor, mass: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """(maximum [c], what each part's x moves by [S, c], what its sums are multiplied by). Parts without columns count 0."""
    held = mass != 0  # not > 0: NaN must stay NaN
    row_max = part_max.masked_fill(~held, -torch.inf).amax(0)
    row_max = row_max.masked_fill(~held.any(0), 0.0)
    shift = (scale * (part_max - row_max)).masked_fill(~held, 0.0)
    return row_max, shift, shift.exp() * held


def divergence_stats_of(parts: DivergencePartials, kind: Kind) -> DivergenceStats:
    """All but the JSD and its mean, which take a second pass and are 0 here."""
    held = parts.z != 0
    z, y = parts.z.masked_fill(~held, 1.0), parts.y.masked_fill(~held, 1.0)
    log_z, log_ratio = z.log(), (z / y).log()
    divergence, mean = torch.zeros_like(z), torch.zeros_like(z)
    if kind == "reverse_kl":
        mean = parts.cross / z
        divergence = mean - log_ratio
    else:
        log_ratio = torch.where(2 * parts.gap.abs() < y, torch.log1p(parts.gap / y), log_ratio)
    if kind == "forward_kl":
        divergence = parts.cross / y + log_ratio
    return DivergenceStats(divergence, parts.max, log_z, parts.teacher_max, log_ratio, mean)


def row_stats_of(parts: GatherPartials, ids: Tensor, scale: float) -> RowStats:
    """`ids` [c, M]: those of -1 are absent."""
    held = parts.z != 0
    z = parts.z.masked_fill(~held, 1.0)
    log_z = z.log()
    present = (ids >= 0) & held[:, None]
    logp = (parts.at - log_z[:, None]).masked_fill(~present, 0.0)
    return RowStats(logp, (log_z - parts.entropy_sum / z) * held, parts.max, log_z, scale)


def stacked(parts: list[T]) -> T:
    """The same record with every field stacked along a new first dimension."""
    return type(parts[0])(*(torch.stack(column) for column in zip(*(astuple_of(part) for part in parts))))


def astuple_of(record: Any) -> tuple[Any, ...]:
    """Its fields, as they are."""
    return tuple(getattr(record, field.name) for field in fields(record))
