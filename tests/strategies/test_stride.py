"""Where STRIDE starts a rollout, and when it stops one (arXiv 2609.14636)."""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from opd.episodes import EnvironmentTask
from opd.records import Progress, Prompt, Rollout, Turn, Unit
from opd.strategies.early_stop import EarlyStop, EarlyStopConfig
from opd.strategies.stride import Stride, StrideConfig

RUN: Any = SimpleNamespace(seed=0, sampler=SimpleNamespace(chunk_tokens=4), prompts={"type": "dataset"}, rollout={})
EPISODE = Prompt(id="t", task=EnvironmentTask("calculator", {}, 0))
ANSWER = Prompt(id="p")
CONTEXT = np.array([1, 2], np.int32)

MEANS = st.lists(st.floats(-5, 0, allow_subnormal=False), min_size=1, max_size=12)


def stride(**settings):
    return Stride(StrideConfig(**settings), RUN)


def turn(mean, tokens=2, reused=0):
    ids = np.arange(tokens, dtype=np.int32)
    logps = None if mean is None else np.full(tokens, mean, np.float32)
    return Turn(CONTEXT, ids, np.zeros(tokens, np.float32), "eos", teacher_logps=logps, num_reused=reused)


def episode(means, slot=0):
    return Rollout(EPISODE, slot, tuple(turn(mean) for mean in means))


def answer(means, chunk=4, tail=0):
    logps = np.repeat(np.array(means, np.float32), chunk)
    ids = np.arange(len(logps) + tail, dtype=np.int32)
    return Rollout(ANSWER, 0, (Turn(CONTEXT, ids, np.zeros(len(ids), np.float32), "eos", teacher_logps=logps),))


def progress(means, reused=0):
    units = tuple(Unit(2 * mean, 2, number < reused) for number, mean in enumerate(means))
    return Progress(EPISODE, 0, CONTEXT, CONTEXT, None, units, len(units))


def test_a_task_never_seen_begins_at_the_beginning():
    assert stride().start(EPISODE, 5, 0) is None


@given(MEANS, st.floats(-5, 0))
def test_it_reuses_what_comes_before_the_weakest_correct_turn(means, keep_above):
    means = [float(np.float32(mean)) for mean in means]
    one = stride(keep_above=keep_above)
    one.landed(0, [episode(means)])
    correct = next((place for place, mean in enumerate(means) if not mean > keep_above), len(means))
    weakest = int(np.argmin(means[:correct])) if correct else 0
    start = one.start(EPISODE, 1, 0)
    assert (0 if start is None else len(start.turns)) == weakest
    assert weakest < len(means)  # at least one turn is sampled again


@given(MEANS)
def test_without_a_quality_all_turns_count_and_with_0_none(means):
    every, none = stride(keep_above=None), stride(keep_above=0.0)
    for one in (every, none):
        one.landed(0, [episode(means)])
    start = every.start(EPISODE, 1, 0)
    assert (0 if start is None else len(start.turns)) == int(np.argmin(np.array(means, np.float32)))
    assert none.start(EPISODE, 1, 0) is None


def test_turns_without_a_score_neither_end_the_run_nor_are_begun_at():
    one = stride(keep_above=-0.8)
    one.landed(0, [episode([-0.1, None, -0.5, -0.2, -2.0, -0.1])])
    start = one.start(EPISODE, 1, 0)
    assert start is not None
    assert len(start.turns) == 2


def test_an_answer_begins_again_at_a_chunk():
    one = stride(keep_above=None)
    one.landed(0, [answer([-0.1, -0.2, -0.9, -0.3], tail=3)])
    start = one.start(ANSWER, 1, 0)
    assert start is not None
    assert start.tokens is not None
    assert start.tokens.sampled_ids.tolist() == list(range(8))
    assert start.tokens.teacher_logps is not None
    assert len(start.tokens.teacher_logps) == 8


