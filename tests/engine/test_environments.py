"""Environments in the engine: single answers that a verifier judges, held-out episodes, and what a broken one does."""

import hashlib
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
from omegaconf import OmegaConf

import opd
from opd.config import build_config
from opd.envs.environment import Observation, Task
from opd.errors import UserError
from opd.registry import ENVIRONMENTS

CHUNK = 3
STEERED = ("discarded_tokens", "stopped_rate", "restart_units", "reused_tokens", "restore_failures", "long_prefixes")
ALL = {"rollouts_every": 1, "num_rollouts": 8}


@pytest.fixture(autouse=True)
def registered(echo, monkeypatch):
    """`riddle`, whose question takes one reply; `noted`, which remembers its verdicts; `faulty`, which raises."""

    class Riddle(echo.Echo):
        single_turn = True
        max_turns = 1

        def step(self, reply):
            self.said.append(reply.content)
            return Observation(done=True, mistake=len(reply.content) > 6)

    class Noted(echo.Echo):
        verdicts: list = []  # noqa: RUF012  # of all its episodes, with the set that each is of

        def tasks(self):
            return [Task(t.id, {**t.data, "set": self.config.seed}, t.seed) for t in super().tasks()]

        def reset(self, data, seed):
            self.of = data["set"]
            return super().reset(data, seed)

        def outcome(self):
            self.verdicts.append((self.of, super().outcome()))
            return self.verdicts[-1][1]

    class Faulty(echo.Echo):
        def step(self, reply):
            if len(self.said) == 2:
                raise KeyError("no such shelf")
            return super().step(reply)

    module = types.ModuleType("a_third_partys_environments")
    for kind in (Riddle, Noted, Faulty):
        setattr(module, kind.__name__, kind)
        monkeypatch.setitem(ENVIRONMENTS.builtin, kind.__name__.lower(), f"{module.__name__}:{kind.__name__}")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


@pytest.fixture
def riddle_recipe(raw_recipe):
    """`riddle_recipe(**sections)`: single answers of up to 12 tokens, judged by `riddle`."""

    def build(**sections):
        own = {"prompts": {"type": "environment", "name": "riddle"}, "sampler": {"chunk_tokens": CHUNK}, "eval": {}}
        return raw_recipe(**{**own, **sections})

    return build


def recorded(run):
    """The rollouts of each step, in order."""
    files = sorted((run / "rollouts").iterdir(), key=lambda path: int(path.stem.split("-")[1]))
    return [[json.loads(line) for line in file.read_text().splitlines()] for file in files]


# --- One reply is all ---


def test_a_single_turn_without_stops_is_full_distillation(riddle_recipe, train):
    full = train(riddle_recipe(steps=3), "full")
    stride = {"stride": {"stop_below": -1e9, "keep_above": 0.0}}
    watched = train(riddle_recipe(steps=3, rollout=stride), "watched")
    assert all(0 <= row["success_rate"] <= 1 and "turns" not in row for row in full)
    for mine, other in zip(watched, full, strict=True):
        assert {name: mine[name] for name in other} == other
        assert all(mine[name] == 0 for name in STEERED)


def test_a_single_turn_stops_and_restarts_between_its_tokens(riddle_recipe, train, tmp_path):
    """As an answer without a verifier does."""
    stride = {"stride": {"stop_below": -25.0, "keep_above": None}}
    rows = train(riddle_recipe(rollout=stride, trackers=ALL), "run")
    assert 0 < sum(row["stopped_rate"] for row in rows) < len(rows)
    assert sum(row["restart_units"] for row in rows) > 0
    assert all(row["restore_failures"] == row["long_prefixes"] == 0 for row in rows)
    before = {}
    for step in recorded(tmp_path / "run"):
        assert len(step) == 8
        for row in step:
            (turn,) = row["turns"]
            assert (row["unit"], row["chunk_tokens"]) == ("chunk", CHUNK)
            assert turn["num_reused"] % CHUNK == 0
            assert turn["num_reused"] < turn["num_tokens"] <= 12
            assert row["restart"] == ("restored" if turn["num_reused"] else "")
            reused = row["sampled_ids"][: turn["num_reused"]]
            assert reused == before.get(row["id"], [])[: turn["num_reused"]]
            if row["finish"] == "stopped":
                assert turn["num_tokens"] % CHUNK == 0
        before |= {row["id"]: row["sampled_ids"] for row in step}  # the last slot's stays


def test_only_what_nobody_stopped_counts_as_success_or_failure(riddle_recipe, train, tmp_path):
    raw = riddle_recipe(rollout={"early_stop": {"stop_below": -25.0}}, trackers=ALL)
    rows = train(raw, "run")
    seen = set()
    for figures, step in zip(rows, recorded(tmp_path / "run"), strict=True):
        whole = [row for row in step if row["finish"] != "stopped"]
        seen |= {row["finish"] for row in step}
        if whole:
            assert figures["success_rate"] == sum(row["outcome"] >= 0.5 for row in whole) / len(whole)
        else:
            assert "success_rate" not in figures
    assert {"stopped", "eos"} <= seen


def test_a_truncated_answer_is_judged_as_far_as_it_came(riddle_recipe, train, tmp_path):
    train(riddle_recipe(sampling={"max_new_tokens": 4}, trackers=ALL, steps=2), "run")
    rows = [row for step in recorded(tmp_path / "run") for row in step if row["finish"] == "length"]
    assert len(rows) > 8
    seeds = {f"echo-0-{number}": number for number in range(8)}
    for row in rows:
        digest = hashlib.sha256(f"{seeds[row['id']]}|{row['response']}".encode()).hexdigest()
        assert row["outcome"] == float(int(digest, 16) % 2)
        assert row["turns"][0]["mistake"] == (len(row["response"]) > 6)


