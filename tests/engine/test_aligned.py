"""Runs with a teacher that reads other tokens than the student, and the identities of CompassOPD in the engine."""

import json
import math

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import opd
from opd.config import build_config
from opd.errors import UserError

PLAIN = {"form": "sampled", "span_reduce": "split"}
BATCH = {"objective": {"updates_per_batch": 2}}
TERMS = {
    "sampled": {"reverse_kl": {"form": "sampled"}},
    "compass": {"compass": {}},
    "shared_topk": {"shared_topk": {"k": 8}},
    "together": {"compass": {"alpha": 0.5}, "shared_topk": {"k": 6}},
}


def trained(recipe, out, metrics_of, **options):
    """(metrics by step, weights) of a run."""
    opd.train(build_config(recipe), out, **options)
    last = max((out / "checkpoints").iterdir(), key=lambda folder: int(folder.name.split("-")[1]))
    return metrics_of(out), AutoModelForCausalLM.from_pretrained(last).state_dict()


def check_same(first, second, names=("loss", "grad_norm", "advantage"), tolerance=1e-6):
    """Two runs are one as far as learning goes."""
    assert len(first[0]) == len(second[0]) > 0
    for one, other in zip(first[0], second[0]):
        for name in names:
            assert one[name] == pytest.approx(other[name], rel=tolerance, abs=tolerance), name
    for name, value in first[1].items():
        torch.testing.assert_close(value, second[1][name], rtol=0, atol=tolerance)


# --- CompassOPD, methods of arXiv 2609.10154: what it must be equal to ---


def test_the_students_start_as_weak_reference_and_alpha_1_is_plain_opd(raw_recipe, tmp_path, metrics_of):
    teacher, student = (raw_recipe()[key] for key in ("teachers", "student"))
    own = {"default": {**teacher["default"], "weak_reference": {"model": student["model"]}}}
    plain = trained(raw_recipe(terms={"reverse_kl": PLAIN}, **BATCH), tmp_path / "plain", metrics_of)
    recipe = raw_recipe(teachers=own, terms={"compass": {"alpha": 1.0}}, **BATCH)
    compass = trained(recipe, tmp_path / "compass", metrics_of)
    check_same(plain, compass)
    assert abs(compass[0][0]["displacement"]) < 1e-2 < abs(compass[0][-1]["displacement"])  # two updates a step: not 0


@pytest.mark.parametrize("rule", ["split", "mean"])
@pytest.mark.parametrize("tokens", ["own", "other"])
def test_beta_1_and_alpha_0_is_plain_opd(raw_recipe, aligned_recipe, tmp_path, metrics_of, rule, tokens):
    base = aligned_recipe if tokens == "other" else raw_recipe
    teachers = base()["teachers"]
    weak = {"weak_reference": teachers["default"].get("weak_reference") or raw_recipe()["student"]}
    recipe = base(teachers={"default": {**teachers["default"], **weak}}, **BATCH)
    plain = {**recipe, "terms": {"reverse_kl": {"form": "sampled", "span_reduce": rule}}}
    compass = {**recipe, "terms": {"compass": {"alpha": 0.0, "beta": 1.0, "span_reduce": rule}}}
    first, second = (trained(one, tmp_path / name, metrics_of) for name, one in (("plain", plain), ("compass", compass)))
    check_same(first, second)


@pytest.mark.parametrize("tokens", ["own", "other"])
def test_a_weak_reference_as_strong_as_the_teacher_teaches_nothing_at_first(
    raw_recipe, aligned_recipe, tmp_path, metrics_of, tokens
):
    base = aligned_recipe if tokens == "other" else raw_recipe
    model = base()["teachers"]["default"]["model"]
    teachers = {"default": {"model": model, "weak_reference": {"model": model}}}
    recipe = base(teachers=teachers, terms={"compass": {"alpha": 0.5}}, steps=1, checkpoint={"every": 1})
    opd.train(build_config(recipe), tmp_path / "run")
    (row,) = metrics_of(tmp_path / "run")
    assert abs(row["loss"]) < 1e-6
    assert row["grad_norm"] < 1e-6
    assert row["advantage"] == pytest.approx(0.0, abs=1e-6)


def unigram(tokenizer, probabilities, folder, micro_model):
    """A model that draws every token alike, with these probabilities (by token; all others next to none)."""
    model = micro_model(0, vocab_size=len(tokenizer) + 8, tie_word_embeddings=False)
    with torch.no_grad():
        model.model.embed_tokens.weight[:] = 1.0
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        logits = torch.full((len(tokenizer) + 8,), -60.0)
        for token, probability in probabilities.items():
            logits[tokenizer.convert_tokens_to_ids(token)] = math.log(probability)
        model.lm_head.weight[:] = logits[:, None] / model.config.hidden_size
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return {"model": str(folder)}


