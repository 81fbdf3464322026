"""STRIDE beside other things in one run: several teachers, other tokens, limits, lookahead, controllers that fail."""

import asyncio
import functools
import gc
import json
import random
import shutil
import signal
import subprocess
import sys
import time
import types
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM

import opd
from opd.config import build_config
from opd.errors import UserError
from opd.plugins import RolloutController
from opd.registry import CONTROLLERS

CHUNK = 3
NEVER = -1e9
ALL = {"rollouts_every": 1, "num_rollouts": 8}
ALWAYS = {"stop_below": None, "keep_above": None}  # restarts wherever there is something to begin with
STEERED = ("discarded_tokens", "stopped_rate", "restart_units", "reused_tokens", "restore_failures", "long_prefixes")
SAMPLED = {"reverse_kl": {"form": "sampled"}}


@pytest.fixture(autouse=True)
def _known(echo):
    return


@pytest.fixture
def answers(raw_recipe):
    """`answers(**sections)`: single answers of up to 12 tokens, in chunks of three."""
    return functools.partial(raw_recipe, sampler={"chunk_tokens": CHUNK}, eval={})


def stride(**settings):
    return {"stride": {**ALWAYS, **settings}}


def recorded(run):
    """The rollouts of each step, in order."""
    files = sorted((run / "rollouts").iterdir(), key=lambda path: int(path.stem.split("-")[1]))
    return [[json.loads(line) for line in file.read_text().splitlines()] for file in files]


def reused(row):
    return sum(turn["num_reused"] for turn in row["turns"])


def buffer_of(run, step):
    """(the buffer's rows by task, its arrays) in the checkpoint after `step`."""
    trainer = run / "checkpoints" / f"step-{step}" / "trainer"
    state = json.loads((trainer / "state.json").read_text())["controllers"]["states"]["stride"]["buffer"]
    return {row["task"]: row for row in state["rows"]}, load_file(trainer / "controllers.safetensors")


def resumed(run, copy, step):
    """A copy of a finished run that knows the checkpoint after `step`, and none after it."""
    shutil.copytree(run, copy)
    for path in (copy / "checkpoints").iterdir():
        if int(path.name.removeprefix("step-")) > step:
            shutil.rmtree(path)
    return copy


# --- Teachers ---


def test_several_teachers_each_judge_their_own_domain(answers, train, tmp_path, model_folder, vocab):
    """The buffer holds what the prompt's own teacher thinks; the words say whose each prompt is."""
    models = {name: str(model_folder(seed)) for name, seed in (("left", 1), ("right", 5))}
    words = {word: ("left", "right")[i % 2] for i, word in enumerate(["abc", "de", "fghij", "k", "lmno", "pq"])}
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"problem": word, "domain": name}) + "\n" for word, name in words.items()))
    prompts = {"path": str(path), "columns": {"prompt": "problem"}}
    teachers = {name: {"model": model} for name, model in models.items()}
    raw = answers(rollout=stride(stop_below=-60.0), teachers=teachers, prompts=prompts, trackers=ALL)
    rows = train(raw, "run")
    assert sum(row["restart_units"] for row in rows) > 0
    last = {row["id"]: row for step in recorded(tmp_path / "run") for row in step}
    kept, arrays = buffer_of(tmp_path / "run", 6)
    domains = {name: words[row["prompt"].split("<user>")[1].split("<")[0]] for name, row in last.items()}
    frozen = {name: AutoModelForCausalLM.from_pretrained(model) for name, model in models.items()}
    assert len(kept) == 6
    for number, task in enumerate(kept):
        context, sampled, logps = (
            arrays[f"stride/{number}.0.{one}"] for one in ("context_ids", "sampled_ids", "teacher_logps")
        )
        assert sampled.tolist() == last[task]["sampled_ids"]
        exact = logps_of(frozen[domains[task]], vocab, context, sampled)
        assert len(logps) // CHUNK == len(sampled) // CHUNK  # what is left is no chunk
        known = ~np.isnan(logps)
        assert known.sum() >= len(sampled) // CHUNK * CHUNK
        np.testing.assert_allclose(logps[known], exact[: len(logps)][known], atol=1e-4)


