"""Which requests share a forward pass."""

import numpy as np
import pytest

from opd.records import ScoreRequest
from opd.teachers.planning import plan


def request(context: int, tokens: int, stream: str | None = None, keep: int = 0) -> ScoreRequest:
    return ScoreRequest(np.zeros(context, np.int32), np.zeros(tokens, np.int32), stream=stream, keep_tokens=keep)


def plain(requests, budget=100, cached=True):
    return plan(requests, [None] * len(requests), budget, cached)


def test_similar_lengths_together_within_the_budget():
    assert plain([request(3, 4), request(20, 20), request(30, 15), request(3, 1)]) == [[2, 1], [0, 3]]
    assert plain([request(1, 199), request(1, 2), request(1, 1)]) == [[0], [1, 2]]
    assert plain([]) == []


def test_first_appends_join_those_without_a_stream_and_cached_ones_do_not():
    asked = [request(3, 4), request(2, 5, "a"), request(0, 3, "b", keep=9), request(1, 2, "c", keep=5)]
    assert plain(asked) == [[0, 1], [2, 3]]
    assert plain(asked, cached=False) == [[2, 3, 0, 1]]  # what is not cached is fed again


def test_appends_to_one_stream_follow_one_another():
    asked = [request(0, 9, "a", keep=8), request(1, 2, "b", keep=8), request(0, 20, "a", keep=17), request(5, 5)]
    assert plain(asked) == [[0, 1], [3], [2]]
    for cached in (True, False):
        order = [i for batch in plain(asked, cached=cached) for i in batch]
        assert order.index(0) < order.index(2)


def test_adapters_are_apart():
    asked = [request(2, 2)] * 4
    assert plan(asked, [None, "x", None, "y"], 100, True) == [[0, 2], [1], [3]]


@pytest.mark.parametrize("count", [3, 50])
def test_long_caches_do_not_share_a_pass_without_bound(count):
    passes = plain([request(0, 1, str(i), keep=150) for i in range(count)])
    assert all(len(batch) * 151 <= 400 for batch in passes)
    assert sorted(i for batch in passes for i in batch) == list(range(count))
