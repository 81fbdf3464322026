"""Means over problems with intervals, differences with p-values, and shares of a gap.

P = problems, R = runs (training seeds) of one variant. A per-problem vector is [P]; several runs make it [R, P].

Intervals resample problems (the clusters), never single samples: the samples of a problem are alike. The form is the BCa
bootstrap (Efron 1987) with two changes, both for few problems: Student's t quantile with P - 1 degrees of freedom stands
where BCa has the normal one, and quantiles are those of the mid-distribution (Parzen), since resampled means of right and
wrong answers lie on a grid. A percentile bootstrap covers 0.90-0.92 instead of 0.95 at 30 problems and an accuracy of 0.1,
and a studentised one 0.98; this one covers 0.94-0.97 for 30 and 100 problems, 4 and 8 samples, accuracies of 0.1-0.9. With
one sample a problem (plain binomial counts) it is conservative at 30 problems: 0.96-0.99. Differences are covered 0.94-0.98.
Measured by `benchmarks/statistics.py`.

Where nothing varies there is nothing to resample: if all of P problems gave c, then at most a share
u = 1 - (alpha/2)^(1/P) of problems gives something else (Clopper and Pearson; for 95 % about 3.7/P), and the mean is within
that of c. This needs bounds: it holds where all values lie in [0, 1].

With R > 1 runs the interval covers new problems and new seeds. Half-widths for either are added in quadrature (Howe 1974):
the bootstrap's, less the noise of single runs that it holds, and Student's t with R - 1 degrees of freedom over the runs'
means, which hold that noise too; for a difference, with the degrees of freedom of Welch and Satterthwaite. Three runs make
the t quantile 4.3, the honest price of three seeds: the interval covers 0.95-0.99, conservative where seeds matter little;
with five runs 0.95-0.98, with two 0.95-0.995, and differences of three runs each 0.96-0.99. With one run the spread of seeds
is unknown and not included.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf, nan, sqrt
from statistics import NormalDist
from typing import Any

import numpy as np

from opd.eval.at_k import avg_at_k, maj_at_k, pass_at_k
from opd.eval.power import detectable_difference, power_note
from opd.eval.student import quantile
from opd.records import Array

__all__ = [
    "Difference",
    "Interval",
    "avg_at_k",
    "detectable_difference",
    "holm",
    "interval",
    "maj_at_k",
    "paired",
    "pass_at_k",
    "power_note",
    "recovery",
]

RESAMPLES = 10_000
CHUNK = 2**20  # indices drawn at once: memory stays small for any number of problems
FEW = 10  # problems, below which the limits are at least those of Student's t
EXACT = 14  # problems that differ, up to which all 2^n sign flips are tried
ROUNDING = 1e-12  # differences this small are rounding errors of means
NORMAL = NormalDist()


@dataclass(frozen=True)
class Interval:
    """An estimate with its confidence limits. All three are NaN where there is no estimate; `note` then says why."""

    value: float
    low: float
    high: float
    note: str = field(default="", kw_only=True)


@dataclass(frozen=True)
class Difference(Interval):
    """A difference with its confidence limits, and the p-value (two-sided) of there being none."""

    p: float


def interval(values: Any, *, level: float = 0.95, seed: int = 0) -> Interval:
    """The mean over problems of [P] or [R, P] values, and its confidence interval.

    For proportions (all values in [0, 1]) the limits stay in [0, 1]. A single problem whose value is no proportion has no
    interval: its limits are NaN. Raises ValueError for no problems, or values that are not finite.
    """
    return Interval(*_Sample([values], seed).limits(np.ones(1), level))


def paired(a: Any, b: Any, *, level: float = 0.95, seed: int = 0) -> Difference:
    """b - a on the same P problems, in the same order; each [P] or [R, P], with runs of its own.

    The interval is as for a mean, of the differences, and holds 0 whenever p is above 1 - level. For single runs p is that
    of a permutation test: the sign of each problem's difference is flipped at random, all ways if at most 14 problems
    differ, else 10,000 times. With several runs, flipping problems would leave out the seeds: p is then the level at which
    the quadrature of Student's t by problem and by run touches 0. Raises ValueError for unequal numbers of problems.
    """
    sample = _Sample([a, b], seed)
    weights = np.array([-1.0, 1.0])
    value, low, high = sample.limits(weights, level)
    single = all(len(part) == 1 for part in sample.parts)
    p = sign_flip_test(weights @ sample.means, seed) if single else sample.t_test(weights)
    if p > 1 - level:
        low, high = min(low, 0.0), max(high, 0.0)
    return Difference(value, low, high, p)


def recovery(start: Any, run: Any, goal: Any, *, level: float = 0.95, seed: int = 0) -> Interval:
    """The share of the gap between `start` and `goal` that `run` closes: (run - start) / (goal - start).

    The interval holds every share r for which the interval of run - start - r (goal - start) holds 0 (Fieller's way, here
    with the bootstrap, problems being resampled for all three at once): a ratio of noisy numbers has no other honest one.
    The value is NaN, and `note` says why, unless the gap itself is clearly above 0: its own interval excludes 0.
    """
    sample = _Sample([start, run, goal], seed)
    means = sample.means.mean(1)
    gap, low, high = sample.limits(np.array([-1.0, 0.0, 1.0]), level)
    if not low > 0:
        gap_text = f"{gap:.3g} [{low:.3g}, {high:.3g}]"
        return Interval(nan, nan, nan, note=f"the gap between start and goal is not clearly above 0: {gap_text}")
    share = float((means[1] - means[0]) / gap)

    def excess(r: float, side: int) -> float:
        """Lower (side 1) or upper (side 2) limit of run - start - r (goal - start), which falls as r grows."""
        return sample.limits(np.array([r - 1.0, 1.0, -r]), level)[side]

    return Interval(share, _crossing(lambda r: excess(r, 1), share, -1.0), _crossing(lambda r: excess(r, 2), share, 1.0))


def holm(p: Sequence[float]) -> list[float]:
    """Holm's step-down adjustment for the number of tests, in the given order; an adjusted p below alpha is significant."""
    adjusted = [0.0] * len(p)
    so_far = 0.0
    for rank, index in enumerate(sorted(range(len(p)), key=lambda i: p[i])):
        so_far = max(so_far, min(1.0, (len(p) - rank) * p[index]))
        adjusted[index] = so_far
    return adjusted