def logps_of(model, vocab, context, sampled):
    ids = torch.from_numpy(np.concatenate([context, sampled])).long()
    with torch.no_grad():
        logps = model(ids[None]).logits[0, len(context) - 1 : -1, :vocab].log_softmax(-1)
    return logps.gather(-1, ids[len(context) :, None])[:, 0].numpy()


def test_a_teacher_with_other_tokens_changes_nothing_by_watching(aligned_recipe, train):
    settings = {"sampler": {"chunk_tokens": CHUNK}, "terms": SAMPLED, "steps": 4}
    plain = train(aligned_recipe(**settings), "plain")
    watched = train(aligned_recipe(**settings, rollout=stride(stop_below=NEVER, keep_above=0.0)), "watched")
    for mine, other in zip(watched, plain, strict=True):
        assert {name: mine[name] for name in other} == other
        assert all(mine[name] == 0 for name in STEERED)


@pytest.mark.parametrize("lookahead", [0, 1])
def test_a_teacher_with_other_tokens_restarts_answers(aligned_recipe, train, tmp_path, metrics_of, lookahead):
    """And after a resume they go on as they would have."""
    raw = aligned_recipe(
        sampler={"chunk_tokens": CHUNK},
        terms=SAMPLED,
        rollout=stride(stop_below=-15.0),
        trackers=ALL,
        lookahead=lookahead,
        checkpoint={"every": 3, "keep": 9},
    )
    rows = train(raw, "run")
    assert 0 < sum(row["stopped_rate"] for row in rows) < len(rows)
    assert sum(row["restart_units"] for row in rows[1:]) > 0
    assert sum(row["restore_failures"] for row in rows) == 0
    check_answers(recorded(tmp_path / "run"))
    copy = resumed(tmp_path / "run", tmp_path / "copy", 3)
    opd.train(build_config(raw), copy, resume=True)
    assert metrics_of(copy) == rows


def check_answers(steps, most=12):
    """Reused tokens are whole chunks of the task's last rollout, and something is new."""
    before = {}
    for step in steps:
        for row in step:
            num = reused(row)
            assert num % CHUNK == 0
            assert num < len(row["sampled_ids"]) <= most
            assert row["sampled_ids"][:num] == before.get(row["id"], [])[:num]
        before |= {row["id"]: row["sampled_ids"] for row in step}
    assert any(reused(row) for step in steps for row in step)


@pytest.fixture
def aligned_episodes(aligned_recipe, byte_tokenizer, micro_model, tmp_path):
    """`aligned_episodes(**sections)`: episodes of `echo` whose teacher spells otherwise. Every other state ends a turn."""

    def folder(seed, merges):
        tokenizer = byte_tokenizer(merges, "abcd0uvwxyz")
        model = micro_model(seed, vocab_size=len(tokenizer) + 3, tie_word_embeddings=False)
        with torch.no_grad():
            model.lm_head.weight[2] *= 4
        path = tmp_path / f"family-{seed}"
        model.save_pretrained(path)
        tokenizer.save_pretrained(path)
        return str(path)

    student, teacher = folder(0, "ab uv wx"), folder(1, "cd xy")

    def build(**sections):
        defaults = {"student": {"model": student}, "teachers": {"default": {"model": teacher}}, "terms": SAMPLED}
        prompts = {"type": "environment", "name": "echo"}
        return aligned_recipe(**{**defaults, "prompts": prompts, "sampler": {"chunk_tokens": CHUNK}, **sections})

    return build