def test_an_improved_turn_is_not_begun_at_again():
    """The curriculum moves on: once the new turn is better than the others, another one is the weakest."""
    one = stride(keep_above=None)
    one.landed(0, [episode([-0.1, -0.9, -0.3])])
    first = one.start(EPISODE, 1, 0)
    one.landed(1, [episode([-0.1, -0.05, -0.3])])
    second = one.start(EPISODE, 2, 0)
    assert first is not None
    assert second is not None
    assert (len(first.turns), len(second.turns)) == (1, 2)


def test_of_several_rollouts_the_last_slot_is_kept():
    one = stride(keep_above=None)
    one.landed(0, [episode([-0.1, -0.9], slot=0), episode([-0.9, -0.1], slot=1)])
    assert one.start(EPISODE, 1, 0) is None


def test_old_prefixes_are_left_alone():
    """However late they were used last."""
    one = stride(keep_above=None, max_prefix_age=3)
    old, new = replace(turn(-0.1), versions=((0, 2),)), replace(turn(-0.9), versions=((0, 4),))
    one.landed(4, [replace(episode([-0.1]), turns=(old, new))])
    assert one.start(EPISODE, 5, 0) is not None
    assert one.start(EPISODE, 6, 0) is None


def test_fresh_starts_come_as_often_as_asked_and_depend_on_the_slot_alone():
    one = stride(keep_above=None, fresh_probability=0.3)
    one.landed(0, [episode([-0.1, -0.9])])
    drawn = [one.start(EPISODE, step, slot) is None for step in range(40) for slot in range(25)]
    assert np.mean(drawn) == pytest.approx(0.3, abs=0.05)
    assert drawn == [one.start(EPISODE, step, slot) is None for step in range(40) for slot in range(25)]


@given(MEANS, st.integers(0, 6))
def test_reused_turns_do_not_use_up_the_threshold(means, reused):
    one = EarlyStop(EarlyStopConfig(stop_below=-1.0), RUN)
    new = means[reused:]
    expected = math.fsum(new) < -1.0 if new else False
    if abs(math.fsum(new) + 1.0) > 1e-9:
        assert one.stops(progress(means, reused)) == expected


@given(MEANS)
def test_a_threshold_of_minus_infinity_never_stops(means):
    for threshold in (None, -math.inf):
        one = EarlyStop(EarlyStopConfig(stop_below=threshold), RUN)
        assert not one.stops(progress(means))
        assert not one.needs_scores


def test_the_excess_is_measured_from_a_running_mean():
    one = EarlyStop(EarlyStopConfig(stop_below=-0.5, stop_stat="excess"), RUN)
    assert not one.stops(progress([-9.0] * 5))  # nothing is known yet
    one.landed(0, [episode([-0.7] * 4)])
    assert one.mu == pytest.approx(-0.7)
    assert not one.stops(progress([-0.7] * 20))  # the length alone stops nothing
    assert one.stops(progress([-0.7, -0.7, -1.3]))
    one.landed(1, [episode([-0.2] * 4)])
    assert one.mu == pytest.approx(0.9 * -0.7 + 0.1 * -0.2)


def test_reused_turns_do_not_move_the_running_mean():
    one = EarlyStop(EarlyStopConfig(stop_stat="excess"), RUN)
    old = replace(turn(-5.0), num_reused=2)
    one.landed(0, [replace(episode([-1.0]), turns=(old, turn(-1.0)))])
    assert one.mu == pytest.approx(-1.0)


def test_what_it_forgets():
    one = stride(keep_above=None, stop_stat="excess")
    one.landed(0, [episode([-0.1, -0.9])])
    one.forget()
    assert one.start(EPISODE, 1, 0) is None
    assert one.mu is None


def test_its_state_comes_back():
    one, other = stride(keep_above=None, stop_stat="excess"), stride(keep_above=None, stop_stat="excess")
    one.landed(0, [episode([-0.1, -0.9])])
    other.load_state_dict(*one.state_dict())
    before, after = one.start(EPISODE, 1, 0), other.start(EPISODE, 1, 0)
    assert before is not None
    assert after is not None
    assert [t.sampled_ids.tolist() for t in after.turns] == [t.sampled_ids.tolist() for t in before.turns]
    assert other.mu == one.mu
