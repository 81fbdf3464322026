"""When a rollout stops and where the next one restarts, from the teacher's log-probs of its units (STRIDE).

A rollout stops after the first unit at which its statistic lies below the threshold; that unit is trained. Only units that
were sampled now count, so that a reused beginning cannot exhaust the budget. With c the sum and n the number of the units'
values so far, and mu what such a value is on average:

    cumulative  c              excess  c - n mu
    mean        c / n          min     the smallest mean of a unit

A value is a turn's mean log-prob (`whole_turns`) or, in a single answer, a token's log-prob. The next rollout of the task
reuses what comes before the weakest unit of the leading ones that are good enough. Units without a log-prob add nothing to
a statistic, and a restart neither ends nor begins at them.
"""

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np

from opd.records import Array, Unit

Stat = Literal["cumulative", "mean", "min", "excess"]


def statistic(units: Sequence[Unit], stat: Stat, whole_turns: bool, mu: float = 0.0) -> float:
    """Nats: the statistic after the last of `units`; NaN, which is below no threshold, where no new one is judged."""
    values = running(units, stat, whole_turns, mu)
    return float(values[-1]) if len(values) else math.nan


def stops_at(units: Sequence[Unit], stat: Stat, threshold: float, whole_turns: bool, mu: float = 0.0) -> int | None:
    """How many of `units` (reused ones included) there are when the rollout stops; None where it does not."""
    return first_below(running(units, stat, whole_turns, mu), threshold, len(units))


def first_below(values: Array, threshold: float, num_units: int) -> int | None:
    """`stops_at` of `num_units` units, from the statistic after each new one: `values` [v]."""
    below = np.flatnonzero(values < threshold)
    return num_units - len(values) + int(below[0]) + 1 if len(below) else None


def running(units: Sequence[Unit], stat: Stat, whole_turns: bool, mu: float = 0.0) -> Array:
    """[v] float64, nats: the statistic after each of the v units that are not reused; NaN before the first judged one.

    The first k values are those of the first k units to the last bit: a decision is the same whenever it is taken.
    """
    new = [unit for unit in units if not unit.reused]
    sums = np.array([unit.logp_sum for unit in new], np.float64)
    tokens = np.array([unit.num_judged for unit in new], np.int64)
    judged = tokens > 0
    means = np.divide(sums, tokens, out=np.zeros(len(new)), where=judged)
    total = np.cumsum(means if whole_turns else np.where(judged, sums, 0.0))
    count = np.cumsum(judged if whole_turns else tokens)
    if stat == "min":
        total = np.minimum.accumulate(means)  # no log-prob is above 0, which stands where there is none
    elif stat == "mean":
        total = total / np.maximum(count, 1)
    elif stat == "excess":
        total = total - mu * count
    return np.where(count > 0, total, np.nan)


def restart_index(units: Sequence[Unit], keep_above: float) -> int:
    """How many of `units` the next rollout reuses: those before the weakest of the leading ones above `keep_above`.

    0 where the first one is not above it; the earliest of equally weak ones.
    """
    passing: list[tuple[float, int]] = []
    for place, unit in enumerate(units):
        if unit.mean is None:
            continue
        if not unit.mean > keep_above:
            break
        passing.append((unit.mean, place))
    return min(passing, default=(0.0, 0))[1]