@pytest.mark.parametrize("context", ["append_only", "rerender"])
def test_a_teacher_with_other_tokens_restarts_episodes(aligned_episodes, train, tmp_path, metrics_of, context):
    prompts = {"type": "environment", "name": "echo", "context": context}
    raw = aligned_episodes(
        rollout=stride(stop_below=-12.0), prompts=prompts, trackers=ALL, checkpoint={"every": 3, "keep": 9}
    )
    rows = train(raw, "run")
    assert all(row["align/byte_coverage"] == 1.0 for row in rows)
    assert 0 < sum(row["stopped_rate"] for row in rows) < len(rows)
    assert sum(row["restart_units"] for row in rows[2:]) > 0
    assert sum(row["restore_failures"] + row["long_prefixes"] for row in rows) == 0
    check_turns(recorded(tmp_path / "run"))
    copy = resumed(tmp_path / "run", tmp_path / "copy", 3)
    opd.train(build_config(raw), copy, resume=True)
    assert metrics_of(copy) == rows


def check_turns(steps, limits=None):
    """Reused turns are whole and those of the last rollout; never more than the limit, and always a new one."""
    before = {}
    for number, step in enumerate(steps):
        most = 6 if limits is None else limits[number]
        for row in step:
            turns = row["turns"]
            num = sum(turn["num_reused"] > 0 for turn in turns)
            assert num < len(turns) <= most
            assert all(turn["num_reused"] == turn["num_tokens"] for turn in turns[:num])
            assert all(turn["num_reused"] == 0 for turn in turns[num:])
            earlier = before.get(row["id"], [])[:num]
            assert [(t["text"], t["observations"]) for t in turns[:num]] == [(t["text"], t["observations"]) for t in earlier]
        before |= {row["id"]: row["turns"] for row in step}
    assert any(reused(row) for step in steps for row in step)


# --- Limits ---

LIMITS = {
    "prefix": ({"prefix": {"turns": 2}}, lambda rows: [2] * len(rows)),
    "curriculum": ({"curriculum": {"every": 2, "start": 1, "most": 3}}, lambda rows: [1, 1, 2, 2, 3, 3, 3, 3]),
    "horizon": (
        {"horizon": {"start": 3, "least": 2, "margin": 0.5, "min_successes": 1, "rate": 0.5}},
        lambda rows: [3, *(round(row["horizon"]) for row in rows[:-1])],
    ),
}


@pytest.mark.parametrize("name", LIMITS)
def test_a_restart_stays_below_the_limit(episode_recipe, train, tmp_path, name):
    """And leaves a turn to be sampled, though the rollout that is kept may have as many turns as are allowed now."""
    other, limits_of = LIMITS[name]
    rows = train(episode_recipe(rollout={**stride(), **other}, trackers=ALL, steps=8), "run")
    limits = limits_of(rows)
    steps = recorded(tmp_path / "run")
    check_turns(steps, limits)
    assert sum(row["restore_failures"] + row["long_prefixes"] for row in rows) == 0
    for figures, step, most in zip(rows, steps, limits):
        stopped = [row for row in step if row["finish"] == "stopped"]
        assert all(len(row["turns"]) == most for row in stopped)
        assert figures["stopped_rate"] == len(stopped) / 8
        assert "saved_tokens" not in figures  # no rollout tells how long it would have been
    assert sum(row["stopped_rate"] for row in rows) > 0
    names = {"curriculum": "curriculum_turns", "horizon": "horizon"}
    assert all(names.get(name, "turns") in row and "max_turns" not in row for row in rows)


@pytest.mark.parametrize("lookahead", [0, 1])
def test_several_controllers_are_resumed_together(episode_recipe, train, tmp_path, metrics_of, lookahead):
    other = {"horizon": {"start": 4, "least": 2, "margin": 0.5, "min_successes": 1, "rate": 0.5}, "prefix": {"turns": 3}}
    rollout = {**stride(stop_below=-9.0), **other}
    raw = episode_recipe(rollout=rollout, steps=7, lookahead=lookahead, checkpoint={"every": 4, "keep": 9})
    rows = train(raw, "run")
    assert sum(row["restart_units"] for row in rows) > 0
    assert len({row["horizon"] for row in rows}) > 3
    copy = resumed(tmp_path / "run", tmp_path / "copy", 4)
    opd.train(build_config(raw), copy, resume=True)
    assert metrics_of(copy) == rows


