"""Whole runs without a teacher: the student learns from its own start, which is shown the answers."""

import json
import shutil

import numpy as np
import pytest

from opd.config import build_config
from opd.errors import UserError

TEMPLATE = "{prompt}{answer}{prompt}"
FORMS = {
    "full": {},
    "topk": {"form": "topk", "k": 8},
    "sampled": {"form": "sampled", "divergence": "reverse_kl", "advantage_clip": 5.0},
}


@pytest.fixture(scope="module")
def recipe(raw_recipe, tmp_path_factory):
    """`recipe(term, **sections)`: such a run, whose prompts have answers."""
    path = tmp_path_factory.mktemp("answered") / "prompts.jsonl"
    words = ["abc", "de", "fghij", "k", "lmno", "pq", "rst", "uvwxyz"]
    rows = [{"id": word, "problem": word, "answer": str(len(word))} for word in words]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def build(term=None, **sections):
        prompts = {"path": str(path), "columns": {"prompt": "problem"}}
        terms = {"self_distillation": {"template": TEMPLATE, **(term or {})}}
        return raw_recipe(**{"teachers": {}, "prompts": prompts, "terms": terms, "eval": {}, **sections})

    return build


@pytest.mark.parametrize("form", ["full", "topk"])
def test_the_student_moves_to_what_its_start_says_with_the_answer(recipe, train, form):
    rows = train(recipe(FORMS[form], steps=16, batch={"prompts": 8}))
    first, last = (np.mean([row["jsd"] for row in some]) for some in (rows[:3], rows[-3:]))  # each has all eight prompts
    assert last < 0.75 * first
    assert all(row["trained_tokens"] == row["sampled_tokens"] for row in rows)


def test_sampled_tokens_teach_too_and_need_no_teacher_to_be_evaluated(recipe, train, raw_recipe, tmp_path):
    rows = train(recipe(FORMS["sampled"], steps=3, eval=raw_recipe()["eval"]))
    assert all(row["reverse_kl_sampled"] != 0.0 and row["grad_norm"] > 0.0 for row in rows)
    measured = json.loads((tmp_path / "run/summary.json").read_text())["eval"]["after"]
    assert "accuracy" in measured
    assert measured["reverse_kl"] is None


@pytest.mark.parametrize("form", FORMS)
def test_with_adapters_the_start_is_beneath_them(recipe, train, form):
    """At first an adapter changes nothing, so the same is asked and answered as by a student without."""
    plain = recipe(FORMS[form], steps=2)
    adapted = {**plain, "student": {**plain["student"], "lora": {"r": 4, "alpha": 8}}, "optimizer": {"lr": 1e-2}}
    mine, other = train(adapted, "adapted"), train(plain, "plain")
    for name in ("loss", "entropy", "sampled_tokens"):
        assert mine[0][name] == pytest.approx(other[0][name], rel=1e-4, abs=1e-6)
    assert mine[1]["loss"] != other[1]["loss"]


def test_beside_a_teachers_term(recipe, train, raw_recipe):
    both = recipe(steps=2, teachers=raw_recipe()["teachers"])
    both["terms"] = {**both["terms"], "reverse_kl": {"form": "full"}}
    row = train(both)[0]
    assert row["loss"] == pytest.approx(row["jsd"] + row["reverse_kl"], rel=1e-5)


@pytest.mark.parametrize("lookahead", [0, 1])
def test_a_resumed_run_is_the_same(recipe, train, tmp_path, metrics_of, lookahead):
    raw = recipe(steps=5, lookahead=lookahead, checkpoint={"every": 2, "keep": 9})
    whole = train(raw)
    shutil.copytree(tmp_path / "run", tmp_path / "again")
    for step in (4, 5):
        shutil.rmtree(tmp_path / f"again/checkpoints/step-{step}")
    assert train(raw, "again", resume=True) == whole
    ends = [(tmp_path / name / "checkpoints/step-5/model.safetensors").read_bytes() for name in ("run", "again")]
    assert ends[0] == ends[1]


def test_what_does_not_fit_with_its_answer_teaches_nothing(recipe, train):
    template = "{answer}" * 40 + "{prompt}"
    sampling = {"max_new_tokens": 6, "max_context": 42}  # room for a prompt and its rollout, not for forty answers
    for row in train(recipe({"template": template}, steps=2, sampling=sampling)):
        assert row["trained_tokens"] == 0 < row["sampled_tokens"]
        assert (row["empty_updates"], row["loss"]) == (1.0, 0.0)


def test_a_prompt_without_an_answer_stops_the_run_by_name(recipe, train, raw_recipe):
    with pytest.raises(UserError, match=r"^prompts\.columns\.answer: prompt line \d has no answer"):
        train(recipe(prompts=raw_recipe()["prompts"]))


def test_episodes_of_several_turns_are_refused(recipe, echo):
    with pytest.raises(UserError, match=r"terms\.self_distillation: prompts open episodes of several turns"):
        build_config(recipe(prompts={"type": "environment", "name": "echo"}))


def test_a_run_that_trains_nothing_says_so_once(recipe, train, capsys):
    """Where no answer fits beside its prompt."""
    template = "{prompt} {answer}" + "x" * 2000
    rows = train(recipe(terms={"self_distillation": {"template": template}}, steps=2, eval={}))
    assert [row["trained_tokens"] for row in rows] == [0, 0]
    assert [row["answer_too_long"] for row in rows] == [1, 1]
    assert capsys.readouterr().err.count("WARNING: step 1 has trained nothing") == 1
