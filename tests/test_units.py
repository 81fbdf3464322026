"""The units that controllers decide about."""

import math
from dataclasses import replace

import numpy as np
import pytest

from opd.units import chunk_units, units_of


def with_logps(turn, *logps: float, num_reused: int = 0):
    return replace(turn, teacher_logps=np.array(logps, np.float32), num_reused=num_reused)


def test_a_turn_is_a_unit(random_episode):
    first, second, third = random_episode(0, 4, (2, 1), (3, 1), (2, 0)).turns
    turns = [with_logps(first, -1.0, -2.0, num_reused=2), with_logps(second, -0.5, math.nan, -1.5), third]
    judged, partly, unknown = units_of(turns, None)
    assert (judged.logp_sum, judged.num_judged, judged.reused, judged.mean) == (-3.0, 2, True, -1.5)
    assert (partly.logp_sum, partly.num_judged, partly.reused, partly.mean) == (-2.0, 2, False, -1.0)
    assert (unknown.logp_sum, unknown.num_judged, unknown.mean) == (0.0, 0, None)


def test_a_single_answer_has_a_unit_a_chunk(random_rollout):
    (turn,) = random_rollout(0, (4, 7)).turns
    turn = with_logps(turn, -1, -2, -3, -4, -5, -6, -7, num_reused=3)
    units = units_of([turn], 3)
    assert [unit.logp_sum for unit in units] == [-6.0, -15.0, -7.0]
    assert [unit.num_judged for unit in units] == [3, 3, 1]
    assert [unit.reused for unit in units] == [True, False, False]


def test_tokens_that_are_not_settled_do_not_count(random_rollout):
    (turn,) = random_rollout(0, (4, 7)).turns
    units = units_of([with_logps(turn, -1, -2, -3, -4)], 3)
    assert [unit.mean for unit in units] == [-2.0, -4.0, None]


def test_many_small_log_probs_add_up():
    logps = np.full(100_000, -1e-3, np.float32)
    (unit,) = chunk_units(logps, len(logps), len(logps))
    assert unit.logp_sum == pytest.approx(-100.0, rel=1e-6)
