"""Means over problems with intervals, differences with p-values, and shares of a gap.

P = problems, R = runs (training seeds) of one variant. A per-problem vector is [P]; several runs make it [R, P].

Intervals resample problems (the clusters), never single samples: the samples of a problem are alike. The form is the BCa
bootstrap (Efron 1987) with two changes, both for few problems: Student's t quantile with P - 1 degrees of freedom stands
where BCa has the normal one, and quantiles are those of the mid-distribution (Parzen), since resampled means of right and
wrong answers lie on a grid. A percentile bootstrap covers 0.90-0.92 instead of 0.95 at 30 problems and an accuracy of 0.1,
and a studentised one 0.98; this one covers 0.94-0.97 for 30 and 100 problems, 4 and 8 samples, accuracies of 0.1-0.9. With
one sample a problem (plain binomial counts) it is conservative at 30 problems: 0.96-0.99. Differences are covered 0.94-0.98,
and between equal models p is below 0.05 in 2-5 % of cases, in at most 2.4 % where successes are rare (a rate of 0.02 or 0.05
at 10 or 30 problems). Measured by `benchmarks/statistics.py`.

Where nothing varies there is nothing to resample: if all of P problems gave c, then at most a share
u = 1 - (alpha/2)^(1/P) of problems gives something else (Clopper and Pearson; for 95 % about 3.7/P), and the mean is within
that of c. This needs bounds: it holds where all values lie in [0, 1]. For differences it agrees with the sign test.

With R > 1 runs the interval covers new problems and new seeds. Half-widths for either are added in quadrature (Howe 1974):
the bootstrap's, less the noise of single runs that it holds, and Student's t with R - 1 degrees of freedom over the runs'
means, which hold that noise too; for a difference, with the degrees of freedom of Welch and Satterthwaite. Three runs make
the t quantile 4.3, the honest price of three seeds: the interval covers 0.95-0.99, conservative where seeds matter little;
with five runs 0.95-0.98, with two 0.95-0.995, and differences of three runs each 0.96-0.99. With one run the spread of seeds
is unknown and not included. The mean of several suites adds their half-widths by problem in quadrature too: 0.96-0.99.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf, log10, nan, sqrt
from statistics import NormalDist
from typing import Any

import numpy as np

from opd.eval.t_distribution import quantile
from opd.records import Array

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
    return interval_of_suites([values], level=level, seed=seed)


def interval_of_suites(suites: Sequence[Any], *, level: float = 0.95, seed: int = 0) -> Interval:
    """The unweighted mean of the means of several suites, each [P] or [R, P] with P of its own and the same R runs.

    Suites have other problems, so that their variances add up; the runs are the same, so that their spread is taken of the
    runs' means over suites. Raises ValueError for no suites, and as `interval` does.
    """
    found = _Estimate([_Variants([values], seed) for values in suites], np.ones(1))
    return Interval(found.value, *found.limits(level))


def paired(a: Any, b: Any, *, level: float = 0.95, seed: int = 0) -> Difference:
    """b - a on the same P problems, in the same order; each [P] or [R, P], with runs of its own.

    The interval is as for a mean, of the differences. p is the larger of two: the level at which that interval touches 0,
    and the permutation test that flips the sign of each problem's difference (its mean over runs) at random, all ways if at
    most 14 problems differ, else 10,000 times. So p is at most 1 - level where the interval excludes 0, and above it where
    the interval, widened if need be, holds 0. Raises ValueError for unequal numbers of problems.
    """
    return paired_suites([(a, b)], level=level, seed=seed)


def paired_suites(pairs: Sequence[tuple[Any, Any]], *, level: float = 0.95, seed: int = 0) -> Difference:
    """The unweighted mean over suites of b - a, given as (a, b) of each suite; see `paired` and `interval_of_suites`."""
    weights = np.array([-1.0, 1.0])
    suites = [_Variants(pair, seed) for pair in pairs]
    found = _Estimate(suites, weights)
    flipped = np.concatenate([weights @ suite.means / suite.means.shape[1] for suite in suites])
    p = found.p_value(sign_flip_test(flipped, seed))
    low, high = found.limits(level)
    if p > 1 - level:
        low, high = min(low, 0.0), max(high, 0.0)
    return Difference(found.value, low, high, p)


def recovery(start: Any, run: Any, goal: Any, *, level: float = 0.95, seed: int = 0) -> Interval:
    """The share of the gap between `start` and `goal` that `run` closes: (run - start) / (goal - start).

    The interval holds every share r for which the interval of run - start - r (goal - start) holds 0 (Fieller's way, here
    with the bootstrap, problems being resampled for all three at once): a ratio of noisy numbers has no other honest one.
    The value is NaN, and `note` says why, unless the gap itself is clearly above 0: its own interval excludes 0.
    """
    suites = [_Variants([start, run, goal], seed)]
    means = suites[0].means.mean(1)
    gap = _Estimate(suites, np.array([-1.0, 0.0, 1.0]))
    low, high = gap.limits(level)
    if not low > 0:
        gap_text = f"{gap.value:.3g} [{low:.3g}, {high:.3g}]"
        return Interval(nan, nan, nan, note=f"the gap between start and goal is not clearly above 0: {gap_text}")
    share = float((means[1] - means[0]) / gap.value)

    def excess(r: float, side: int) -> float:
        """Lower (side 0) or upper (side 1) limit of run - start - r (goal - start), which falls as r grows."""
        return _Estimate(suites, np.array([r - 1.0, 1.0, -r])).limits(level)[side]

    return Interval(share, _crossing(lambda r: excess(r, 0), share, -1.0), _crossing(lambda r: excess(r, 1), share, 1.0))


def holm(p: Sequence[float]) -> list[float]:
    """Holm's step-down adjustment for the number of tests, in the given order; an adjusted p below alpha is significant."""
    adjusted = [0.0] * len(p)
    so_far = 0.0
    for rank, index in enumerate(sorted(range(len(p)), key=lambda i: p[i])):
        so_far = max(so_far, min(1.0, (len(p) - rank) * p[index]))
        adjusted[index] = so_far
    return adjusted