def test_equal_distributions_of_text_cut_in_different_places(
    aligned_recipe, byte_tokenizer, micro_model, tmp_path, metrics_of
):
    """The student draws pairs of characters, the teacher single ones, and every text is as probable to both."""
    pairs, chars = byte_tokenizer("aa ab ba bb", "ab"), byte_tokenizer("", "ab")
    odds = {"a": 0.25, "b": 0.75}
    both = {left + right: odds[left] * odds[right] for left in odds for right in odds}
    student = unigram(pairs, both, tmp_path / "student", micro_model)
    teacher = unigram(chars, odds, tmp_path / "teacher", micro_model)
    prompts = {**aligned_recipe()["prompts"], "path": str(tmp_path / "prompts.jsonl")}
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"problem": "ab"}) + "\n")
    found = {}
    for rule in ("split", "mean"):
        terms = {"reverse_kl": {"form": "sampled", "span_reduce": rule}}
        recipe = aligned_recipe(student=student, teachers={"default": teacher}, prompts=prompts, terms=terms, steps=1)
        opd.train(build_config(recipe), tmp_path / rule)
        (found[rule],) = metrics_of(tmp_path / rule)
        assert found[rule]["align/byte_coverage"] == 1.0
        assert found[rule]["align/one_to_one"] == 0.0
    assert abs(found["split"]["loss"]) < 1e-6
    assert found["split"]["grad_norm"] < 1e-6
    assert found["split"]["reverse_kl_sampled"] == pytest.approx(0.0, abs=1e-6)
    assert found["mean"]["reverse_kl_sampled"] == pytest.approx(0.0, abs=1e-6)  # both rules are reported
    assert found["split"]["reverse_kl_mean"] < -0.3  # half the log-probs: the mean is biased where granularities differ
    assert found["mean"]["grad_norm"] > 1e-3


# --- Whole runs ---


@pytest.mark.parametrize("name", TERMS)
def test_the_student_moves_to_its_teacher(aligned_recipe, tmp_path, metrics_of, name):
    dense = "shared_topk" in TERMS[name]
    optimizer = {"lr": 3e-3 if dense else 1e-2, "schedule": "linear"}
    settings = {"steps": 30, "batch": {"prompts": 8, "rollouts_per_prompt": 2}, "terms": TERMS[name], "optimizer": optimizer}
    heldout = tmp_path / "heldout.jsonl"
    heldout.write_text("".join(json.dumps({"problem": word, "answer": "1"}) + "\n" for word in ("abc", "dab0")))
    prompts = {"path": str(heldout), "columns": {"prompt": "problem"}}
    recipe = aligned_recipe(**settings, eval={"prompts": prompts, "kl_prompts": 2})
    summary = opd.train(build_config(recipe), tmp_path / "run")
    rows = metrics_of(tmp_path / "run")
    assert all(row["align/byte_coverage"] == 1.0 for row in rows)
    assert 0.1 < rows[0]["align/one_to_one"] < 0.9
    assert summary["eval"]["before"]["reverse_kl"] is None  # which is measured on the student's own tokens
    results = [json.loads((tmp_path / "run" / "eval" / f"step-{step}.json").read_text()) for step in (0, 30)]
    assert results[1]["byte_coverage"] == 1.0
    if dense:  # at places where one token stands beside one token
        first, last = (sum(row["reverse_kl_shared"] for row in part) / len(part) for part in (rows[:4], rows[-10:]))
        assert last < (0.9 if name == "together" else 0.7) * first
    else:
        assert results[1]["teacher_logp"] > results[0]["teacher_logp"] + 0.2
    if name == "sampled":
        assert summary["eval"]["after"]["reverse_kl_sampled"] < 0.8 * summary["eval"]["before"]["reverse_kl_sampled"]


def test_each_term_takes_its_own_number_of_likely_tokens(raw_recipe, tmp_path, metrics_of):
    shared, topk = {"shared_topk": {"k": 8, "coef": 0.0}}, {"reverse_kl": {"form": "topk", "k": 2}}
    both, alone = (
        trained(raw_recipe(terms=terms, steps=2), tmp_path / name, metrics_of)
        for name, terms in (("both", {**shared, **topk}), ("alone", topk))
    )
    check_same(both, alone, names=("loss", "grad_norm", "reverse_kl"))
    assert both[0][0]["reverse_kl_shared"] != both[0][0]["reverse_kl"]


def test_sampled_rollouts_show_what_the_teacher_thinks_of_each_token(aligned_recipe, tmp_path):
    recipe = aligned_recipe(steps=1, terms=TERMS["sampled"], trackers={"rollouts_every": 1})
    opd.train(build_config(recipe), tmp_path / "run")
    for row in map(json.loads, (tmp_path / "run" / "rollouts" / "step-1.jsonl").read_text().splitlines()):
        assert len(row["advantages"]) == len(row["sampled_ids"])
        assert all(value is None or math.isfinite(value) for value in row["advantages"])
        assert any(value is not None for value in row["advantages"])