@pytest.mark.parametrize("tokens", [1, 7, 9])
def test_an_answer_that_restarts_stays_below_the_limit(answers, train, tmp_path, tokens):
    """Where a chunk is longer than the limit, none can be reused."""
    rows = train(answers(rollout={**stride(), "prefix": {"tokens": tokens}}, trackers=ALL), "run")
    steps = recorded(tmp_path / "run")
    if tokens >= CHUNK:
        check_answers(steps, most=tokens)
    for figures, step in zip(rows, steps, strict=True):
        assert all(reused(row) < len(row["sampled_ids"]) <= tokens for row in step)
        assert figures["long_prefixes"] == sum(row["restart"] == "too long" for row in step) == 0
        assert figures["discarded_tokens"] == 0
    finishes = {row["finish"] for step in steps for row in step}
    assert {"stopped"} <= finishes <= {"eos", "stopped"}


def test_a_limit_that_shrinks_begins_answers_anew(answers, train, tmp_path, monkeypatch):
    """What was reused would fill it."""

    class Shrinking(RolloutController):
        Config = Nothing

        def limits(self, step):
            return opd.records.Limits(tokens=12 if step < 2 else CHUNK)

    known_as(monkeypatch, "shrinking", Shrinking)
    rows = train(answers(rollout={**stride(), "shrinking": {}}, trackers=ALL, steps=4), "run")
    steps = recorded(tmp_path / "run")
    assert rows[2]["long_prefixes"] == sum(row["restart"] == "too long" for row in steps[2]) > 0
    assert all(reused(row) == 0 and len(row["sampled_ids"]) <= CHUNK for step in steps[2:] for row in step)


@pytest.mark.parametrize("tokens", [12, 99])
def test_a_limit_as_large_as_the_recipes_stops_nothing(answers, train, tokens):
    plain = train(answers(steps=3), "plain")
    limited = train(answers(rollout={"prefix": {"tokens": tokens}}, steps=3), "limited")
    assert sum(row["truncated_rate"] for row in plain) > 0
    for mine, other in zip(limited, plain, strict=True):
        assert {name: mine[name] for name in other} == other
        assert mine["stopped_rate"] == 0
        assert not any(name.startswith("stops/") for name in mine)


def test_a_prefix_that_cuts_nothing_is_refused(answers):
    with pytest.raises(UserError, match=r"rollout\.prefix"):
        build_config(answers(rollout={"prefix": {"turns": None, "tokens": None}}))


# --- What is kept ---


@pytest.mark.parametrize("kind", ["answers", "episodes"])
def test_figures_of_the_buffer(answers, episode_recipe, train, tmp_path, kind):
    """Four tasks a step, eight in all; its size is that of what the checkpoint holds, nearly."""
    recipe = answers if kind == "answers" else episode_recipe
    rows = train(recipe(rollout=stride(stop_below=-25.0), steps=3, terms={"reverse_kl": {"form": "topk", "k": 4}}), "run")
    assert [row["buffer_tasks"] for row in rows] == [4, 8, 8]
    assert all(row["buffer_evicted"] == 0 for row in rows)
    kept, arrays = buffer_of(tmp_path / "run", 3)
    texts = sum(len(json.dumps(turn["observations"])) for row in kept.values() for turn in row["turns"][:-1])
    size = sum(array.nbytes for array in arrays.values()) + texts
    assert len(kept) == 8
    assert rows[-1]["buffer_mib"] == pytest.approx(size / 2**20, abs=6e-4)
    assert rows[-1]["buffer_mib"] > 0
    assert not any("topk" in name for name in arrays)
    without = train(recipe(rollout=stride(stop_below=-25.0, restart=False), steps=1), "without")
    assert not any(name.startswith("buffer") for name in without[0])