class _Variants:
    """One or more variants on the same problems, which are resampled for all at once."""

    def __init__(self, parts: Sequence[Any], seed: int):
        self.parts = [np.atleast_2d(np.asarray(part, np.float64)) for part in parts]
        counts = {part.shape[-1] for part in self.parts}
        if len(counts) != 1 or 0 in counts or any(part.ndim != 2 for part in self.parts):
            raise ValueError(f"values must be [P] or [R, P] of the same P > 0 problems, not {[p.shape for p in self.parts]}")
        if not all(np.isfinite(part).all() for part in self.parts):
            raise ValueError("values must be finite")
        self.means = np.stack([part.mean(0) for part in self.parts])  # [V, P]
        self.bounded = all((part >= 0).all() and (part <= 1).all() for part in self.parts)
        self.resampled = _resample(self.means, seed)  # [V, B]


class _Estimate:
    """The weighted sum of the variants' means, averaged over suites, and its confidence limits. `weights` is [V]."""

    def __init__(self, suites: Sequence[_Variants], weights: Array):
        if len({tuple(len(part) for part in suite.parts) for suite in suites}) != 1:
            raise ValueError("needs at least one suite, and the same runs on all suites")
        self.sums = [_Sum(suite, weights) for suite in suites]
        self.value = float(np.mean([each.value for each in self.sums]))
        self.bounds = (float(np.minimum(weights, 0).sum()), float(np.maximum(weights, 0).sum()))
        if not all(suite.bounded for suite in suites):
            self.bounds = (-inf, inf)
        variance = sum(each.squared_error for each in self.sums)  # of the sum over suites; as are all below
        noise, of_runs = 0.0, []  # squared errors of the variants' runs, and their degrees of freedom
        for place, weight in enumerate(weights):
            runs = [suite.parts[place] for suite in suites]
            if len(runs[0]) > 1:
                sums = np.sum([part.mean(1) for part in runs], axis=0)  # [R]
                of_runs.append((weight**2 * float(sums.var(ddof=1)) / len(sums), len(sums) - 1))
                noise += weight**2 * sum(map(_noise, runs))
        self.by_run = sum(error for error, _ in of_runs)
        # Welch and Satterthwaite
        self.degrees = self.by_run**2 / sum(error**2 / df for error, df in of_runs) if self.by_run else 1.0
        self.share = min(1.0, noise / variance) if variance else 0.0  # of noise of single runs in the variance by problem

    def limits(self, level: float) -> tuple[float, float]:
        reaches = np.array([each.reach(level) for each in self.sums])  # [S, 2]
        unseen = sum(each.unseen(level) for each in self.sums)
        by_run = self.by_run * _between(level, self.degrees) ** 2 if self.by_run else 0.0
        squared = (reaches**2).sum(0)
        # The runs' means hold the noise too, but by chance less of it, so that the noise by problem is the least.
        widened = (1 - self.share) * squared + np.maximum(by_run, self.share * squared)
        below, above = np.sqrt(widened + unseen) / len(self.sums)
        return max(self.value - float(below), self.bounds[0]), min(self.value + float(above), self.bounds[1])

    def p_value(self, least: float) -> float:
        """The two-sided p at which the limits touch 0, those of every level above 1 - p holding it; or `least` if larger."""
        if self._excludes_zero(1 - least):
            return least
        low, high = log10(least), 0.0
        for _ in range(20):
            middle = (low + high) / 2
            low, high = (low, middle) if self._excludes_zero(1 - 10**middle) else (middle, high)
        return 10**high

    def _excludes_zero(self, level: float) -> bool:
        low, high = self.limits(level)
        return low > 0 or high < 0


