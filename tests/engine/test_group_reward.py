"""Whole runs on group rewards: alone, beside a teacher, dead groups set to zero or replaced, killed, in two processes."""

import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from omegaconf import OmegaConf
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import opd
from opd.config import build_config
from opd.errors import UserError
from opd.objective.learner import Learner
from opd.recorder import Recorder

MARKS = ["<pad>", "<bos>", "<eos>", "<user>", "<assistant>"]
WORDS = [*(f"\n#### {digit}" for digit in range(4)), "\n."]  # so that models with random weights write answers
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] }}{% endfor %}{{ '<assistant>' }}"
REFILL = {"group_reward": {"dead": "drop_and_refill", "max_refills": 3}}


@pytest.fixture(scope="module")
def folders(micro_model, tmp_path_factory):
    """A student and a teacher whose tokens are answers."""
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate([*MARKS, *WORDS])}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n#### \d|\n\."), "isolated")  # type: ignore[assignment]
    words.decoder = decoders.Fuse()  # type: ignore[assignment]
    names = {f"{mark[1:-1]}_token": mark for mark in MARKS[:3]}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, **names, extra_special_tokens=MARKS[3:], chat_template=TEMPLATE
    )
    found = []
    for seed in (0, 1):
        folder = tmp_path_factory.mktemp("model")
        micro_model(seed, vocab_size=16).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        found.append(str(folder))
    return found