@pytest.mark.parametrize("kind", ["answers", "episodes"])
@pytest.mark.parametrize("age", [None, 2])
def test_a_prefix_is_as_old_as_its_oldest_token(answers, episode_recipe, train, tmp_path, age, kind):
    """Reused again and again, tokens would otherwise stay for ever."""
    recipe = answers if kind == "answers" else episode_recipe
    rows = train(recipe(rollout=stride(max_prefix_age=age), steps=9, optimizer={"lr": 0.0}), "run")
    kept, _ = buffer_of(tmp_path / "run", 9)
    versions = [[version for turn in row["turns"] for _, version in turn["versions"]] for row in kept.values()]
    ages = [max(of_one) - min(of_one) for of_one in versions]  # each rollout has a token of its own step
    assert max(max(of_one) for of_one in versions) == 8
    assert max(ages) > 4 if age is None else 0 < max(ages) <= age
    assert sum(row["restart_units"] for row in rows) > 0


def test_answers_to_other_prompts_of_the_same_name_are_not_reused(answers, train, tmp_path):
    """The file was edited while the run stood still."""
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"problem": word}) + "\n" for word in ("abc", "de", "fgh", "k")))
    prompts = {"path": str(path), "columns": {"prompt": "problem"}}
    raw = answers(rollout=stride(), prompts=prompts, steps=3, checkpoint={"every": 2, "keep": 9})
    whole = train(raw, "run")
    assert whole[2]["restart_units"] > 0
    assert whole[2]["restore_failures"] == 0
    path.write_text("".join(json.dumps({"problem": word}) + "\n" for word in ("cba", "ed", "hgf", "l")))
    copy = resumed(tmp_path / "run", tmp_path / "copy", 2)
    opd.train(build_config(raw), copy, resume=True)
    row = json.loads((copy / "metrics.jsonl").read_text().splitlines()[2])
    assert row["restart_units"] == row["reused_tokens"] == 0
    assert row["restore_failures"] > 0


@pytest.mark.parametrize("kind", ["answers", "episodes"])
def test_the_clock_decides_nothing(answers, episode_recipe, train, monkeypatch, kind):
    """To the last bit: what the teacher is asked together follows from the order of events, however long they take."""
    recipe, real = answers if kind == "answers" else episode_recipe, asyncio.BaseEventLoop.time
    rollout = stride(stop_below=-3.0, stop_stat="excess")
    runs = [train(recipe(rollout=rollout, lookahead=1, steps=3), "calm")]
    for seed in (1, 2):
        draw, ahead_s = random.Random(seed), [0.0]

        def jumping(loop, draw=draw, ahead_s=ahead_s):
            ahead_s[0] += draw.choice([0.0, 5e-4])  # whoever sleeps for a time wakes early
            return real(loop) + ahead_s[0]

        monkeypatch.setattr(asyncio.BaseEventLoop, "time", jumping)
        runs.append(train(recipe(rollout=rollout, lookahead=1, steps=3), f"jumping-{seed}"))
    assert runs[1] == runs[2] == runs[0]


@pytest.mark.parametrize("kind", ["answers", "episodes"])
def test_another_teacher_drops_what_is_in_flight(answers, episode_recipe, train, tmp_path, micro_model, capsys, kind):
    """What the old one had stopped, and where it had let them begin, no longer holds."""
    recipe = answers if kind == "answers" else episode_recipe
    raw = recipe(rollout=stride(stop_below=-25.0), steps=4, lookahead=1, checkpoint={"every": 3, "keep": 9})
    teacher = tmp_path / "teacher"
    shutil.copytree(raw["teachers"]["default"]["model"], teacher)
    raw["teachers"] = {"default": {"model": str(teacher)}}
    whole = train(raw, "run")
    assert (tmp_path / "run/checkpoints/step-3/trainer/in_flight.safetensors").exists()
    assert whole[3]["restart_units"] > 0
    assert whole[3]["staleness"] == 1
    copy = resumed(tmp_path / "run", tmp_path / "copy", 3)
    same = resumed(tmp_path / "run", tmp_path / "same", 3)
    opd.train(build_config(raw), same, resume=True)
    assert "begin anew" not in capsys.readouterr().err
    ends = {} if kind == "answers" else {"eos_token_id": [2, *range(5, 18)]}
    micro_model(7, **ends).save_pretrained(teacher)
    opd.train(build_config(raw), copy, resume=True)
    assert "the rollout controllers begin anew" in capsys.readouterr().err
    rows = [json.loads((run / "metrics.jsonl").read_text().splitlines()[3]) for run in (copy, same)]
    assert rows[0]["restart_units"] == rows[0]["staleness"] == 0
    assert (rows[1]["restart_units"], rows[1]["staleness"]) == (whole[3]["restart_units"], 1)


