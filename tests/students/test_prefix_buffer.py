"""The prefix buffer keeps the last rollout of each task, in bounds, and comes back to the last bit."""

import json
from dataclasses import replace

import numpy as np
import pytest

from opd.records import Turn
from opd.students.prefix_buffer import PrefixBuffer


def turn(seed, length=8):
    rng = np.random.default_rng(seed)
    ids, logps = rng.integers(0, 99, length).astype(np.int32), rng.normal(size=length).astype(np.float32)
    seen = {"observations": ({"role": "tool", "content": str(seed)},), "state_hash": f"{seed:x}", "mistake": bool(seed % 2)}
    return Turn(ids, ids, logps, "eos", teacher_logps=-logps, versions=((0, seed), (2, seed + 1)), **seen)


def episode(seed, turns=3, extra=4):
    """Turns of which each context goes on after the turn before it."""
    rng = np.random.default_rng(seed)
    found, context = [], rng.integers(0, 99, 20).astype(np.int32)
    for number in range(turns):
        one = replace(turn(100 * seed + number), context_ids=context)
        found.append(one)
        context = np.concatenate([context, one.sampled_ids, rng.integers(0, 99, extra).astype(np.int32)])
    return found


def same(mine, other):
    for name, value in vars(mine).items():
        theirs = getattr(other, name)
        if isinstance(value, np.ndarray):
            assert value.dtype == theirs.dtype, name
            assert value.tobytes() == theirs.tobytes(), name
        else:
            assert value == theirs, name


def test_the_last_rollout_stays():
    buffer = PrefixBuffer(2**20)
    buffer.put("a", [turn(1), turn(2)])
    buffer.put("a", [turn(3)])
    kept = buffer.get("a")
    assert kept is not None
    assert len(kept) == 1
    assert buffer.get("b") is None


@pytest.mark.parametrize("turns", [episode(5), [turn(1), turn(2)], [turn(1)]], ids=["appended", "rendered anew", "one"])
def test_turns_come_out_as_they_went_in(turns):
    """But for what was answered to the last one, which is always sampled anew."""
    buffer = PrefixBuffer(2**20)
    buffer.put("a", turns)
    kept = buffer.get("a")
    assert kept is not None
    for mine, other in zip(turns, kept, strict=True):
        same(replace(mine, observations=()) if mine is turns[-1] else mine, other)


def test_an_episode_takes_the_room_of_its_tokens():
    long, short = PrefixBuffer(2**30), PrefixBuffer(2**30)
    long.put("a", episode(1, turns=40))
    short.put("a", episode(1, turns=4))
    assert long.num_bytes < 12 * short.num_bytes


def test_observations_count():
    buffer = PrefixBuffer(2**20)
    large = replace(turn(1), observations=({"role": "tool", "content": "x" * 5000},))
    buffer.put("a", [large, turn(2)])
    assert 5000 < buffer.num_bytes < 6000
    buffer.put("a", [turn(2), large])  # nobody asks what was answered to the last
    assert buffer.num_bytes < 1000


def test_the_oldest_go_first_when_it_is_full():
    one = PrefixBuffer(2**20)
    one.put("a", [turn(1)])
    buffer = PrefixBuffer(3 * one.num_bytes)
    for number, name in enumerate("abc"):
        buffer.put(name, [turn(number)])
    buffer.put("a", [turn(7)])  # visited again, so no longer the oldest
    buffer.put("d", [turn(8)])
    assert [name for name in "abcd" if buffer.get(name)] == ["a", "c", "d"]
    assert buffer.num_bytes <= buffer.max_bytes
    assert buffer.num_evicted == 1
    buffer.put("e", [turn(9, 999)])  # larger than all of it
    assert len(buffer) == buffer.num_bytes == 0


def test_it_comes_back_to_the_last_bit():
    buffer, other = PrefixBuffer(2**20), PrefixBuffer(2**20)
    for number, name in enumerate("abc"):
        buffer.put(name, episode(number))
    state, arrays = buffer.state_dict()
    other.load_state_dict(json.loads(json.dumps(state)), arrays)
    assert json.dumps(other.state_dict()[0]) == json.dumps(state)
    assert other.num_bytes == buffer.num_bytes
    for name in "abc":
        for mine, theirs in zip(buffer.get(name) or (), other.get(name) or (), strict=True):
            same(mine, theirs)


def test_arrays_that_are_missing_are_noticed():
    buffer = PrefixBuffer(2**20)
    buffer.put("a", [turn(1)])
    state, _ = buffer.state_dict()
    with pytest.raises(KeyError):
        PrefixBuffer(2**20).load_state_dict(state, {})
