"""STRIDE and its neighbours in the engine, on episodes and on single answers (methods of arXiv 2609.14636)."""

import functools
import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from omegaconf import OmegaConf

import opd
from opd.config import build_config
from opd.errors import UserError

NEVER = -1e9
UNITS = ("trained_share",)
BUFFER = ("buffer_tasks", "buffer_mib", "buffer_evicted")
STEERED = ("discarded_tokens", "stopped_rate", "restart_units", "reused_tokens", "restore_failures", "long_prefixes")


class Recipe(NamedTuple):
    build: Callable[..., dict[str, Any]]
    below: float

    def __call__(self, **sections):
        return self.build(**sections)


@pytest.fixture(autouse=True)
def _known(echo):
    return


@pytest.fixture(params=["episodes", "answers"])
def recipe(request, episode_recipe, raw_recipe):
    """Episodes of environment `echo`, or single answers in chunks of 3 tokens. `recipe.below` stops some of either."""
    if request.param == "episodes":
        return Recipe(episode_recipe, -6.0)
    return Recipe(functools.partial(raw_recipe, sampler={"chunk_tokens": 3}, eval={}), -25.0)


def stride(**settings):
    return {"rollout": {"stride": settings}}


def without(rows, *names):
    return [{name: value for name, value in row.items() if name not in (*names, "saved_tokens")} for row in rows]


def plain(rows):
    """What a run without controllers has as well."""
    return [
        {name: value for name, value in row.items() if name.split("/")[0] not in (*STEERED, *BUFFER, "stops", *UNITS)}
        for row in without(rows)
    ]


@pytest.mark.parametrize("form", ["full", "sampled"])
@pytest.mark.parametrize("controller", [{"stride": {"restart": False}}, {"early_stop": {}}])
@pytest.mark.parametrize("threshold", [float("-inf"), NEVER])
def test_without_stops_and_buffer_it_is_full_distillation(recipe, train, controller, threshold, form):
    """To the last bit; but episodes that are watched wait for each other, and are sampled in other batches."""
    terms = {"terms": {"reverse_kl": {"form": form}}}
    rollout = {name: {**settings, "stop_below": threshold} for name, settings in controller.items()}
    full = train(recipe(**terms), "full")
    watched = train(recipe(**terms, rollout=rollout), "watched")
    for mine, other in zip(plain(watched), plain(full), strict=True):
        if threshold == NEVER and "turns" in other:
            assert mine == {name: pytest.approx(value, rel=1e-4, abs=1e-6) for name, value in other.items()}
        else:
            assert mine == other
    assert all(row["stopped_rate"] == row["reused_tokens"] == row["discarded_tokens"] == 0 for row in watched)


def test_where_no_unit_counts_as_correct_there_are_no_restarts(recipe, train):
    stops = train(recipe(rollout={"early_stop": {"stop_below": recipe.below}}), "stops")
    kept = train(recipe(**stride(stop_below=recipe.below, keep_above=0.0)), "kept")
    assert all(row["restart_units"] == 0 for row in kept)
    assert without(kept, *BUFFER) == without(stops)
    assert 0 < sum(row["stopped_rate"] for row in stops) < len(stops)
    assert kept[-1]["buffer_tasks"] == 8


def test_restarts_reuse_tokens_and_train_the_others(recipe, train):
    rows = train(recipe(**stride(stop_below=None, keep_above=None)), "run")
    assert rows[0]["restart_units"] == rows[1]["restart_units"] == 0  # eight tasks, four a step
    assert all(row["restart_units"] > 0 for row in rows[2:])
    assert sum(row["restore_failures"] + row["long_prefixes"] for row in rows) == 0
    for row in rows:
        assert row["trained_tokens"] == row["sampled_tokens"] > 0
        assert sum(value for name, value in row.items() if name.startswith("trained_share/")) == pytest.approx(1.0)
    full = train(recipe(), "full")
    assert sum(row["sampled_tokens"] for row in rows) < sum(row["sampled_tokens"] for row in full)