class _Sample:
    """One or more variants on the same problems, their problems resampled jointly; intervals for sums of their means."""

    def __init__(self, parts: Sequence[Any], seed: int):
        self.parts = [np.atleast_2d(np.asarray(part, np.float64)) for part in parts]
        counts = {part.shape[1] for part in self.parts}
        if len(counts) != 1 or 0 in counts or any(part.ndim != 2 for part in self.parts):
            raise ValueError(f"values must be [P] or [R, P] of the same P > 0 problems, not {[p.shape for p in self.parts]}")
        if not all(np.isfinite(part).all() for part in self.parts):
            raise ValueError("values must be finite")
        self.means = np.stack([part.mean(0) for part in self.parts])  # [V, P]
        self.num_problems = counts.pop()
        self.bounded = all((part >= 0).all() and (part <= 1).all() for part in self.parts)
        self.resampled = _resample(self.means, seed)  # [V, B]
        self.runs = [_spread_of_runs(part) if len(part) > 1 else None for part in self.parts]

    def limits(self, weights: Array, level: float) -> tuple[float, float, float]:
        """The weighted sum of the variants' means, and its confidence limits. `weights` is [V]."""
        values = weights @ self.means  # [P]
        value = float(values.mean())
        least, most = float(np.minimum(weights, 0).sum()), float(np.maximum(weights, 0).sum())
        if np.ptp(values) > ROUNDING * np.abs(self.means).max():
            low, high = _bca(weights @ self.resampled - value, values - value, level)
            if self.num_problems < FEW:  # resampled means cannot reach beyond the values seen, however few
                reach = quantile(level, self.num_problems - 1) * sqrt(values.var(ddof=1) / self.num_problems)
                low, high = min(low, -reach), max(high, reach)
        elif self.bounded:
            share = 1 - ((1 - level) / 2) ** (1 / self.num_problems)
            low, high = share * (least - value), share * (most - value)
        else:
            low = high = nan if self.num_problems == 1 else 0.0
        unseen = self._unseen(values, level) if weights.min() < 0 else 0.0
        widen = self._widener(weights, level)
        low, high = value - sqrt(widen(low**2) + unseen), value + sqrt(widen(high**2) + unseen)
        return (value, max(low, least), min(high, most)) if self.bounded else (value, low, high)

    def t_test(self, weights: Array) -> float:
        """The two-sided p at which the interval touches 0, with Student's t by problem in place of the bootstrap."""
        values = weights @ self.means
        squared_error = float(values.var(ddof=1)) / self.num_problems if self.num_problems > 1 else inf

        def half_width(level: float) -> float:
            t = quantile(level, max(1, self.num_problems - 1))
            return sqrt(self._widener(weights, level)(squared_error * t**2))

        low, high = -12.0, 0.0  # log10 p
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (middle, high) if half_width(1 - 10**middle) > abs(values.mean()) else (low, middle)
        return 10**high

    def _unseen(self, differences: Array, level: float) -> float:
        """The squared half-width of one problem more in either direction, differing by the least that any does.

        It matters where few differ, perhaps all in the same direction (Bonett and Price 2012 add two such problems to
        proportions); without it, intervals of differences of rare successes cover 0.85 at 30 problems of one sample.
        """
        differing = np.abs(differences)[np.abs(differences) > ROUNDING]
        if not self.bounded or not len(differing):
            return 0.0
        t = quantile(level, max(1, self.num_problems - 1))
        return 2 * (t * differing.min() / self.num_problems) ** 2

    def _widener(self, weights: Array, level: float) -> Callable[[float], float]:
        """From the squared half-width by problem to that by problem and run."""
        noise = 0.0
        of_runs: list[tuple[float, int]] = []  # squared errors of the variants' runs, and their degrees of freedom
        for weight, part, spread in zip(weights, self.parts, self.runs):
            if spread is not None:
                of_runs.append((weight**2 * spread[0], len(part) - 1))
                noise += weight**2 * spread[1]
        total = sum(error for error, _ in of_runs)
        degrees = total**2 / sum(error**2 / df for error, df in of_runs) if total else 1.0  # Welch and Satterthwaite
        by_run = total * _between(level, degrees) ** 2
        by_problem = float(np.var(weights @ self.means, ddof=1)) / self.num_problems if self.num_problems > 1 else 0.0
        share = min(1.0, noise / by_problem) if by_problem else 0.0  # of noise of single runs in the variance by problem
        # The runs' means hold the noise too, but by chance less of it, so that the noise by problem is the least.
        return lambda squared: (1 - share) * squared + max(by_run, share * squared)