class _Sum:
    """The weighted sum of the variants' means on one suite, and how far off it may be for its problems alone."""

    def __init__(self, suite: _Variants, weights: Array):
        self.values = weights @ suite.means  # [P]
        self.value = float(self.values.mean())
        self.num_problems = len(self.values)
        self.squared_error = float(self.values.var(ddof=1)) / self.num_problems if self.num_problems > 1 else 0.0
        self.range = (float(np.minimum(weights, 0).sum()), float(np.maximum(weights, 0).sum())) if suite.bounded else None
        varies = np.ptp(self.values) > ROUNDING * np.abs(suite.means).max()
        self.grid = _grid(weights @ suite.resampled - self.value) if varies else None
        sizes = np.abs(self.values)
        sizes = sizes[sizes > ROUNDING]
        self.least = float(sizes.min()) if varies and suite.bounded and weights.min() < 0 and len(sizes) else 0.0

    def reach(self, level: float) -> tuple[float, float]:
        """Limits relative to the value."""
        if self.grid is not None:
            low, high = _bca(*self.grid, self.values - self.value, level)
            if self.num_problems < FEW:  # resampled means cannot reach beyond the values seen, however few
                reach = quantile(level, self.num_problems - 1) * sqrt(self.squared_error)
                low, high = min(low, -reach), max(high, reach)
            return low, high
        if self.range is not None:
            share = 1 - ((1 - level) / 2) ** (1 / self.num_problems)
            return share * (self.range[0] - self.value), share * (self.range[1] - self.value)
        return (nan, nan) if self.num_problems == 1 else (0.0, 0.0)

    def unseen(self, level: float) -> float:
        """The squared half-width of one problem more in either direction, differing by the least that any does.

        It matters where few differ, perhaps all in the same direction (Bonett and Price 2012 add two such problems to
        proportions); without it, intervals of differences of rare successes cover 0.85 at 30 problems of one sample.
        """
        t = quantile(level, max(1, self.num_problems - 1))
        return 2 * (t * self.least / self.num_problems) ** 2


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


def _noise(part: Array) -> float:
    """The squared standard error that noise alone gives the mean of [R, P], by two-way analysis of variance."""
    num_runs, num_problems = part.shape
    residual = part - part.mean(1)[:, None] - part.mean(0) + part.mean()
    return float((residual**2).sum()) / ((num_runs - 1) * max(1, num_problems - 1)) / (num_runs * num_problems)


def _grid(deviations: Array) -> tuple[Array, Array]:
    """The values that occur among [B], and the mid-distribution (Parzen) at each."""
    scale = deviations.std()
    # Rounded, so that means that differ by rounding errors alone are one point of the grid.
    points, counts = np.unique(np.round(deviations / scale, 9), return_counts=True)
    return points * scale, (np.cumsum(counts) - counts / 2) / len(deviations)


def _bca(points: Array, middle: Array, influence: Array, level: float) -> tuple[float, float]:
    """Limits relative to the mean: quantiles of the resampled means' deviations, corrected for bias and skewness.

    `points` and `middle` are the `_grid` of the deviations; `influence` is [P], each problem's deviation from the mean. Its
    skewness gives the acceleration and, for a mean and to the order of the correction, the bias (Efron 1987, section 4).
    """
    skew = float((influence**3).sum() / (6 * (influence**2).sum() ** 1.5))
    t = quantile(level, len(influence) - 1) * sqrt(len(influence) / (len(influence) - 1))
    levels = [NORMAL.cdf(skew + z / max(1e-9, 1 - skew * z)) for z in (skew - t, skew + t)]
    low, high = np.interp(levels, middle, points)
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