def test_a_threshold_of_0_gives_one_new_unit_each_time(recipe, train, capsys):
    rows = train(recipe(**stride(stop_below=0.0, keep_above=None)), "run")
    note = "WARNING: rollout.stride.stop_below is 0: every rollout stops after one new turn or chunk"
    assert [line for line in capsys.readouterr().err.splitlines() if "WARNING" in line] == [note]
    for row in rows:
        stops = {int(name.split("/")[1]): value for name, value in row.items() if name.startswith("stops/")}
        new = sum(unit * count for unit, count in stops.items()) - 8 * row["restart_units"]
        assert new == sum(stops.values())  # those that ended by themselves have one unit, too, or less


def test_a_teacher_that_is_the_student_stops_all_the_same(episode_recipe, train):
    """Its log-probs are minus an entropy: the rule counts turns as well as mistakes."""
    raw = episode_recipe(rollout={"early_stop": {"stop_below": -6.0}}, optimizer={"lr": 0.0})
    raw["teachers"] = {"default": {"model": raw["student"]["model"]}}
    rows = train(raw, "run")
    assert all(abs(row["loss"]) < 1e-6 for row in rows)
    assert sum(row["stopped_rate"] for row in rows) > 0


@pytest.mark.parametrize("context", ["append_only", "rerender"])
def test_episodes_go_on_where_their_environment_was(episode_recipe, train, tmp_path, context):
    trackers = {"rollouts_every": 1, "num_rollouts": 8}
    raw = episode_recipe(**stride(stop_below=None, keep_above=None), trackers=trackers, steps=3)
    raw["prompts"] = {**raw["prompts"], "context": context}
    rows = train(raw, "run")
    assert rows[2]["restart_units"] > 0
    assert all(row["restore_failures"] == 0 for row in rows)
    files = [tmp_path / f"run/rollouts/step-{step}.jsonl" for step in (1, 2, 3)]
    seen = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    before = {row["id"]: row for row in seen[:16]}
    restored = [row for row in seen[16:] if row["restart"] == "restored"]
    assert restored
    for row in restored:
        reused = [turn for turn in row["turns"] if turn["num_reused"]]
        earlier = before[row["id"]]["turns"][: len(reused)]
        assert [(t["text"], t["observations"]) for t in reused] == [(t["text"], t["observations"]) for t in earlier]
        assert all(turn["num_reused"] == turn["num_tokens"] for turn in reused)
        assert len(row["turns"]) > len(reused)


def test_an_environment_that_drifts_is_begun_anew_and_counted(episode_recipe, train, capsys):
    raw = episode_recipe(**stride(stop_below=None, keep_above=None))
    raw["prompts"] = {"type": "environment", "name": "drifting"}
    rows = train(raw, "run")
    assert sum(row["restore_failures"] > 0 for row in rows) > 1
    assert sum(row["reused_tokens"] for row in rows) == 0
    (warning,) = [line for line in capsys.readouterr().err.splitlines() if "WARNING" in line]
    assert re.match(r"WARNING: step 3: (\d) of \1 restarts began anew, since the environment did not come back", warning)


def test_an_environment_that_cannot_be_restored_turns_the_buffer_off(episode_recipe, train, capsys):
    raw = episode_recipe(**stride(stop_below=-6.0, keep_above=None))
    stops = episode_recipe(rollout={"early_stop": {"stop_below": -6.0}})
    raw["prompts"] = stops["prompts"] = {"type": "environment", "name": "forgetful"}
    rows = train(raw, "run")
    assert capsys.readouterr().err.count("cannot be brought back to an earlier state: no restarts") == 1
    assert rows == train(stops, "stops")


@pytest.mark.parametrize("lookahead", [0, 1])
def test_a_resumed_run_is_the_same(recipe, train, tmp_path, metrics_of, lookahead):
    settings = {"stop_below": -3.0, "keep_above": None, "fresh_probability": 0.2, "stop_stat": "excess"}
    raw = recipe(**stride(**settings), lookahead=lookahead, steps=8, checkpoint={"every": 1, "keep": 9})
    whole = train(raw, "run")
    assert sum(row["restart_units"] for row in whole) > 0
    for step in (3, 6):
        copy = tmp_path / f"from-{step}"
        shutil.copytree(tmp_path / "run", copy)
        for path in (copy / "checkpoints").iterdir():
            if int(path.name.removeprefix("step-")) > step:
                shutil.rmtree(path)
        opd.train(build_config(raw), copy, resume=True)
        assert metrics_of(copy) == whole
        for name in ("model.safetensors", "trainer/controllers.safetensors"):
            ends = [(folder / "checkpoints/step-8" / name).read_bytes() for folder in (tmp_path / "run", copy)]
            assert ends[0] == ends[1]