@pytest.mark.parametrize("name", ["curriculum", "horizon"])
def test_what_counts_turns_needs_several(riddle_recipe, name):
    with pytest.raises(UserError, match=rf"rollout\.{name} counts turns: it needs prompts\.type=environment"):
        build_config(riddle_recipe(rollout={name: {}}))


# --- Held-out episodes ---


def test_accuracy_on_episodes_is_their_environments(episode_recipe, train, tmp_path, registered):
    """Before, at every third step and after."""
    heldout = {"environment": {"name": "noted", "options": {"tasks": 5, "seed": 9}}, "every": 3, "kl_prompts": 0}
    raw = episode_recipe(prompts={"type": "environment", "name": "noted"}, eval=heldout)
    rows = train(raw, "run")
    verdicts = [verdict for of, verdict in registered.Noted.verdicts if of == 9]
    assert len(verdicts) == 15
    for number, step in enumerate((0, 3, 6)):
        result = json.loads((tmp_path / f"run/eval/step-{step}.json").read_text())
        mine = verdicts[5 * number : 5 * number + 5]
        assert sorted(score for row in result["rows"] for score in row["scores"]) == sorted(mine)
        assert result["accuracy"] == sum(verdict >= 0.5 for verdict in mine) / 5
        assert result["num_no_answer"] == 0
    training = [verdict for of, verdict in registered.Noted.verdicts if of == 0]
    assert [row["success_rate"] for row in rows] == [sum(training[8 * i : 8 * i + 8]) / 8 for i in range(6)]


def test_evaluating_episodes_does_not_change_the_run(episode_recipe, train):
    heldout = {"environment": {"name": "echo", "options": {"tasks": 3, "seed": 9}}, "every": 2, "kl_prompts": 2}
    stride = {"stride": {"stop_below": -6.0, "keep_above": None}}
    alone = train(episode_recipe(rollout=stride), "alone")
    watched = train(episode_recipe(rollout=stride, eval=heldout), "watched")
    assert sum(row["restart_units"] for row in alone) > 0
    assert watched == alone


def test_the_distance_from_the_teacher_is_measured_on_episodes(episode_recipe, train, tmp_path):
    heldout = {"environment": {"name": "echo", "options": {"tasks": 4, "seed": 9}}, "kl_prompts": 4}
    raw = episode_recipe(eval=heldout, steps=1, optimizer={"lr": 0.0})
    train(raw, "run")
    raw["teachers"] = {"default": {"model": raw["student"]["model"]}}
    train(raw, "same")
    far, none = (json.loads((tmp_path / name / "eval/step-0.json").read_text()) for name in ("run", "same"))
    assert far["reverse_kl"] > 0.5
    assert none["reverse_kl"] == pytest.approx(0.0, abs=1e-6)
    assert far["accuracy"] == none["accuracy"]


# --- Processes ---


def test_a_process_may_have_no_rollout(episode_recipe, tmp_path, metrics_of):
    """One prompt with one rollout, and one held-out task: the second process has nothing to sample, score or learn from."""
    heldout = {"environment": {"name": "echo", "options": {"tasks": 1, "seed": 9}}, "kl_prompts": 1}
    stride = {"stride": {"stop_below": -9.0, "keep_above": None}}
    prompts = {"type": "environment", "name": "echo", "options": {"tasks": 1}}
    batch = {"prompts": 1, "rollouts_per_prompt": 1}
    raw = episode_recipe(rollout=stride, prompts=prompts, batch=batch, eval=heldout, steps=4)
    opd.train(build_config(raw), tmp_path / "one")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(OmegaConf.to_yaml(OmegaConf.create(raw)))
    script = str(Path(__file__).with_name("echo.py"))
    command = [sys.executable, script, "train", str(recipe), "--out", str(tmp_path / "two")]
    launcher = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29617", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    started = [
        subprocess.Popen(
            command,
            env={**os.environ, **launcher, "RANK": rank, "LOCAL_RANK": rank},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in ("0", "1")
    ]
    try:
        outputs = [process.communicate(timeout=120)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0], "\n".join(outputs)
    one, two = metrics_of(tmp_path / "one"), metrics_of(tmp_path / "two")
    assert sum(row["restart_units"] for row in one) > 0
    for mine, other in zip(one, two, strict=True):
        assert mine.keys() == other.keys()
        for name, value in mine.items():
            assert other[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
    for step in (0, 4):
        results = [json.loads((tmp_path / name / f"eval/step-{step}.json").read_text()) for name in ("one", "two")]
        for name in ("accuracy", "reverse_kl", "num_samples"):
            assert results[1][name] == pytest.approx(results[0][name], rel=1e-4, abs=1e-6), name


# --- Broken ones ---


def test_an_environment_that_raises_ends_the_run_with_its_name(episode_recipe, train, tmp_path):
    with pytest.raises(Exception, match=r"(?s)(?=.*'faulty')(?=.*echo-0-\d)(?=.*no such shelf)"):
        train(episode_recipe(prompts={"type": "environment", "name": "faulty"}), "run")
    assert not (tmp_path / "run/summary.json").exists()
