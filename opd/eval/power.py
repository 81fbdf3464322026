"""How small a difference between two models a suite can show."""

from collections.abc import Sequence
from math import sqrt
from statistics import NormalDist

import numpy as np

from opd.eval.at_k import avg_at_k
from opd.eval.t_distribution import quantile

AGREEMENT = 0.9  # correlation over problems of two models' chances of being right: variants of one recipe are alike


def detectable_difference(correct: Sequence[Sequence[bool]], *, alpha: float = 0.05, power: float = 0.8) -> float:
    """The difference of accuracy, from 0 to 1, that a paired test at `alpha` finds with this power; from one model's rows.

    Of the variance of a problem's difference, 2 w / k is sampling (k samples, w the mean of p (1 - p) over problems with
    chances p of being right) and 2 (1 - AGREEMENT) b is that models find other problems hard (b is the variance of p); then
    difference = (t + z) sqrt(variance / P), as in Miller, arXiv 2411.00640, section 5. Both are taken half-way to the better
    model, so that a suite on which all answers are wrong does not promise to show everything. With one sample a problem
    w and b cannot be told apart: all is counted as sampling, which makes the result an upper bound.
    """
    means = avg_at_k(correct)
    counts = np.array([len(row) for row in correct], np.float64)
    accuracy, num_problems = float(means.mean()), len(means)
    both = accuracy * (1 - accuracy)  # w + b
    share = 1.0  # of sampling in it; two problems of even odds, half of whose variance is sampling, keep it defined
    if counts.min() > 1:
        within = float((means * (1 - means) * counts / (counts - 1)).mean())
        share = min(1.0, (num_problems * within + 0.25) / (num_problems * both + 0.5))
    spread = 2 * share * float((1 / counts).mean()) + 2 * (1 - AGREEMENT) * (1 - share)
    critical = quantile(1 - alpha, max(1, num_problems - 1)) + NormalDist().inv_cdf(power)
    # d^2 = factor (m + d/2) (1 - m - d/2), from the accuracy m towards the middle
    m, factor = min(accuracy, 1 - accuracy), critical**2 * spread / num_problems
    linear, square = factor * (1 - 2 * m) / 2, 1 + factor / 4
    return min(1.0, (linear + sqrt(linear**2 + 4 * square * factor * m * (1 - m))) / (2 * square))


def power_note(correct: Sequence[Sequence[bool]]) -> str:
    """A sentence for readers: what this many problems and samples can show.

    Example: "30 problems x 8 samples separate differences above about 9.5 points (80 % power, paired, 5 % level)"
    """
    samples = sorted({len(row) for row in correct})
    number = str(samples[0]) if len(samples) == 1 else f"{samples[0]}-{samples[-1]}"
    noun = "sample" if samples[-1] == 1 else "samples"
    points = 100 * detectable_difference(correct)
    shown = f"{points:.1f}" if points < 10 else f"{points:.0f}"
    return (
        f"{len(correct)} problems x {number} {noun} separate differences above about {shown} points "
        "(80 % power, paired, 5 % level)"
    )
