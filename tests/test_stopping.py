"""Stop and restart rules: the definitions written out, and what must hold of any rollout."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from opd.records import Unit
from opd.stopping import Stat, restart_index, running, statistic, stops_at

STATS: list[Stat] = ["cumulative", "mean", "min", "excess"]
LOGPS = st.floats(-30, -(2.0**-10), width=32)
JUDGED = st.builds(lambda logps: Unit(float(sum(logps)), len(logps)), st.lists(LOGPS, min_size=1, max_size=4))
UNITS = st.lists(JUDGED | st.just(Unit(0.0, 0)), max_size=12)
SOME_UNITS = st.lists(JUDGED, min_size=1, max_size=12)
STAT, RULE = st.sampled_from(STATS), st.booleans()


def turns(*means: float | None, reused: int = 0) -> list[Unit]:
    """Turns of two tokens each (of none for None), the first ones reused."""
    return [Unit(0.0, 0, k < reused) if m is None else Unit(2 * m, 2, k < reused) for k, m in enumerate(means)]


@pytest.mark.parametrize(
    ("stat", "whole_turns", "expected"),
    [
        ("cumulative", True, [-1, -4, -4, -4.5]),
        ("mean", True, [-1, -2, -2, -1.5]),
        ("min", True, [-1, -3, -3, -3]),
        ("excess", True, [-0.75, -3.5, -3.5, -3.75]),
        ("cumulative", False, [-2, -5, -5, -7]),
        ("mean", False, [-1, -5 / 3, -5 / 3, -1]),
        ("min", False, [-1, -3, -3, -3]),
        ("excess", False, [-1.5, -4.25, -4.25, -5.25]),
    ],
)
def test_statistics_by_hand(stat, whole_turns, expected):
    units = [Unit(-9.0, 1, True), Unit(-2.0, 2), Unit(-3.0, 1), Unit(0.0, 0), Unit(-2.0, 4)]  # means -1, -3, none, -0.5
    np.testing.assert_allclose(running(units, stat, whole_turns, mu=-0.25), expected)
    assert statistic(units, stat, whole_turns, mu=-0.25) == pytest.approx(expected[-1])


@given(UNITS, STAT, RULE)
def test_a_decision_does_not_depend_on_what_follows(units, stat, whole_turns):
    """To the last bit, so that a replay and a controller that asks after each unit agree."""
    values = running(units, stat, whole_turns, -0.3)
    one_by_one = [statistic(units[: k + 1], stat, whole_turns, -0.3) for k in range(len(units))]
    np.testing.assert_array_equal(one_by_one, values)
    for threshold in (-0.5, -2.0, *values[:2]):
        first = next((k + 1 for k, value in enumerate(values) if value < threshold), None)
        assert stops_at(units, stat, threshold, whole_turns, -0.3) == first


@pytest.mark.parametrize("stat", STATS)
def test_the_threshold_itself_does_not_stop(stat):
    units = turns(-0.5, -0.25, -1.0)
    reached = statistic(units[:2], stat, True)
    assert stops_at(units, stat, reached, True) == (1 if stat == "mean" else 3)
    assert stops_at(units[:1], stat, -0.5, True) is None


@given(UNITS, STAT, RULE)
def test_minus_infinity_never_stops(units, stat, whole_turns):
    assert stops_at(units, stat, -math.inf, whole_turns, -0.5) is None
    assert stops_at([*units, Unit(-math.inf, 1)], stat, -math.inf, whole_turns, -0.5) is None
    assert stops_at([*units, Unit(-math.inf, 1)], stat, -1e300, whole_turns, -0.5) == len(units) + 1


@given(SOME_UNITS, st.sampled_from(["cumulative", "mean", "min"]), RULE, st.sampled_from([0.0, 0.5]), st.integers(0, 4))
def test_a_threshold_of_zero_or_more_leaves_one_new_unit(units, stat, whole_turns, threshold, reused):
    before = [Unit(-1.0, 1, True)] * reused
    assert stops_at([*before, *units], stat, threshold, whole_turns) == reused + 1


@given(UNITS, SOME_UNITS, STAT, RULE, st.floats(-20, 0))
def test_reused_units_do_not_count(units, prefix, stat, whole_turns, threshold):
    reused = [Unit(unit.logp_sum, unit.num_judged, True) for unit in prefix]
    found = running([*reused, *units], stat, whole_turns, -1.0)
    np.testing.assert_array_equal(found, running(units, stat, whole_turns, -1.0))
    alone = stops_at(units, stat, threshold, whole_turns, -1.0)
    together = stops_at([*reused, *units], stat, threshold, whole_turns, -1.0)
    assert together == (None if alone is None else alone + len(reused))


@given(UNITS, st.integers(0, 12), STAT, RULE)
def test_units_without_a_log_prob_add_nothing(units, place, stat, whole_turns):
    more = [*units[:place], Unit(0.0, 0), *units[place:]]
    found = statistic(more, stat, whole_turns, -1.0)
    np.testing.assert_array_equal(found, statistic(units, stat, whole_turns, -1.0))
    assert restart_index([u for u in more if u.num_judged], -2.0) == sum(
        u.num_judged > 0 for u in more[: restart_index(more, -2.0)]
    )


@pytest.mark.parametrize("stat", STATS)
def test_nothing_stops_before_something_is_judged(stat):
    units = [Unit(-9.0, 1, True), Unit(0.0, 0), Unit(-1.0, 1)]
    assert math.isnan(statistic(units[:2], stat, True))
    assert math.isnan(statistic([], stat, True))
    assert stops_at(units, stat, 5.0, True) == 3


@given(SOME_UNITS, RULE)
def test_the_excess_over_ones_own_mean_is_nothing(units, whole_turns):
    own = statistic(units, "mean", whole_turns)
    assert statistic(units, "excess", whole_turns, own) == pytest.approx(0.0, abs=1e-3)


@pytest.mark.parametrize(
    ("means", "keep_above", "expected"),
    [
        ([], -1.0, 0),
        ([-0.1, -0.5, -0.3], -0.8, 1),
        ([-0.1, -0.5, -0.9, -0.7], -0.8, 1),  # the run ends at the third
        ([-0.9, -0.1], -0.8, 0),
        ([-0.8, -0.1], -0.8, 0),  # strict
        ([-0.1, -0.4, -0.4], -0.8, 1),  # ties: the earliest
        ([None, -0.2, None, -0.6, None], -0.8, 3),  # nothing is judged there: neither ends the run nor is a candidate
        ([None, None], -0.8, 0),
        ([-0.1, -0.5, -9.0], -math.inf, 2),
        ([-0.1, -math.inf, -9.0], -math.inf, 0),
    ],
)
def test_restarts_by_hand(means, keep_above, expected):
    assert restart_index(turns(*means), keep_above) == expected


@given(UNITS, st.floats(0, 5))
def test_no_unit_is_above_zero(units, keep_above):
    assert restart_index(units, keep_above) == 0


@given(SOME_UNITS)
def test_without_a_filter_all_units_are_candidates(units):
    means = [unit.mean for unit in units]
    assert restart_index(units, -math.inf) == means.index(min(means))


@given(UNITS, st.floats(-20, 0))
def test_at_least_one_unit_is_sampled_anew(units, keep_above):
    index = restart_index(units, keep_above)
    assert 0 <= index < max(1, len(units))
    assert all(unit.mean is None or unit.mean > keep_above for unit in units[:index])


@given(st.lists(st.integers(1, 999), min_size=2, max_size=12, unique=True), st.integers(2, 1000))
def test_an_improved_unit_is_not_restarted_at_again(levels, floor):
    """Its new mean exceeds the other passing ones, so that the next restart is elsewhere."""
    means = [-level / 100 for level in levels]
    keep_above = -floor / 100
    place = restart_index(turns(*means), keep_above)
    leading = next((k for k, mean in enumerate(means) if mean <= keep_above), len(means))
    if leading < 2:
        return
    means[place] = max(means[:leading]) + 0.001
    assert restart_index(turns(*means), keep_above) != place
