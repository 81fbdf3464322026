"""Whether the intervals and tests of `opd.eval.statistics` hold what they say, on simulated evaluations.

    python -m benchmarks.statistics [--out benchmarks/results/statistics.json]

A problem has a chance of being solved, drawn anew in each round; its samples are solved or not with that chance. Counted
is how often the 95 % interval holds the true value, and how often the paired test rejects at 5 %. Prints JSON; with 2,000
rounds a share of 0.95 has a standard error of 0.005. Ten minutes on one core, with fewer resamples than in use.
"""

import argparse
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.machine import describe
from opd.eval import statistics
from opd.eval.power import detectable_difference
from opd.eval.statistics import Interval, interval, interval_of_suites, paired, recovery
from opd.records import Array

Rng = np.random.Generator
SPREAD = 1.5  # standard deviation over problems of the logit of the chance
OWN = 0.4  # standard deviation of the logit by which a model finds a problem harder than others do
SHAPES = (0.3, 1.0, 4.0)  # of the Beta distribution of chances: nearly all or nothing, U-shaped to flat, one hump


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2000, help="simulated evaluations a row")
    parser.add_argument("--resamples", type=int, default=2000, help="of each interval")
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    options = parser.parse_args(arguments)
    statistics.RESAMPLES = options.resamples
    about = {"machine": describe(), "rounds": options.rounds, "resamples": options.resamples}
    result: dict[str, Any] = {**about, **tables(options.rounds)}
    report = json.dumps(result, indent=1)
    print(report)
    if options.out:
        options.out.write_text(report + "\n")


def tables(rounds: int) -> dict[str, list[dict[str, Any]]]:
    """All rows, by what they are about."""
    grid = [(P, k) for P in (30, 100) for k in (1, 4, 8)]
    means = [(P, k, m, c) for P, k in grid for m in (0.1, 0.3, 0.5, 0.7, 0.9) for c in (SHAPES if k > 1 else (1.0,))]
    runs = [(P, k, R, s) for P, k in grid if k != 8 for R in (2, 3, 5) for s in (0.0, 0.1, 0.3, 1.0)]
    shifts = [(P, k, m, s) for P, k in grid for m in (-2.0, 0.0, 1.0) for s in (0.0, 0.4)]
    gaps = [(P, k, share) for P, k in grid if k == 4 for share in (0.0, 0.5, 1.0)]
    rare = [(P, k, R, rate) for P in (10, 30) for k in (1, 4) for R in (1, 2, 3) for rate in (0.02, 0.05)]
    powers = [(P, k, m) for P, k in grid for m in (-2.0, 0.0, 1.0)]
    return {
        "mean": [mean_row(*row, rounds=rounds) for row in means],
        "runs": [runs_row(*row, rounds=rounds) for row in runs],
        "difference": [difference_row(*row, rounds=rounds) for row in shifts],
        "difference_of_runs": [difference_row(P, k, 0.0, 0.0, 3, s, rounds=rounds) for P, k, R, s in runs if R == 3],
        "rare": [rare_row(*row, rounds=rounds) for row in rare],
        "suites": [suites_row(k, R, s, rounds=rounds) for k in (1, 4) for R, s in ((1, 0.0), (3, 0.0), (3, 0.3))],
        "recovery": [recovery_row(*row, rounds=rounds) for row in gaps],
        "power": [power_row(*row, rounds=rounds) for row in powers],
    }


def mean_row(num_problems: int, samples: int, accuracy: float, shape: float, *, rounds: int) -> dict[str, Any]:
    """An interval of one run; chances are Beta(shape * accuracy, shape * (1 - accuracy))."""

    def once(rng: Rng, seed: int) -> Interval:
        chances = rng.beta(shape * accuracy, shape * (1 - accuracy), num_problems)
        return interval(rng.binomial(samples, chances) / samples, seed=seed)

    row = {"problems": num_problems, "samples": samples, "accuracy": accuracy, "shape": shape}
    return row | covered(once, accuracy, rounds)


def runs_row(num_problems: int, samples: int, num_runs: int, spread: float, *, rounds: int) -> dict[str, Any]:
    """An interval over runs whose logits differ by `spread`, and which find other problems hard."""

    def once(rng: Rng, seed: int) -> Interval:
        return interval(run_accuracies(rng, difficulties(rng, num_problems), samples, num_runs, -1.0, spread), seed=seed)

    truth = expected_chance(-1.0, math.hypot(SPREAD, spread, OWN))
    row = {"problems": num_problems, "samples": samples, "runs": num_runs, "spread": spread, "accuracy": round(truth, 3)}
    return row | covered(once, truth, rounds)


def difference_row(
    num_problems: int, samples: int, level: float, shift: float, num_runs: int = 1, spread: float = 0.0, *, rounds: int
) -> dict[str, Any]:
    """A paired interval and how often p <= 0.05, of two models whose logits differ by `shift`."""
    rejected = 0

    def once(rng: Rng, seed: int) -> Interval:
        nonlocal rejected
        hard = difficulties(rng, num_problems)
        a, b = (run_accuracies(rng, hard, samples, num_runs, level + s, spread) for s in (0.0, shift))
        found = paired(a, b, seed=seed)
        rejected += found.p <= 0.05
        return found

    wide = math.hypot(SPREAD, spread, OWN)
    truth = expected_chance(level + shift, wide) - expected_chance(level, wide)
    row = {"problems": num_problems, "samples": samples, "runs": num_runs, "spread": spread, "level": level}
    row |= {"difference": round(truth, 4)} | covered(once, truth, rounds)
    return row | {"rejected": round(rejected / rounds, 4)}


