"""u4: the share of distinct 4-grams at equal numbers of tokens."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from opd.eval.ngrams import distinct_ngrams, usable_tokens

TEXTS = st.lists(st.lists(st.integers(0, 3), max_size=12), max_size=8)


def by_hand(sequences, n):
    grams = [tuple(one[i : i + n]) for one in sequences for i in range(len(one) - n + 1)]
    return len(set(grams)) / len(grams) if grams else math.nan


@given(TEXTS, st.integers(1, 5))
def test_it_is_distinct_over_all(sequences, n):
    np.testing.assert_equal(distinct_ngrams(sequences, n), by_hand(sequences, n))
    np.testing.assert_equal(distinct_ngrams([np.array(one, np.int32) for one in sequences], n), by_hand(sequences, n))


def test_known_values():
    assert distinct_ngrams(["abcdabcd"]) == 4 / 5
    assert distinct_ngrams([["a", "b", "c", "d"]] * 3) == 1 / 3
    assert distinct_ngrams(["abcd", "bcde"]) == 1  # none across two texts, or there would be more than two
    assert usable_tokens(["abcd", "abc", "abcde"]) == 9


@pytest.mark.parametrize("sequences", [[], [[]], ["abc", "xyz"]])
def test_without_ngrams_there_is_no_value(sequences):
    assert math.isnan(distinct_ngrams(sequences))


def test_exactly_so_many_tokens_are_looked_at():
    sequences = [list(range(start, start + 7)) for start in range(0, 70, 7)]
    seen = []

    class Watched(list):
        def __getitem__(self, part):
            taken = super().__getitem__(part)
            seen.append(len(taken))
            return taken

    assert distinct_ngrams([Watched(one) for one in sequences], num_tokens=24) == 1
    assert seen == [7, 7, 7, 3]  # the last one is cut
    assert math.isnan(distinct_ngrams(sequences, num_tokens=71))
    assert distinct_ngrams(sequences, num_tokens=70) == distinct_ngrams(sequences)
    assert math.isnan(distinct_ngrams([*sequences, "abc"], num_tokens=71))  # too short a text does not count


def test_the_seed_draws_the_texts():
    sequences = ["aaaaaaaa", "abcdefgh"] * 5
    values = {distinct_ngrams(sequences, num_tokens=8, seed=seed) for seed in range(20)}
    assert values == {1 / 5, 1.0}
    assert distinct_ngrams(sequences, num_tokens=24, seed=3) == distinct_ngrams(sequences, num_tokens=24, seed=3)


def test_larger_corpora_have_less_but_not_at_equal_size():
    rng = np.random.default_rng(0)
    small, large = rng.integers(0, 4, (20, 50)), rng.integers(0, 4, (200, 50))
    assert distinct_ngrams(large) < distinct_ngrams(small) / 4
    assert distinct_ngrams(large, num_tokens=1000) == pytest.approx(distinct_ngrams(small), rel=0.1)