@pytest.fixture(scope="module")
def recipe(raw_recipe, folders, tmp_path_factory):
    """`recipe(answers, **sections)`: eight prompts with these answers in turn; the reward counts tokens, too."""
    folder = tmp_path_factory.mktemp("answered")

    def build(answers="0123", **sections):
        path = folder / f"{answers}.jsonl"
        rows = [
            {"id": f"p{i}", "problem": WORDS[i % 4] + WORDS[i // 2], "answer": answers[i % len(answers)]} for i in range(8)
        ]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        defaults = {
            "student": {"model": folders[0]},
            "teachers": {},
            "prompts": {"path": str(path), "columns": {"prompt": "problem"}},
            "batch": {"prompts": 4, "rollouts_per_prompt": 4},
            "reward": {"outcome": "answer", "length_cost": 0.01},
            "terms": {"group_reward": {}},
            "eval": {},
        }
        return raw_recipe(**{**defaults, **sections})

    return build


def groups_of(rows, size=4):
    assert [rollout.slot for rollout, _ in rows] == list(range(len(rows)))
    return [rows[start : start + size] for start in range(0, len(rows), size)]


@pytest.mark.parametrize("outcome", ["answer", "majority"])
def test_rewards_alone_teach(recipe, train, tmp_path, outcome):
    """No teacher, no KL; the evaluation has its accuracy alone."""
    answers = {"answer": "2", "majority": "0123"}[outcome]
    heldout = recipe(answers)["prompts"]
    raw = recipe(answers, steps=25, reward={"outcome": outcome}, optimizer={"lr": 5e-3}, eval={"prompts": heldout})
    rows = train(raw)
    first, last = (np.mean([row["success_rate"] for row in part]) for part in (rows[:4], rows[-4:]))
    assert last > first + 0.25
    assert all(row["score"] == pytest.approx(row["success_rate"]) for row in rows)
    assert all(row["group_advantage"] != 0 for row in rows[:4])
    measured = json.loads((tmp_path / "run/summary.json").read_text())["eval"]["after"]
    assert measured["reverse_kl"] is None
    assert measured["accuracy"] == 1.0 or outcome == "majority"


def test_failures_teach_under_the_score_and_not_under_the_outcome(recipe, train):
    """No answer is right: to the last bit, nothing is learned."""
    for gate in ("score", "none", "outcome"):
        rows = train(recipe("9", steps=3, terms={"group_reward": {"gate": gate}}), gate)
        assert all(row["success_rate"] == 0 and row["score"] < 0 for row in rows)
        if gate == "outcome":
            assert all(row["live_groups"] == row["phantom_groups"] == row["grad_norm"] == row["loss"] == 0 for row in rows)
            assert all(row["trained_tokens"] == row["sampled_tokens"] for row in rows)
        else:  # but where all four are of one length
            assert all(row["phantom_groups"] > 0.5 and row["grad_norm"] > 0 for row in rows)
            assert all(row["live_groups"] == (1 if gate == "none" else row["phantom_groups"]) for row in rows)


def test_half_of_the_prompts_unsolvable(recipe, train, taught):
    rows = train(recipe("09", steps=4))
    for row, rollouts in zip(rows, taught):
        groups = groups_of(rollouts)
        live = [len({rollout.outcome for rollout, _ in group}) > 1 for group in groups]
        assert row["live_groups"] == np.mean(live)
        assert row["phantom_groups"] == 0
        for alive, group in zip(live, groups):
            assert any(term.inputs["reward"].any() for _, (term,) in group) == alive
            for rollout, (term,) in group:
                assert rollout.score == rollout.outcome - 0.01 * rollout.num_tokens
                assert term.mask.all()
    assert 0 < np.mean([row["live_groups"] for row in rows]) < 1


def test_zero_advantages_keep_the_denominator_and_a_mask_would_not(recipe, tmp_path, metrics_of, monkeypatch):
    """With dead groups masked, the others would teach more by all tokens over live ones."""
    real = Learner.update
    seen = {}

    def update(self, rows):
        live = [bool(term.inputs["reward"].any()) for _, (term,) in rows]
        masked = [(one, [replace(term, mask=term.mask & alive)]) for alive, (one, (term,)) in zip(live, rows)]
        lengths = np.array([rollout.num_tokens for rollout, _ in rows])
        seen["share"] = lengths[live].sum() / lengths.sum()
        seen["masked"] = real(self, masked)
        seen["zero"] = real(self, rows)
        return seen["zero"]

    monkeypatch.setattr(Learner, "update", update)
    opd.train(build_config(recipe("09", steps=1, optimizer={"lr": 0.0, "max_grad_norm": 0.0})), tmp_path / "run")
    assert 0.1 < seen["share"] < 0.9
    assert seen["zero"]["grad_norm"] == pytest.approx(seen["masked"]["grad_norm"] * seen["share"], rel=1e-5)
    assert seen["zero"]["loss"] == pytest.approx(seen["masked"]["loss"] * seen["share"], rel=1e-5)


@pytest.mark.parametrize("form", ["full", "sampled"])
def test_a_teachers_term_is_the_same_with_and_without(recipe, train, taught, folders, form):
    teacher = {"teachers": {"default": {"model": folders[1]}}}
    alone = {"reverse_kl": {"form": form}}
    train(recipe(steps=1, terms=alone, reward=None, **teacher), "alone")
    row = train(recipe(steps=1, terms={**alone, "group_reward": {}}, **teacher), "beside")[0]
    for (mine, (first,)), (other, (term, group_term)) in zip(*taught, strict=True):
        assert mine.slot == other.slot
        assert mine.turns[0].sampled_ids.tolist() == other.turns[0].sampled_ids.tolist()
        assert (first.kind, first.coef, first.mask.tolist()) == (term.kind, term.coef, term.mask.tolist())
        assert first.inputs.keys() == term.inputs.keys()
        for name, value in first.inputs.items():
            if isinstance(value, np.ndarray):
                assert value.tobytes() == term.inputs[name].tobytes(), name
            elif name == "target":
                assert all((one == two).all() for one, two in zip(value.states, term.inputs[name].states))
            else:
                assert value == term.inputs[name], name
        assert group_term.inputs["self_coef"] == 0.0
    assert row["trained_tokens"] == row["sampled_tokens"]
    assert {"group_advantage", "live_groups", "reverse_kl" if form == "full" else "reverse_kl_sampled"} <= set(row)


def test_several_updates_of_a_batch_are_clipped_on_either_side(recipe, train):
    terms = {"group_reward": {"ratio_clip": 0.02, "ratio_clip_high": 0.3}}
    rows = train(recipe(steps=3, terms=terms, objective={"updates_per_batch": 4}, optimizer={"lr": 3e-2}))
    assert sum(row["ratio_clipped"] for row in rows) > 0
    other = train(recipe(steps=3, terms={"group_reward": {"ratio_clip": 0.02}}, objective={"updates_per_batch": 4}), "other")
    assert rows != other


def test_dead_groups_make_way_for_other_prompts(recipe, train, taught, tmp_path):
    trackers = {"rollouts_every": 1, "num_rollouts": 16}
    rows = train(recipe("09", steps=4, terms=REFILL, trackers=trackers))
    zero = train(recipe("09", steps=4), "zero")
    assert sum(row["dropped_groups"] for row in rows if "dropped_groups" in row) >= 4
    assert all("dropped_groups" not in row and "dropped_tokens" not in row for row in zero)
    assert np.mean([row["live_groups"] for row in rows]) > np.mean([row["live_groups"] for row in zero])
    firsts, steps = taught[4:], taught[:4]
    for number, (row, rollouts, first) in enumerate(zip(rows, steps, firsts)):
        groups, before = groups_of(rollouts), groups_of(first)
        assert len(groups) == 4
        assert row["sampled_tokens"] == sum(rollout.num_tokens for rollout, _ in rollouts)
        assert all(len({rollout.prompt.id for rollout, _ in group}) == 1 for group in groups)
        if number:
            continue
        # the student is the same still: groups that were live stay as they are, dead ones are others
        dropped = 0
        for kept, was in zip(groups, before):
            mine, earlier = (
                [(one.prompt.id, one.turns[0].sampled_ids.tolist()) for one, _ in group] for group in (kept, was)
            )
            same = mine == earlier
            assert same == (len({rollout.outcome for rollout, _ in was}) > 1)
            dropped += not same
        assert dropped > 0
        assert row["dropped_groups"] >= dropped
        assert row["dropped_tokens"] >= 4 * row["dropped_groups"]
    assert "score" in json.loads((tmp_path / "run/rollouts/step-1.jsonl").read_text().splitlines()[0])


def test_refills_end(recipe, train):
    """Where nothing can be solved, each place is filled again so often, and then teaches nothing."""
    rows = train(recipe("9", steps=2, terms=REFILL))
    assert [row["dropped_groups"] for row in rows] == [12, 12]
    assert all(row["grad_norm"] == 0 and row["trained_tokens"] == row["sampled_tokens"] for row in rows)


class Killed(Exception): ...


@pytest.mark.parametrize(
    ("terms", "lookahead"),
    [({"group_reward": {}}, 0), ({"group_reward": {}}, 1), (REFILL, 0), ({"group_reward": {}, "reverse_kl": {}}, 1)],
)
def test_a_killed_run_that_is_resumed_is_the_same(recipe, train, tmp_path, folders, monkeypatch, terms, lookahead):
    """Killed behind step 4, after a checkpoint of step 3; with lookahead the rollouts of step 4 were in flight there."""
    teachers = {"default": {"model": folders[1]}} if "reverse_kl" in terms else {}
    raw = recipe("09", terms=terms, teachers=teachers, lookahead=lookahead, checkpoint={"every": 3})
    whole = train(raw)
    real = Recorder.step

    def step(self, number, landed, metrics):
        real(self, number, landed, metrics)
        if number == 4:
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(Recorder, "step", step)
        with pytest.raises(Killed):
            train(raw, "killed")
    assert train(raw, "killed", resume=True) == whole
    ends = [(tmp_path / name / "checkpoints/step-6/model.safetensors").read_bytes() for name in ("run", "killed")]
    assert ends[0] == ends[1]


@pytest.mark.slow
def test_two_processes_equal_one(recipe, train, tmp_path, metrics_of, folders):
    """Each has whole groups, and fills the places of its own dead ones again."""
    terms = {**REFILL, "reverse_kl": {"form": "sampled"}}
    batch = {"prompts": 3, "rollouts_per_prompt": 4}
    raw = recipe("09", steps=3, terms=terms, teachers={"default": {"model": folders[1]}}, batch=batch)
    one, path = train(raw, "one"), tmp_path / "recipe.yaml"
    path.write_text(OmegaConf.to_yaml(OmegaConf.create(raw)))
    command = [sys.executable, "-m", "opd", "train", str(path), "--out", str(tmp_path / "two"), "--processes", "2"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    two = metrics_of(tmp_path / "two")
    assert sum(row.get("dropped_groups", 0) for row in one) > 0
    assert len(one) == len(two) == 3
    for mine, other in zip(one, two):
        assert mine.keys() == other.keys()
        for name, value in mine.items():
            assert other[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


def test_what_a_controller_stopped_has_no_advantage(recipe, train, taught, folders):
    raw = recipe(steps=3, rollout={"early_stop": {"stop_below": -6.0}}, sampler={"chunk_tokens": 3})
    rows = train({**raw, "teachers": {"default": {"model": folders[1]}}})
    assert 0 < np.mean([row["stopped_rate"] for row in rows]) < 1
    seen = [(rollout, term) for step in taught for rollout, (term,) in step]
    stopped = [(rollout, term) for rollout, term in seen if rollout.finish == "stopped"]
    assert all(rollout.outcome is None and rollout.score is None for rollout, _ in stopped)
    assert not any(term.inputs["reward"].any() for _, term in stopped)
    assert all(term.mask.all() for _, term in stopped)
    assert any(term.inputs["reward"].any() for _, term in seen)


def test_rewards_without_a_term_that_compares_count_successes(recipe, train, folders):
    """The run is the one without them, to the last bit."""
    teacher = {"teachers": {"default": {"model": folders[1]}}, "terms": {"reverse_kl": {}}, "steps": 2}
    plain = train(recipe(**teacher, reward=None), "plain")
    counted = train(recipe(**teacher, reward={"outcome": "answer"}), "counted")
    assert [{name: value for name, value in row.items() if name != "success_rate"} for row in counted] == plain
    assert all(0 < row["success_rate"] < 1 for row in counted)


def test_sample_rollouts_show_outcome_and_score(recipe, train, tmp_path):
    train(recipe(steps=1, trackers={"rollouts_every": 1, "num_rollouts": 8}))
    rows = [json.loads(line) for line in (tmp_path / "run/rollouts/step-1.jsonl").read_text().splitlines()]
    assert len(rows) == 8
    for row in rows:
        assert row["score"] == row["outcome"] - 0.01 * len(row["sampled_ids"])
        assert "advantages" not in row  # nobody to compare with


@pytest.fixture
def episodes(episode_recipe, echo):
    """`episodes(**sections)`: episodes of `echo.py`, whose outcomes their environment says, without a teacher."""

    def build(**sections):
        defaults = {"teachers": {}, "terms": {"group_reward": {}}, "batch": {"prompts": 3, "rollouts_per_prompt": 4}}
        return episode_recipe(**{**defaults, **sections})

    return build


def test_episodes_are_compared_by_what_their_environment_says(episodes, train, taught):
    rows = train(episodes(steps=3, reward={"length_cost": 0.02}))
    assert all(0 < row["success_rate"] < 1 and row["turns"] > 1 for row in rows)
    for step in taught:
        for rollout, (term,) in step:
            assert rollout.score == rollout.outcome - 0.02 * rollout.num_tokens
            assert len(set(term.inputs["reward"].tolist())) == 1
    bare = train(episodes(steps=3), "bare")
    assert bare[0]["score"] == bare[0]["success_rate"] == rows[0]["success_rate"]


def test_refilled_episodes_keep_to_the_horizon(episodes, train, taught):
    horizon = {"start": 2, "least": 1, "most": 2, "margin": 0.0}
    rows = train(episodes(steps=2, terms=REFILL, rollout={"horizon": horizon}))
    assert sum(row["dropped_groups"] for row in rows) > 0
    assert max(len(rollout.turns) for step in taught for rollout, _ in step) <= 2


def test_calls_that_do_not_end_are_counted_and_said_and_a_step_of_them_alone_ends_the_run(recipe, train, tmp_path, capsys):
    (tmp_path / "own.py").write_text(
        "import os, time\n\ndef some(response, answer, row):\n"
        "    time.sleep(60 * (row['id'] == 'p0'))\n    return float(len(response) % 2)\n\n"
        "def none(response, answer, row):\n    os._exit(1)\n"
    )
    reward = {"outcome": f"{tmp_path}/own.py:some", "time_limit_s": 0.5}
    metrics = train(recipe(steps=2, batch={"prompts": 8, "rollouts_per_prompt": 2}, reward=reward))
    assert [row["reward/outcome_timeouts"] for row in metrics] == [1 / 8, 1 / 8]
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("WARNING: reward.outcome: ")]
    assert len(said) == 1
    assert said[0].endswith("in 12.5% of the calls of step 1; these count as 0: mend it, or raise reward.time_limit_s")
    own = f"{tmp_path}/own.py:none"
    with pytest.raises(UserError, match=r"^reward\.score: .*own\.py:none .* in 100\.0% of the calls of step 1; mend it"):
        train(recipe(steps=2, reward={"score": own}), "nothing")
