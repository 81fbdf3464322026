"""Elastic Horizon's invariants (arXiv 2609.07247)."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from opd.errors import UserError
from opd.records import Prompt, Rollout, Turn
from opd.strategies.horizon import Horizon, HorizonConfig

RUN: Horizon = SimpleNamespace(prompts={"type": "environment", "config": SimpleNamespace(name="calculator")})  # type: ignore[assignment]


def episode(length, outcome: float | None = 1.0, finish="env", reused=0):
    ids = np.array([3], np.int32)
    turns = [Turn(ids, ids, -ids.astype(np.float32), "eos", num_reused=int(i < reused)) for i in range(length)]
    turns[-1] = replace(turns[-1], finish=finish)
    return Rollout(Prompt(id="p"), 0, tuple(turns), outcome=outcome)


def horizon(**settings):
    return Horizon(HorizonConfig(**settings), RUN)  # type: ignore[arg-type]


@given(st.lists(st.integers(1, 50), max_size=60))
def test_without_a_success_the_limit_stays(lengths):
    one = horizon()
    for step, length in enumerate(lengths):
        one.landed(step, [episode(length, 0.0), episode(length, None), episode(length, 1.0, "stopped")])
    assert one.limits(99).turns == 10


def test_it_waits_for_enough_successes():
    one = horizon()
    one.landed(0, [episode(3)] * 19)
    assert one.limit == 10
    one.landed(1, [episode(3)])
    assert one.limit == pytest.approx(0.9 * 10 + 0.1 * (3 + 10))


@pytest.mark.parametrize("start", [10, 50])
@pytest.mark.parametrize("length", [3, 17, 45])
def test_a_constant_length_is_followed_with_the_margin(start, length):
    one = horizon(start=start)
    for step in range(200):
        one.landed(step, [episode(length)] * 20)
    assert one.limit == pytest.approx(min(length + 10, 50), abs=1e-6)
    assert one.limits(200).turns == min(length + 10, 50)


@given(st.lists(st.lists(st.integers(1, 80), min_size=20, max_size=20), min_size=1, max_size=20))
def test_the_limit_stays_in_its_bounds(steps):
    one = horizon(start=12, least=8, most=30)
    for step, lengths in enumerate(steps):
        one.landed(step, [episode(length) for length in lengths])
        assert 8 <= one.limit <= 30


def test_without_a_margin_it_never_grows():
    one = horizon(margin=0.0)
    before = one.limit
    for step in range(50):
        most = one.limits(step).turns or 0
        one.landed(step, [episode(1 + (step + i) % most) for i in range(30)])
        assert one.limit <= before + 0.5  # rounding may let an episode have half a turn more
        before = min(before, one.limit)
    assert one.limit < 10


def test_reused_turns_count_as_the_episode_is_long():
    one = horizon(min_successes=1, rate=1.0, margin=0.0)
    one.landed(0, [episode(9, reused=6)])
    assert one.limit == 9


def test_only_the_latest_successes_count():
    one = horizon(window=20, rate=1.0, margin=0.0)
    one.landed(0, [episode(9)] * 20)
    one.landed(1, [episode(4)] * 20)
    assert one.limit == 4


def test_its_state_comes_back():
    one, other = horizon(min_successes=1), horizon(min_successes=1)
    one.landed(0, [episode(7)] * 30)
    state, arrays = one.state_dict()
    other.load_state_dict(state, arrays)
    one.landed(1, [episode(5)])
    other.landed(1, [episode(5)])
    assert other.state_dict() == one.state_dict()


@pytest.mark.parametrize("settings", [{"least": 0}, {"start": 51}, {"margin": -1.0}, {"rate": 0.0}, {"min_successes": 101}])
def test_settings_out_of_range_are_refused(settings):
    with pytest.raises(UserError, match=r"rollout\.horizon"):
        Horizon.check(HorizonConfig(**settings), RUN)  # type: ignore[arg-type]