def test_another_teacher_empties_the_buffer(episode_recipe, train, tmp_path, micro_model, capsys):
    raw = episode_recipe(**stride(stop_below=None, keep_above=None), steps=4, checkpoint={"every": 3, "keep": 9})
    teacher = tmp_path / "teacher"
    shutil.copytree(raw["teachers"]["default"]["model"], teacher)
    raw["teachers"] = {"default": {"model": str(teacher)}}
    whole = train(raw, "run")
    assert whole[3]["restart_units"] > 0
    shutil.rmtree(tmp_path / "run/checkpoints/step-4")
    micro_model(7, eos_token_id=[2, *range(5, 18)]).save_pretrained(teacher)
    rows = train(raw, "run", resume=True)
    assert "the rollout controllers begin anew" in capsys.readouterr().err
    assert rows[:3] == whole[:3]
    assert rows[3]["restart_units"] == 0


def commands(recipe, out, count, *options):
    """`opd train` with the environments of `echo.py`, as one process or as those of a launcher."""
    script = str(Path(__file__).with_name("echo.py"))
    return [[sys.executable, script, "train", str(recipe), "--out", str(out), *options]] * count


def run_all(recipe, out, count, *options, port="29611"):
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    started = [
        subprocess.Popen(
            command,
            env={
                **os.environ,
                **(address if count > 1 else {}),
                **({"RANK": str(i), "LOCAL_RANK": str(i)} if count > 1 else {}),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for i, command in enumerate(commands(recipe, out, count, *options))
    ]
    outputs = [process.communicate(timeout=200)[0] for process in started]
    assert [process.returncode for process in started] == [0] * count, "\n".join(outputs)


def test_two_processes_equal_one(episode_recipe, tmp_path, metrics_of):
    recipe = tmp_path / "recipe.yaml"
    raw = episode_recipe(**stride(stop_below=-9.0, keep_above=None, fresh_probability=0.2), steps=5)
    recipe.write_text(OmegaConf.to_yaml(OmegaConf.create(raw)))
    run_all(recipe, tmp_path / "one", 1)
    run_all(recipe, tmp_path / "two", 2)
    one, two = metrics_of(tmp_path / "one"), metrics_of(tmp_path / "two")
    assert sum(row["restart_units"] for row in one) > 0
    for mine, other in zip(one, two, strict=True):
        assert mine.keys() == other.keys()
        for name, value in mine.items():
            assert other[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


def test_a_killed_run_is_resumed(episode_recipe, tmp_path, metrics_of):
    """`kill -9` in the middle; what the resumed run does is what a run that was never killed does."""
    recipe, run = tmp_path / "recipe.yaml", tmp_path / "run"
    raw = episode_recipe(**stride(stop_below=-9.0, keep_above=None), steps=30, checkpoint={"every": 4})
    recipe.write_text(OmegaConf.to_yaml(OmegaConf.create(raw)))
    run_all(recipe, tmp_path / "quiet", 1)
    (command,) = commands(recipe, run, 1)
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        while process.poll() is None and not (run / "checkpoints" / "step-8").exists():
            pass
        process.kill()
    assert not (run / "summary.json").exists()
    run_all(recipe, run, 1, "--resume")
    assert metrics_of(run) == metrics_of(tmp_path / "quiet")


def test_a_served_teacher_stops_at_the_same_places(recipe, train, tmp_path):
    raw = recipe(**stride(stop_below=recipe.below - 3, keep_above=None), steps=4)
    here = train(raw, "here")
    command = [
        sys.executable,
        "-m",
        "opd",
        "serve",
        "teacher",
        "--model",
        raw["teachers"]["default"]["model"],
        "--port",
        "0",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        url = server.stdout.readline().split(" at ")[1].split()[0]
        try:
            there = train({**raw, "teachers": {"default": {"url": url}}}, "there")
        finally:
            server.kill()
    assert sum(row["restart_units"] for row in here) > 0
    for mine, other in zip(without(here, "discarded_tokens"), without(there, "discarded_tokens"), strict=True):
        for name, value in mine.items():
            assert other[name] == pytest.approx(value, abs=1e-5, rel=1e-4), name
    assert all(row["discarded_tokens"] <= 3 * 8 for row in there)  # at most a chunk of each rollout


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"stride": {"fresh_probability": 2}}, r"rollout\.stride\.fresh_probability is 2\.0: it is a share"),
        ({"stride": {"max_prefix_age": 0}}, r"rollout\.stride\.max_prefix_age is 0"),
        ({"stride": {}, "early_stop": {}}, "leave early_stop out, or stride"),
        ({"stride": {"stop_below": math.nan}}, r"^rollout\.stride\.stop_below is nan"),
        ({"stride": {"keep_above": math.nan}}, r"^rollout\.stride\.keep_above is nan"),
        ({"early_stop": {"stop_below": math.nan}}, r"^rollout\.early_stop\.stop_below is nan"),
        ({"prefix": {"turns": 0}}, r"rollout\.prefix\.turns is 0: it must be at least 1"),
        ({"prefix": {"tokens": 8}}, r"^rollout\.prefix\.tokens has no effect on episodes, which .*\.turns cuts"),
        ({"prefix": {"turns": None}}, r"^rollout\.prefix\.turns is null, so that it cuts nothing of episodes"),
        ({"curriculum": {"every": 0}}, r"rollout\.curriculum\.every is 0"),
        ({"horizon": {"start": 60}}, r"rollout\.horizon: least 1, start 60 and most 50"),
        ({"stride": {"stop_bellow": 1}}, r"unknown key 'rollout\.stride\.stop_bellow'.*stop_below"),
    ],
)
def test_settings_that_cannot_work_are_refused(episode_recipe, settings, message):
    with pytest.raises(UserError, match=message):
        build_config(episode_recipe(rollout=settings))