def _between(level: float, df: float) -> float:
    """Student's t quantile, linear between whole degrees of freedom: a little too large, as it is convex."""
    whole = int(df)
    return quantile(level, whole) + (df - whole) * (quantile(level, whole + 1) - quantile(level, whole))


def _resample(means: Array, seed: int) -> Array:
    """[V, B]: the means over P problems drawn with replacement, the same problems for all V rows."""
    rng = np.random.default_rng(seed)
    num_rows, num_problems = means.shape
    resampled = np.empty((num_rows, RESAMPLES))
    step = max(1, CHUNK // num_problems)
    for start in range(0, RESAMPLES, step):
        drawn = rng.integers(num_problems, size=(min(step, RESAMPLES - start), num_problems))
        for row in range(num_rows):
            resampled[row, start : start + step] = means[row].take(drawn).mean(1)
    return resampled


def _spread_of_runs(part: Array) -> tuple[float, float]:
    """Squared standard errors of the grand mean of [R, P] by two-way analysis of variance: of runs, and of noise alone."""
    num_runs, num_problems = part.shape
    by_run, by_problem = part.mean(1), part.mean(0)
    residual = part - by_run[:, None] - by_problem + part.mean()
    degrees = (num_runs - 1) * max(1, num_problems - 1)
    noise = float((residual**2).sum()) / degrees
    return float(by_run.var(ddof=1)) / num_runs, noise / (num_runs * num_problems)


def _bca(deviations: Array, influence: Array, level: float) -> tuple[float, float]:
    """Limits relative to the mean: quantiles of the resampled means' deviations [B], corrected for bias and skewness.

    `influence` is [P], each problem's deviation from the mean. Its skewness gives the acceleration, and for a mean, to the
    order of the correction, the bias as well (Efron 1987, section 4).
    """
    scale = deviations.std()
    # Rounded, so that means that differ by rounding errors alone are one point of the grid.
    points, counts = np.unique(np.round(deviations / scale, 9), return_counts=True)
    middle = (np.cumsum(counts) - counts / 2) / len(deviations)
    skew = float((influence**3).sum() / (6 * (influence**2).sum() ** 1.5))
    t = quantile(level, len(influence) - 1) * sqrt(len(influence) / (len(influence) - 1))
    levels = [NORMAL.cdf(skew + z / max(1e-9, 1 - skew * z)) for z in (skew - t, skew + t)]
    low, high = np.interp(levels, middle, points * scale)
    return float(low), float(high)


def _crossing(function: Callable[[float], float], inside: float, direction: float) -> float:
    """Where a falling function changes sign, from `inside` on in one direction; infinite if it does not."""
    width = 1.0
    while function(inside + direction * width) * direction >= 0:
        width *= 2
        if width > 2**20:
            return direction * inf
    low, high = 0.0, width
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if function(inside + direction * middle) * direction >= 0 else (low, middle)
    return inside + direction * high


def sign_flip_test(differences: Array, seed: int = 0) -> float:
    """Two-sided p of the mean of [P] differences being 0, under random signs. Those that are 0 do not count."""
    differing = differences[np.abs(differences) > ROUNDING]
    observed = abs(differing.sum()) * (1 - 1e-9)  # as extreme, but for rounding errors, counts as extreme
    if len(differing) <= EXACT:
        flips = np.arange(2 ** len(differing))[:, None] >> np.arange(len(differing)) & 1
        return float(np.mean(np.abs((2 * flips - 1) @ differing) >= observed))
    rng = np.random.default_rng(seed)
    step = max(1, CHUNK // len(differing))
    extreme = 0
    for start in range(0, RESAMPLES, step):
        flips = rng.integers(0, 2, size=(min(step, RESAMPLES - start), len(differing)), dtype=np.int8)
        extreme += int(np.sum(np.abs((2 * flips - 1).astype(np.float64) @ differing) >= observed))
    return (1 + extreme) / (1 + RESAMPLES)
