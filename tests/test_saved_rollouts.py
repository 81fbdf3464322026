"""Rollouts come back from disk to the last bit, with the prompts of their slots."""

from dataclasses import replace

import numpy as np
import pytest

from opd.errors import UserError
from opd.records import Prompt, Rollout
from opd.saved_rollouts import load_rollouts, save_rollouts


@pytest.fixture
def rollouts(random_rollout):
    plain = random_rollout(0, (4, 7))
    several = random_rollout(1, (3, 5), (9, 1), num_reused=2)
    turn = plain.turns[0]
    rng = np.random.default_rng(0)
    topk = {
        "topk_ids": rng.integers(0, 9, (7, 3)).astype(np.int32),
        "topk_logps": rng.normal(size=(7, 3)).astype(np.float32),
    }
    rich = replace(turn, **topk, finish="stopped", num_discarded=4, versions=((0, 3), (5, 4)))
    logps = np.array([-0.5, np.nan, -3.0], np.float32)
    seen = {"observations": ({"role": "tool", "content": "7"},), "state_hash": "ab12", "mistake": True}
    judged = replace(turn, teacher_logps=logps, **seen)
    return [plain, several, Rollout(Prompt(id="2"), 2, (rich, judged), outcome=0.5, score=-1.25, restart="failed")]


def test_to_the_last_bit(rollouts, tmp_path):
    save_rollouts(tmp_path / "file.safetensors", rollouts)
    prompts = {rollout.slot: rollout.prompt for rollout in rollouts}
    for before, after in zip(rollouts, load_rollouts(tmp_path / "file.safetensors", prompts.__getitem__), strict=True):
        assert after.prompt is before.prompt
        assert (after.slot, after.outcome, after.score) == (before.slot, before.outcome, before.score)
        assert after.restart == before.restart
        for mine, theirs in zip(before.turns, after.turns, strict=True):
            for name, value in vars(mine).items():
                other = getattr(theirs, name)
                if isinstance(value, np.ndarray):
                    assert value.dtype == other.dtype
                    assert value.tobytes() == other.tobytes()
                else:
                    assert value == other


def test_other_prompts_are_refused(rollouts, tmp_path):
    save_rollouts(tmp_path / "file.safetensors", rollouts)
    with pytest.raises(UserError, match="slot 0 had prompt 0 when the run stopped and now has other"):
        load_rollouts(tmp_path / "file.safetensors", lambda slot: Prompt(id="other"))


def test_a_damaged_file_is_named(rollouts, tmp_path):
    path = tmp_path / "file.safetensors"
    save_rollouts(path, rollouts)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(UserError, match=r"file\.safetensors: not whole"):
        load_rollouts(path, lambda slot: Prompt(id=str(slot)))
