"""Records that compute: the units of text that a student's tokens and a teacher's have in common."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from opd.records import SpanMap

NONE = np.zeros(0, np.int32)


def spans_of(units: list[tuple[int, int, bool]]) -> SpanMap:
    """Of (student tokens, teacher tokens, aligned) of each unit."""
    sizes = np.array([unit[:2] for unit in units], np.int32).reshape(-1, 2)
    ends = sizes.cumsum(0, dtype=np.int32)
    aligned = np.array([unit[2] for unit in units], bool)
    tokens = np.arange(sizes[:, 1].sum(), dtype=np.int32)
    return SpanMap(NONE, tokens, ends[:, 0], ends[:, 1], np.ones(len(units), np.int32), aligned)


def unit() -> st.SearchStrategy[tuple[int, int, bool]]:
    aligned = st.tuples(st.integers(1, 4), st.integers(1, 4), st.just(True))
    return aligned | st.tuples(st.integers(1, 3), st.integers(0, 3), st.just(False))


@given(st.lists(unit(), max_size=8), st.integers(0, 2**32 - 1))
def test_reduction_by_either_rule(units, seed):
    spans = spans_of(units)
    logps = -np.random.default_rng(seed).exponential(size=len(spans.token_ids)).astype(np.float32)
    split, mean, place = [], [], 0
    for n, m, aligned in units:
        own = logps[place : place + m].astype(np.float64)
        place += m
        split += [own.sum() / n if aligned else 0.0] * n
        mean += [own.mean() if aligned else 0.0] * n
    for rule, expected in (("split", split), ("mean", mean)):
        found = spans.reduce(logps, rule)  # type: ignore[arg-type]
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, np.array(expected, np.float32), rtol=1e-6, atol=1e-7)
    trained = spans.per_token(spans.aligned)
    theirs = np.repeat(spans.aligned, spans.teacher_sizes)
    total = logps[theirs].sum()
    assert spans.reduce(logps, "split")[trained].sum() == pytest.approx(total, rel=1e-5, abs=1e-6)


def test_what_a_map_says_of_its_tokens():
    spans = spans_of([(1, 1, True), (2, 1, True), (1, 0, False), (1, 3, True), (1, 1, False)])
    assert spans.unit_starts.tolist() == [True, True, False, True, True, True]
    assert spans.one_to_one.tolist() == [True, False, False, False, False]
    assert spans.per_token(spans.aligned).tolist() == [True, True, True, False, True, False]
    assert spans_of([]).unit_starts.tolist() == spans_of([]).reduce(NONE, "mean").tolist() == []


def test_texts_of_equal_probability_differ_by_nothing_under_split():
    """One teacher token of probability 1/4 beside two student tokens of 1/2 each: methods of the mean are biased there."""
    spans, own = spans_of([(2, 1, True)]), np.log([0.5, 0.5])
    teacher = np.log([0.25])
    assert spans.reduce(teacher, "split") - own.mean() == pytest.approx([0.0, 0.0], abs=1e-7)
    assert spans.reduce(teacher, "mean") - own.mean() == pytest.approx([np.log(0.5)] * 2, abs=1e-6)