def rare_row(num_problems: int, samples: int, num_runs: int, rate: float, *, rounds: int) -> dict[str, Any]:
    """`difference_row` of two equal models that solve every problem with the same small chance: most differences are 0."""
    rejected = 0

    def once(rng: Rng, seed: int) -> Interval:
        nonlocal rejected
        a, b = rng.binomial(samples, rate, (2, num_runs, num_problems)) / samples
        found = paired(a, b, seed=seed)
        rejected += found.p <= 0.05
        return found

    row = {"problems": num_problems, "samples": samples, "runs": num_runs, "rate": rate} | covered(once, 0.0, rounds)
    return row | {"rejected": round(rejected / rounds, 4)}


def suites_row(samples: int, num_runs: int, spread: float, *, rounds: int) -> dict[str, Any]:
    """The mean of three suites of 30, 60 and 100 problems, ever easier, which the same runs were evaluated on."""
    sizes, levels = (30, 60, 100), (-2.0, -0.5, 1.0)

    def once(rng: Rng, seed: int) -> Interval:
        runs = spread * rng.standard_normal((num_runs, 1))
        suites = [
            run_accuracies(rng, difficulties(rng, size), samples, num_runs, level + runs)
            for size, level in zip(sizes, levels)
        ]
        return interval_of_suites(suites, seed=seed)

    truth = float(np.mean([expected_chance(level, math.hypot(SPREAD, spread, OWN)) for level in levels]))
    row = {"problems": sizes, "samples": samples, "runs": num_runs, "spread": spread}
    return row | {"accuracy": round(truth, 3)} | covered(once, truth, rounds)


def recovery_row(num_problems: int, samples: int, share: float, *, rounds: int) -> dict[str, Any]:
    """An interval of the share of a gap of 1.5 logits; rounds whose gap is not clearly above 0 have none."""
    start, goal = (expected_chance(level, math.hypot(SPREAD, OWN)) for level in (-1.5, 0.0))
    level = bisect(lambda x: expected_chance(x, math.hypot(SPREAD, OWN)), start + share * (goal - start))

    def once(rng: Rng, seed: int) -> Interval:
        hard = difficulties(rng, num_problems)
        return recovery(*(run_accuracies(rng, hard, samples, 1, x) for x in (-1.5, level, 0.0)), seed=seed)

    return {"problems": num_problems, "samples": samples, "share": share} | covered(once, share, rounds)


def power_row(num_problems: int, samples: int, level: float, *, rounds: int) -> dict[str, Any]:
    """How often two models are told apart whose accuracies differ by what `detectable_difference` says, on average."""
    rng = np.random.default_rng(0)
    base = expected_chance(level, math.hypot(SPREAD, OWN))
    stated = float(np.mean([detectable_difference(one_matrix(rng, num_problems, samples, level)) for _ in range(100)]))
    if base + stated > 0.98:
        return {"problems": num_problems, "samples": samples, "accuracy": round(base, 3), "stated": round(stated, 3)}
    other = bisect(lambda x: expected_chance(x, math.hypot(SPREAD, OWN)), base + stated)
    row = difference_row(num_problems, samples, level, other - level, rounds=rounds)
    return {key: row[key] for key in ("problems", "samples", "rejected")} | {
        "accuracy": round(base, 3),
        "stated": round(stated, 3),
    }


def difficulties(rng: Rng, num_problems: int) -> Array:
    return SPREAD * rng.standard_normal(num_problems)


def run_accuracies(rng: Rng, hard: Array, samples: int, num_runs: int, level: float | Array, spread: float = 0.0) -> Array:
    """[R, P] shares of correct samples: logit = level + problem + run + the run's own view of the problem."""
    runs = spread * rng.standard_normal((num_runs, 1))
    logits = level + hard + runs + OWN * rng.standard_normal((num_runs, len(hard)))
    return rng.binomial(samples, 1 / (1 + np.exp(-logits))) / samples


def one_matrix(rng: Rng, num_problems: int, samples: int, level: float) -> list[list[bool]]:
    """A problems x samples matrix of right and wrong."""
    shares = run_accuracies(rng, difficulties(rng, num_problems), samples, 1, level)[0]
    return [[sample < round(share * samples) for sample in range(samples)] for share in shares]


def expected_chance(level: float, spread: float) -> float:
    """The mean of sigmoid(level + spread * z) over a standard normal z, by Gauss-Hermite quadrature."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(80)
    return float(weights @ (1 / (1 + np.exp(-(level + spread * nodes)))) / weights.sum())


def bisect(rising: Callable[[float], float], target: float) -> float:
    low, high = -20.0, 20.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < target else (low, middle)
    return low


def covered(once: Callable[[Rng, int], Interval], truth: float, rounds: int) -> dict[str, Any]:
    """The share of intervals that hold the truth, and their mean width; those that are not defined are counted apart."""
    rng = np.random.default_rng(0)
    found = [once(rng, seed) for seed in range(rounds)]
    defined = [i for i in found if not math.isnan(i.value)]
    hits = sum(i.low - 1e-9 <= truth <= i.high + 1e-9 for i in defined)
    widths = [i.high - i.low for i in defined]
    row = {"coverage": round(hits / len(defined), 4), "width": round(float(np.median(widths)), 4)}
    return row | ({"undefined": round(1 - len(defined) / rounds, 4)} if len(defined) < rounds else {})


if __name__ == "__main__":
    main()