def test_accumulation_does_not_change_the_step(aligned_recipe, tmp_path, metrics_of):
    runs = []
    for name, objective in (("one", {}), ("many", {"micro_batch_tokens": 1, "max_logits_mib": 1})):
        recipe = aligned_recipe(terms=TERMS["together"], objective=objective, steps=3)
        runs.append(trained(recipe, tmp_path / name, metrics_of))
    check_same(runs[0], runs[1], names=("loss", "grad_norm"), tolerance=1e-5)


@pytest.mark.parametrize("lora", [None, {"r": 4}])
def test_resumed_is_uninterrupted(aligned_recipe, tmp_path, metrics_of, lora):
    """The frozen start is the recipe's model, not the checkpoint that the run goes on from."""
    student = {**aligned_recipe()["student"], "lora": lora}
    recipe = aligned_recipe(student=student, terms=TERMS["compass"], checkpoint={"every": 2}, optimizer={"lr": 3e-3})
    opd.train(build_config(recipe), tmp_path / "whole")
    opd.train(build_config({**recipe, "steps": 4}), tmp_path / "parts")
    opd.train(build_config(recipe), tmp_path / "parts", resume=True)
    assert metrics_of(tmp_path / "parts")[4:] == metrics_of(tmp_path / "whole")[4:]
    assert abs(metrics_of(tmp_path / "whole")[-1]["displacement"]) > 1e-4


def test_adapters_off_are_the_frozen_start(aligned_recipe, tmp_path, metrics_of):
    student = {**aligned_recipe()["student"], "lora": {"r": 4}}
    opd.train(build_config(aligned_recipe(student=student, terms=TERMS["compass"], steps=3)), tmp_path / "run")
    rows = metrics_of(tmp_path / "run")
    assert rows[0]["displacement"] == pytest.approx(0.0, abs=1e-6)
    assert abs(rows[-1]["displacement"]) > 1e-4


# --- What cannot work ---


def test_terms_on_the_students_own_tokens_are_refused(aligned_recipe, tmp_path):
    for terms in ({"reverse_kl": {}}, {"reverse_kl": {"form": "topk"}}):
        with pytest.raises(
            UserError, match=r"terms.reverse_kl: teachers.default.model reads with another tokenizer .* terms.compass"
        ):
            opd.train(build_config(aligned_recipe(terms=terms)), tmp_path / "run")


def test_a_weak_reference_of_another_family(aligned_recipe, byte_model, tmp_path, capsys):
    teacher = {**aligned_recipe()["teachers"]["default"], "weak_reference": {"model": byte_model(3, "dc")}}
    with pytest.raises(
        UserError, match=r"teachers.default.weak_reference: it is not of the teacher's family: .*other_family=true"
    ):
        opd.train(build_config(aligned_recipe(teachers={"default": teacher}, terms=TERMS["compass"])), tmp_path / "run")
    recipe = aligned_recipe(teachers={"default": {**teacher, "other_family": True}}, terms=TERMS["compass"], steps=1)
    opd.train(build_config(recipe), tmp_path / "run")
    assert "taken from another family" in capsys.readouterr().err


def test_a_weak_reference_that_no_term_asks_for_is_not_loaded(aligned_recipe, tmp_path, capsys):
    teacher = {**aligned_recipe()["teachers"]["default"], "weak_reference": {"model": "tiny:teacher"}}  # would be built
    opd.train(build_config(aligned_recipe(teachers={"default": teacher}, terms=TERMS["sampled"], steps=1)), tmp_path / "run")
    assert "teachers.default.weak_reference: no term of this recipe uses it" in capsys.readouterr().err


def test_a_step_that_cannot_be_aligned_stops_the_run(aligned_recipe, byte_tokenizer, byte_model, tmp_path):
    other = AutoTokenizer.from_pretrained(byte_model(1, "cd"))
    assert other.encode("a0", add_special_tokens=False)
    blind = byte_tokenizer("cd", "cd0")  # knows neither a nor b, and drops them
    model = AutoModelForCausalLM.from_pretrained(aligned_recipe()["teachers"]["default"]["model"])
    model.save_pretrained(tmp_path / "teacher")
    blind.save_pretrained(tmp_path / "teacher")
    recipe = aligned_recipe(teachers={"default": {"model": str(tmp_path / "teacher")}}, terms=TERMS["sampled"])
    with pytest.raises(
        UserError, match=r"alignment.min_byte_coverage: \d+\.\d% .* less than 90.0%; the first text .* prompt line \d"
    ):
        opd.train(build_config(recipe), tmp_path / "run")
    assert not list((tmp_path / "run").glob("checkpoints/step-*"))
    opd.train(build_config({**recipe, "alignment": {"min_byte_coverage": 0.0}}), tmp_path / "run", resume=True)
