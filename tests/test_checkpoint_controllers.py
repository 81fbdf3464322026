"""What a checkpoint holds of controllers and of rollouts in flight: whole, or refused with the name of its file."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from opd.checkpoint import load_in_flight, load_steering
from opd.config import BatchConfig
from opd.errors import UserError
from opd.records import Prompt, Rollout
from opd.saved_rollouts import save_rollouts
from opd.steering import Steering
from opd.strategies.stride import Stride, StrideConfig

RUN: Any = SimpleNamespace(seed=0, sampler=SimpleNamespace(chunk_tokens=2), prompts={"type": "dataset"}, rollout={})
NOT_WHOLE = r"step-4/trainer/controllers\.safetensors: not whole \(.*; delete its checkpoint and resume from the one before"


def steering(identity="same"):
    return Steering({"stride": Stride(StrideConfig(keep_above=None, stop_stat="excess"), RUN)}, identity)


@pytest.fixture
def rollouts(random_rollout):
    found = []
    for slot in range(3):
        one = random_rollout(slot, (4, 7))
        logps = -np.arange(7, 0, -1, dtype=np.float32)
        logps[3] = -99.0  # the weakest chunk is the second
        found.append(replace(one, turns=(replace(one.turns[0], teacher_logps=logps),)))
    return found


@pytest.fixture
def checkpoint(tmp_path, rollouts):
    """(the folder, the controllers' JSON) of a checkpoint that has seen a step."""
    folder = tmp_path / "step-4"
    (folder / "trainer").mkdir(parents=True)
    before = steering()
    before.landed(0, rollouts)
    values, arrays = before.state_dict()
    assert arrays
    save_file(arrays, folder / "trainer" / "controllers.safetensors")
    return folder, {"controllers": json.loads(json.dumps(values))}


def file_of(folder: Path) -> Path:
    return folder / "trainer" / "controllers.safetensors"


def test_a_whole_one_comes_back(checkpoint, rollouts):
    after = steering()
    assert load_steering(checkpoint[0], after, checkpoint[1])
    start = after.plan(rollouts[1].prompt, 1, 0).start.tokens
    assert start is not None
    assert start.sampled_ids.tolist() == rollouts[1].turns[0].sampled_ids[:2].tolist()
    assert start.context_ids.tolist() == rollouts[1].turns[0].context_ids.tolist()


def test_of_another_teacher_it_is_forgotten(checkpoint, rollouts):
    after = steering("another teacher")
    assert not load_steering(checkpoint[0], after, checkpoint[1])
    assert after.plan(rollouts[1].prompt, 1, 0).start.tokens is None


def test_controllers_without_arrays_have_no_file(checkpoint):
    """Before the first step, say, or where nothing is kept."""
    file_of(checkpoint[0]).unlink()
    values, arrays = steering().state_dict()
    assert arrays == {}
    assert load_steering(checkpoint[0], steering(), {"controllers": values})


def test_without_controllers_nothing_is_read(checkpoint):
    file_of(checkpoint[0]).write_bytes(b"no tensors")
    assert load_steering(checkpoint[0], Steering({}), checkpoint[1])
    assert load_steering(checkpoint[0], Steering({}), {})


def missing(file):
    file.unlink()


def cut(file):
    file.write_bytes(file.read_bytes()[:-9])


def empty(file):
    file.write_bytes(b"")


def other_bytes(file):
    file.write_bytes(b"\xff" * 100)


def a_folder(file):
    file.unlink()
    file.mkdir()


def without(name):
    def drop(file):
        arrays = load_file(file)
        assert name in arrays
        save_file({key: value for key, value in arrays.items() if key != name}, file)

    drop.__name__ = f"without {name}"
    return drop


def of_another_controller(file):
    save_file({key.replace("stride/", "strider/"): value for key, value in load_file(file).items()}, file)


DAMAGES = [missing, cut, empty, other_bytes, a_folder, of_another_controller]
DAMAGES += [without(f"stride/1.0.{name}") for name in ("context_ids", "sampled_ids", "sampler_logps")]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_damaged_file_is_named(checkpoint, damage):
    damage(file_of(checkpoint[0]))
    with pytest.raises(UserError, match=NOT_WHOLE):
        load_steering(checkpoint[0], steering(), checkpoint[1])


@pytest.mark.parametrize(
    "controllers",
    [None, {}, {"identity": "same"}, {"identity": "same", "states": {}}, {"identity": "same", "states": {"stride": {}}}],
)
def test_a_state_without_what_the_controllers_need_is_named(checkpoint, controllers):
    """That of a run before it had these controllers, say."""
    with pytest.raises(UserError, match=NOT_WHOLE):
        load_steering(checkpoint[0], steering(), {} if controllers is None else {"controllers": controllers})


# --- Rollouts in flight ---


class Prompts:
    """Four prompts, whatever the step."""

    def at(self, step, attempt, count):
        return [Prompt(id=str(number)) for number in range(count)]


def in_flight(folder):
    return load_in_flight(folder, BatchConfig(prompts=4, rollouts_per_prompt=1), Prompts(), 4)  # type: ignore[arg-type]


@pytest.fixture
def flying(tmp_path, rollouts):
    """The file of a checkpoint with three rollouts in flight."""
    (tmp_path / "step-4" / "trainer").mkdir(parents=True, exist_ok=True)
    file = tmp_path / "step-4" / "trainer" / "in_flight.safetensors"
    save_rollouts(file, rollouts)
    return file


def test_rollouts_come_back_by_slot(flying, rollouts):
    found = in_flight(flying.parent.parent)
    assert list(found) == [0, 1, 2]
    assert all(isinstance(one, Rollout) for one in found.values())
    assert found[2].turns[0].sampled_ids.tolist() == rollouts[2].turns[0].sampled_ids.tolist()


def test_there_may_be_none(tmp_path):
    assert in_flight(tmp_path) == {}


def rewritten(file, rows=None, arrays=None):
    with safe_open(file, framework="numpy") as opened:
        kept = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        said = json.loads((opened.metadata() or {})["rollouts"])
    save_file(kept if arrays is None else arrays(kept), file, metadata={"rollouts": json.dumps((rows or list)(said))})


def dropped(*names):
    return lambda rows: [{key: value for key, value in row.items() if key not in names} for row in rows]


def turns_with(change):
    return lambda rows: [{**row, "turns": [change(turn) for turn in row["turns"]]} for row in rows]


ROWS = {
    "without outcome": dropped("outcome"),
    "without restart": dropped("restart"),
    "without turns": dropped("turns"),
    "without slot": dropped("slot"),
    "without prompt": dropped("prompt"),
    "turns without versions": turns_with(lambda turn: {k: v for k, v in turn.items() if k != "versions"}),
    "turns without observations": turns_with(lambda turn: {k: v for k, v in turn.items() if k != "observations"}),
    "turns with another key": turns_with(lambda turn: {**turn, "mood": "good"}),
    "turns of text": turns_with(str),
    "numbers": lambda rows: [1, 2, 3],
    "one mapping": lambda rows: {"a": 1},
}


@pytest.mark.parametrize("rows", ROWS)
def test_rollouts_with_other_keys_are_refused(flying, rows):
    """Those of an older version, say."""
    rewritten(flying, ROWS[rows])
    with pytest.raises(UserError, match=r"step-4/trainer/in_flight\.safetensors: not whole \("):
        in_flight(flying.parent.parent)


@pytest.mark.parametrize("name", ["context_ids", "sampled_ids", "sampler_logps"])
def test_rollouts_without_their_tokens_are_refused(flying, name):
    rewritten(flying, arrays=lambda kept: {key: value for key, value in kept.items() if key != f"1.0.{name}"})
    with pytest.raises(UserError, match=r"in_flight\.safetensors: not whole \("):
        in_flight(flying.parent.parent)


@pytest.mark.parametrize("metadata", [None, {"rollout": "[]"}, {"rollouts": "[{"}])
def test_a_file_of_something_else_is_refused(flying, metadata):
    save_file({"a": np.zeros(3, np.float32)}, flying, metadata=metadata)
    with pytest.raises(UserError, match=r"in_flight\.safetensors: not whole \("):
        in_flight(flying.parent.parent)
