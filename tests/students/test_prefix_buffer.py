"""The prefix buffer keeps the last rollout of each task, in bounds, and comes back to the last bit."""

import numpy as np

from opd.records import Turn
from opd.students.prefix_buffer import PrefixBuffer


def turn(seed, length=8):
    rng = np.random.default_rng(seed)
    ids, logps = rng.integers(0, 99, length).astype(np.int32), rng.normal(size=length).astype(np.float32)
    seen = {"observations": ({"role": "tool", "content": str(seed)},), "state_hash": f"{seed:x}", "mistake": bool(seed % 2)}
    return Turn(ids, ids, logps, "eos", teacher_logps=-logps, versions=((0, seed), (2, seed + 1)), **seen)


def test_the_last_rollout_stays():
    buffer = PrefixBuffer(2**20)
    buffer.put("a", [turn(1), turn(2)], 3)
    buffer.put("a", [turn(3)], 4)
    kept = buffer.get("a")
    assert kept is not None
    assert (len(kept.turns), kept.step) == (1, 4)
    assert buffer.get("b") is None
    assert buffer.num_bytes == kept.num_bytes == 8 * 16


def test_the_oldest_go_first_when_it_is_full():
    buffer = PrefixBuffer(3 * 8 * 16)
    for number, name in enumerate("abc"):
        buffer.put(name, [turn(number)], number)
    buffer.put("a", [turn(7)], 3)  # visited again, so no longer the oldest
    buffer.put("d", [turn(8)], 4)
    assert [name for name in "abcd" if buffer.get(name)] == ["a", "c", "d"]
    assert buffer.num_bytes <= buffer.max_bytes
    buffer.put("e", [turn(9, 999)], 5)  # larger than all of it
    assert len(buffer) == buffer.num_bytes == 0


def test_it_comes_back_to_the_last_bit():
    buffer, other = PrefixBuffer(2**20), PrefixBuffer(2**20)
    for number, name in enumerate("abc"):
        buffer.put(name, [turn(number), turn(number + 9)], number)
    rows, arrays = buffer.state_dict()
    other.load_state_dict(rows, arrays)
    again, others = other.state_dict()
    assert again == rows
    assert arrays.keys() == others.keys()
    for name, array in arrays.items():
        assert array.dtype == others[name].dtype
        assert array.tobytes() == others[name].tobytes()
    assert other.num_bytes == buffer.num_bytes