# --- Controllers that fail ---


@dataclass(frozen=True)
class NothingConfig:
    pass


Nothing = NothingConfig


class Broken(Exception):
    """What a controller of a third party raises."""


class Failing(RolloutController):
    """Raises in the method `where` when it is asked for the fifth time."""

    Config = Nothing
    where = ""
    count = 0

    def __init__(self, config, run):
        type(self).count = 0

    def _count(self, name):
        if name == self.where:
            type(self).count += 1
            if self.count == 5:
                raise Broken(name)

    def start(self, prompt, step, slot):
        self._count("start")

    def stops(self, progress):
        self._count("stops")
        return False

    def landed(self, step, rollouts):
        self._count("landed")

    def figures(self):
        self._count("figures")
        return {}


def known_as(monkeypatch, name, kind):
    module = types.ModuleType(f"a_third_partys_{name}")
    setattr(module, kind.__name__, kind)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(CONTROLLERS.builtin, name, f"{module.__name__}:{kind.__name__}")


@pytest.mark.parametrize(
    ("where", "kind", "lookahead"),
    [
        *(("stops", kind, lookahead) for kind in ("answers", "episodes") for lookahead in (0, 1)),
        ("start", "episodes", 0),
        ("landed", "answers", 1),
        ("figures", "answers", 1),
    ],
)
def test_an_error_of_a_controller_ends_the_run(
    answers, episode_recipe, train, tmp_path, monkeypatch, caplog, where, kind, lookahead
):
    """As it was raised, and nothing is left behind that complains later."""
    known_as(monkeypatch, "failing", Failing)
    monkeypatch.setattr(Failing, "where", where)
    recipe = answers if kind == "answers" else episode_recipe
    with pytest.raises(Broken, match=f"^{where}$"):
        train(recipe(rollout={**stride(stop_below=-60.0), "failing": {}}, lookahead=lookahead), "run")
    assert not (tmp_path / "run/summary.json").exists()
    gc.collect()
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == []


# --- Killed ---


def test_answers_killed_at_any_moment_are_resumed(answers, train, tmp_path, metrics_of):
    """With rollouts of the next step in flight. Each call draws another moment."""
    recipe, run, draw = tmp_path / "recipe.yaml", tmp_path / "run", random.Random()
    raw = answers(rollout=stride(stop_below=-25.0), steps=24, lookahead=1, checkpoint={"every": 3})
    recipe.write_text(OmegaConf.to_yaml(OmegaConf.create(raw)))
    quiet = train(raw, "quiet")
    assert sum(row["restart_units"] for row in quiet) > 0
    rows, deadline_s = draw.randint(3, 18), time.monotonic() + 90
    command = [sys.executable, "-m", "opd", "train", str(recipe), "--out", str(run)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        while process.poll() is None and time.monotonic() < deadline_s:
            if (run / "metrics.jsonl").exists() and (run / "metrics.jsonl").read_bytes().count(b"\n") >= rows:
                break
            time.sleep(0.002)
        time.sleep(draw.random() * 0.1)  # anywhere in a step, or while a checkpoint is written
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL, "it ended before it was killed"
    assert not (run / "summary.json").exists(), f"killed after {rows} rows or more"
    opd.train(build_config(raw), run, resume=True)
    assert metrics_of(run) == quiet