@pytest.mark.parametrize("name", ["curriculum", "horizon"])
def test_what_counts_turns_needs_an_environment(raw_recipe, name):
    with pytest.raises(UserError, match=rf"rollout\.{name} counts turns: it needs prompts\.type=environment"):
        build_config(raw_recipe(rollout={name: {}}))


def test_turns_of_a_prefix_are_for_episodes(raw_recipe):
    build_config(raw_recipe(rollout={"prefix": {"turns": None}}))
    with pytest.raises(UserError, match=r"^rollout\.prefix\.turns has no effect on single answers, which .*tokens cuts"):
        build_config(raw_recipe(rollout={"prefix": {"turns": 3}}))


def test_prefix_and_curriculum_cut_episodes(episode_recipe, train):
    full = train(episode_recipe(), "full")
    assert max(row["turns"] for row in full) > 2
    prefix = train(episode_recipe(rollout={"prefix": {"turns": 2}}), "prefix")
    assert all(row["turns"] <= 2 and row["restart_units"] == 0 for row in prefix)
    assert prefix[0]["stops/2"] > 0
    grown = train(episode_recipe(rollout={"curriculum": {"every": 2, "most": 3}}), "grown")
    assert [row["curriculum_turns"] for row in grown] == [1, 1, 2, 2, 3, 3]
    assert all(row["turns"] <= row["curriculum_turns"] for row in grown)


def test_prefix_cuts_answers_at_a_token(raw_recipe, train):
    rows = train(raw_recipe(rollout={"prefix": {"tokens": 5}}, eval={}), "run")
    assert all(row["response_tokens"] <= 5 and row["discarded_tokens"] == 0 for row in rows)
    assert sum(row["stopped_rate"] for row in rows) > 0


def test_the_horizon_follows_successes(episode_recipe, train):
    settings = {"start": 6, "most": 6, "margin": 0.0, "min_successes": 1, "rate": 0.5}
    rows = train(episode_recipe(rollout={"horizon": settings}), "run")
    assert rows[-1]["horizon"] < 6  # no episode of `echo` has more than four
