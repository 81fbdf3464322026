from collections import Counter
from itertools import combinations

import numpy as np
import pytest

from opd.eval.at_k import avg_at_k, maj_at_k, pass_at_k

F, T = False, True


def test_avg_at_k_weighs_problems_alike():
    assert avg_at_k([[T, F], [T, T, T, F]]).tolist() == [0.5, 0.75]


def test_pass_at_k_by_hand():
    assert pass_at_k([[T, F, F, F], [T, T, F, F], [F] * 4, [T] * 4], 2) == pytest.approx([1 / 2, 5 / 6, 0, 1])


def test_pass_at_k_is_unbiased():
    rng = np.random.default_rng(0)
    chance, k = 0.2, 3
    rows = (rng.random((20_000, 8)) < chance).tolist()
    assert pass_at_k(rows, k).mean() == pytest.approx(1 - (1 - chance) ** k, abs=0.005)


def test_pass_at_k_is_stable_for_many_samples():
    row = [T] + [F] * 4095
    assert pass_at_k([row], 1024)[0] == pytest.approx(0.25, rel=1e-12)  # one right sample in n: k / n
    assert pass_at_k([[T] * 4000 + [F] * 96], 97)[0] == 1


@pytest.mark.parametrize(
    ("classes", "correct", "expected"),
    [
        ([1, 1, 2], [T, T, F], 1),
        ([1, 2, 2], [T, F, F], 0),
        ([1, 2, None], [T, F, F], 1 / 2),  # two answers tie
        ([1, 2, 3, 1, 2, 3], [T, F, F, T, F, F], 1 / 3),
        ([1, None, None, None], [T, F, F, F], 1),  # no answer does not vote
        ([None, None], [F, F], 0),
        ([1, 2, 3, 3], [T, T, F, F], 1 / 2),  # correct answers are one class, however they are labelled
    ],
)
def test_maj_at_all_samples(classes, correct, expected):
    assert maj_at_k([classes], [correct], len(classes))[0] == pytest.approx(expected)


def test_maj_at_k_is_the_mean_over_all_subsets():
    rng = np.random.default_rng(0)
    for _ in range(150):
        n = int(rng.integers(1, 9))
        classes = [None if c == 4 else int(c) for c in rng.integers(0, 5, n)]
        correct = [c == 0 for c in classes]
        for k in range(1, n + 1):
            votes = [Counter(classes[i] for i in s if classes[i] is not None) for s in combinations(range(n), k)]
            best = [[c for c, count in v.items() if count == max(v.values())] for v in votes]
            expected = np.mean([(0 in winners) / max(1, len(winners)) for winners in best])
            assert maj_at_k([classes], [correct], k)[0] == pytest.approx(expected, abs=1e-12)


def test_one_sample_is_the_mean_whatever_the_metric():
    correct = [[T, F, F, F], [F, F, T, T]]
    classes = [[0, 1, None, 2], [1, 2, 0, 0]]
    assert maj_at_k(classes, correct, 1) == pytest.approx(avg_at_k(correct))
    assert pass_at_k(correct, 1) == pytest.approx(avg_at_k(correct))


def test_too_few_samples_are_refused():
    for call in (lambda: pass_at_k([[T, T], [T]], 2), lambda: maj_at_k([[1], [1]], [[T], []], 1), lambda: avg_at_k([])):
        with pytest.raises(ValueError, match="needs at least one problem"):
            call()
    with pytest.raises(ValueError, match="a class for every sample"):
        maj_at_k([[1]], [[T, T]], 1)
