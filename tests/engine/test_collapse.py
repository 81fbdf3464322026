"""The share of distinct 4-grams of what the student says, in evaluations while training."""

import json

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from opd.config import build_config
from opd.errors import UserError
from opd.eval import collapse

TOKENS = 100


@pytest.fixture(scope="module")
def probed(raw_recipe):
    """`probed(**eval)`: a recipe with the probe, evaluated before, in the middle and at the end."""

    def build(student=None, max_new_tokens=12, **settings):
        raw = raw_recipe(steps=4, sampling={"max_new_tokens": max_new_tokens})
        raw["eval"] |= {"every": 2, "collapse_tokens": TOKENS, "kl_prompts": 0, **settings}
        return raw if student is None else {**raw, "student": {"model": str(student)}}

    return build


@pytest.fixture(scope="module")
def repeating(model_folder):
    """A student that says one letter over and over, whatever it reads."""
    folder = model_folder(0)
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.lm_head.weight.zero_()
        model.model.norm.weight.zero_()
        model.model.norm.weight[0] = 1.0
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight[:] = 0.0
        model.model.embed_tokens.weight[:, 0] = 1.0
        model.lm_head.weight[7, 0] = 10.0
    model.save_pretrained(folder)
    return folder


def evaluations(run):
    return [json.loads((run / "eval" / f"step-{step}.json").read_text()) for step in (0, 2, 4)]


def test_one_that_repeats_itself_is_told_from_one_that_does_not(probed, repeating, train, tmp_path, capsys):
    train(probed(), "random")
    train({**probed(repeating), "optimizer": {"lr": 0.0}}, "repeating")
    random, same = evaluations(tmp_path / "random"), evaluations(tmp_path / "repeating")
    assert all(0.9 < one["distinct_4grams"] <= 1.0 for one in random)
    summary = json.loads((tmp_path / "random" / "summary.json").read_text())["eval"]
    assert [summary[when]["distinct_4grams"] for when in ("before", "after")] == [
        random[place]["distinct_4grams"] for place in (0, 2)
    ]
    assert {one["distinct_4grams"] for one in same} == {same[0]["distinct_4grams"]}
    assert same[0]["distinct_4grams"] < 0.05
    stated = random[0]["settings"]
    assert (stated["samples"], stated["collapse_tokens"], stated["collapse_prompts"]) == (1, TOKENS, 32)
    assert ", distinct 4-grams " in capsys.readouterr().err


def test_exactly_so_many_tokens_count_at_every_evaluation(probed, train, tmp_path, monkeypatch):
    counted, real = [], collapse.distinct_ngrams

    def counting(sequences, n, num_tokens):
        found = real(sequences, n, num_tokens)
        counted.append((num_tokens, sum(map(len, sequences)), found))
        return found

    monkeypatch.setattr(collapse, "distinct_ngrams", counting)
    train(probed(collapse_tokens=60))
    whole = [found for *_, found in counted if not np.isnan(found)]
    assert {num for num, *_ in counted} == {60}
    assert len(whole) == 3
    assert all(np.isnan(found) for _, size, found in counted if size < 60)
    assert whole == [one["distinct_4grams"] for one in evaluations(tmp_path / "run")]


def test_the_seeds_are_the_same_at_every_evaluation_and_differ_between_rounds(probed, train, tmp_path, monkeypatch):
    said, real = [], collapse.distinct_ngrams

    def keeping(sequences, *rest):
        said.append(list(sequences))
        return real(sequences, *rest)

    monkeypatch.setattr(collapse, "distinct_ngrams", keeping)
    train({**probed(collapse_tokens=60), "optimizer": {"lr": 0.0}})
    third = len(said) // 3
    assert said[:third] == said[third : 2 * third] == said[2 * third :]
    last = [tuple(one) for one in said[third - 1]]
    assert len(set(last)) == len(last) > 2


def test_one_that_has_fallen_silent_gives_null_and_a_note(probed, train, tmp_path, capsys):
    train(probed(max_new_tokens=3))
    for one in evaluations(tmp_path / "run"):
        assert one["distinct_4grams"] is None
        (note,) = [note for note in one["notes"] if note.startswith("distinct 4-grams")]
        assert f"8 answers to each of the first 2 problems hold fewer than {TOKENS} tokens" in note
    assert capsys.readouterr().err.count(", distinct 4-grams unknown") == 3
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())["eval"]
    assert summary["after"]["distinct_4grams"] is None


def test_training_and_the_other_figures_do_not_change(probed, train, tmp_path):
    plain, with_probe = train(probed(collapse_tokens=0), "plain"), train(probed(), "probe")
    assert plain == with_probe
    mine = {"distinct_4grams", "settings", "notes"}
    for one, two in zip(evaluations(tmp_path / "plain"), evaluations(tmp_path / "probe"), strict=True):
        assert "distinct_4grams" not in one
        names = {name for name in two if name not in mine and not name.startswith("perf/")}
        assert {name: one[name] for name in names} == {name: two[name] for name in names}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"prompts": None}, r"^eval\.collapse_tokens needs eval\.prompts"),
        ({"collapse_tokens": 3}, r"^eval\.collapse_tokens is 3: 4-grams need at least 4"),
        ({"collapse_tokens": -1}, r"^eval\.collapse_tokens is -1: it must be 0 or more"),
        ({"collapse_prompts": 0}, r"^eval\.collapse_prompts is 0: it must be at least 1"),
        (
            {"collapse_tokens": 0, "collapse_prompts": 8},
            r"^eval\.collapse_prompts: has no effect without eval\.collapse_tokens",
        ),
        (
            {"collapse_tokens": 193, "collapse_prompts": 2},
            r"^eval\.collapse_tokens is 193, but eval\.collapse_prompts=2 problems answered 8 times with "
            r"sampling\.max_new_tokens=12 give at most 192;",
        ),
    ],
)
def test_refusals(probed, settings, said):
    with pytest.raises(UserError, match=said):
        build_config(probed(**settings))


def test_greedy_answers_are_refused(probed):
    """They are the same in every round."""
    greedy = {"sampling": {"temperature": 0.0}, "objective": {"temperature": 1.0}}
    with pytest.raises(UserError, match=r"^eval\.collapse_tokens repeats the same greedy answers: set sampling"):
        build_config({**probed(), **greedy})
    build_config({**probed(collapse_tokens=0), **greedy})


def test_tokens_that_just_fit_are_taken(probed):
    assert build_config(probed(collapse_tokens=192, collapse_prompts=2)).eval.collapse_tokens == 192
