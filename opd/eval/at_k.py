"""avg@k, pass@k and maj@k of a problems x samples matrix: one number a problem, whose mean is the metric.

P = problems, n = samples of a problem, c = correct ones among them.
"""

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from math import comb

import numpy as np

from opd.records import Array


def avg_at_k(correct: Sequence[Sequence[bool]]) -> Array:
    """[P]: the share of correct samples, c / n. Rows may differ in length. Raises ValueError for an empty row."""
    _check(correct, 1)
    return np.array([np.mean(row) for row in correct], np.float64)


def pass_at_k(correct: Sequence[Sequence[bool]], k: int) -> Array:
    """[P]: the chance that at least one of k samples is correct, 1 - C(n-c, k) / C(n, k).

    The unbiased estimate of Chen et al., arXiv 2107.03374, equation 1. Raises ValueError if a row has fewer than k samples.
    """
    _check(correct, k)
    return np.array([1 - comb(len(row) - sum(row), k) / comb(len(row), k) for row in correct], np.float64)


def maj_at_k(classes: Sequence[Sequence[int | None]], correct: Sequence[Sequence[bool]], k: int) -> Array:
    """[P]: the chance that the most frequent answer among k samples is correct; m answers that tie have 1/m each.

    `classes` says which samples of a problem gave the same answer; None is no answer, and does not vote. A class is correct
    if its samples are. For k < n this is the exact mean over all subsets of k samples, nothing is drawn. Raises ValueError
    if a row has fewer than k samples.
    """
    _check(correct, k)
    if [len(row) for row in classes] != [len(row) for row in correct]:
        raise ValueError("maj@k needs a class for every sample")
    return np.array([_majority(labels, row, k) for labels, row in zip(classes, correct)], np.float64)


def _check(correct: Sequence[Sequence[bool]], k: int) -> None:
    shortest = min(map(len, correct), default=0)
    if k < 1 or shortest < k:
        raise ValueError(f"@{k} needs at least one problem and {max(1, k)} samples of each; one has {shortest}")


def _majority(labels: Sequence[int | None], correct: Sequence[bool], k: int) -> float:
    votes = [(label, right) for label, right in zip(labels, correct) if label is not None]
    right = sum(right for _, right in votes)  # correct answers are one class, however they are labelled
    others = sorted(Counter(label for label, right in votes if not right).values())
    return _chance_of_majority(right, tuple(others), len(labels) - len(votes), k)


@lru_cache(maxsize=65536)
def _chance_of_majority(right: int, others: tuple[int, ...], silent: int, k: int) -> float:
    """Over all subsets of k samples: the mean of [the right class has the most votes] / (classes with that many).

    Subsets are counted by polynomials in x, the samples taken: j of a class of size s are C(s, j) x^j. With
    t votes for the right class another may take up to t; one that takes t is marked by y, and the integral of y^m over
    [0, 1] is the 1 / (m + 1) of m ties. Gauss-Legendre nodes for y make that integral exact.
    """
    total = right + sum(others) + silent
    favourable = 0.0
    for t in range(1, min(right, k) + 1):
        nodes, weights = np.polynomial.legendre.leggauss((k // t) // 2 + 1)
        y = (nodes + 1) / 2
        ways = np.zeros((len(y), k - t + 1))  # [node, samples taken beside the right class]
        ways[:, 0] = comb(right, t) / comb(total, k)
        for size in others:
            if size >= t:
                ways = _take(ways, size, t, y)
        free = silent + sum(size for size in others if size < t)  # these can be taken as one: no limit binds
        rest = np.array([comb(free, k - t - taken) for taken in range(k - t + 1)], np.float64)
        favourable += float(weights / 2 @ (ways @ rest))
    return favourable


def _take(ways: Array, size: int, limit: int, y: Array) -> Array:
    """`ways` times the polynomial of one more class of which at most `limit` are taken; exactly `limit` is marked by y."""
    taken = np.zeros_like(ways)
    for j in range(min(limit, ways.shape[1] - 1) + 1):
        mark = y[:, None] if j == limit else 1.0
        taken[:, j:] += mark * comb(size, j) * ways[:, : ways.shape[1] - j]
    return taken
