"""Whole runs in one process: the student moves to its teacher in every form, and the run directory is complete."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import opd
from opd.config import build_config

FORMS = {
    "full": {"form": "full"},
    "forward": {"form": "full", "divergence": "forward_kl"},
    "jsd": {"form": "full", "divergence": "jsd", "beta": 0.4},
    "topk-student": {"form": "topk", "k": 8, "source": "student"},
    "topk-teacher": {"form": "topk", "k": 8, "source": "teacher", "tail": "truncate"},
    "topk-union": {"form": "topk", "k": 6, "source": "union", "tail": "renormalise"},
    "sampled": {"form": "sampled", "advantage_clip": 5.0},
}


@pytest.mark.parametrize(
    "form",
    [pytest.param(form, marks=pytest.mark.slow) if form in ("topk-union", "topk-teacher") else form for form in FORMS],
)
def test_the_student_moves_to_its_teacher(raw_recipe, tmp_path, form):
    steps = 80 if form == "sampled" else 40
    recipe = raw_recipe(steps=steps, terms={"reverse_kl": FORMS[form]}, batch={"prompts": 8, "rollouts_per_prompt": 2})
    summary = opd.train(build_config(recipe), tmp_path / "run")
    before, after = (summary["eval"][when]["reverse_kl"] for when in ("before", "after"))
    assert before > 0.5
    assert after < (0.85 if form == "sampled" else 0.6) * before


@pytest.mark.parametrize("options", [{"updates_per_batch": 2}, {"normalizer": "sequence_mean"}, {"micro_batch_tokens": 1}])
def test_objective_options_train_too(raw_recipe, tmp_path, options):
    recipe = raw_recipe(steps=30, objective=options, terms={"reverse_kl": {"form": "topk", "k": 8}})
    summary = opd.train(build_config(recipe), tmp_path / "run")
    assert summary["eval"]["after"]["reverse_kl"] < 0.8 * summary["eval"]["before"]["reverse_kl"]


@pytest.mark.parametrize("changes", [{"sampling": {"top_p": 0.9}}, {"objective": {"temperature": 0.7}}])
def test_no_advantages_where_student_and_teacher_cannot_be_compared(raw_recipe, tmp_path, changes):
    changes = {name: {**raw_recipe().get(name, {}), **section} for name, section in changes.items()}
    opd.train(build_config(raw_recipe(steps=1, eval={}, trackers={"rollouts_every": 1}, **changes)), tmp_path / "run")
    rows = [json.loads(line) for line in (tmp_path / "run" / "rollouts" / "step-1.jsonl").read_text().splitlines()]
    assert all("tokens" in row and "advantages" not in row for row in rows)


def test_run_directory(raw_recipe, tmp_path):
    run = tmp_path / "run"
    summary = opd.train(build_config(raw_recipe()), run)
    assert json.loads((run / "summary.json").read_text()) == summary
    assert summary["steps"] == 6
    assert summary["sampled_tokens"] == summary["trained_tokens"] > 0
    assert set(summary["eval"]) == {"before", "after"}
    assert {"steps", "wall_s", "sampled_tokens", "trained_tokens", "peak_gib", "eval"} <= set(summary)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert {"loss", "grad_norm", "lr", "reverse_kl", "entropy", "mismatch", "eos_rate", "truncated_rate"} <= set(rows[0])
    assert {"perf/sample_s", "perf/score_s", "perf/update_s", "perf/sync_s", "perf/tokens_per_s"} <= set(rows[0])
    assert all(row["mismatch"] < 1e-5 for row in rows)
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step-4", "step-6"]
    assert sorted(path.name for path in (run / "eval").iterdir()) == ["step-0.json", "step-3.json", "step-6.json"]
    matrix = json.loads((run / "eval" / "step-6.json").read_text())["rows"]
    assert [len(row["verdicts"]) for row in matrix] == [1, 1]
    assert sorted(path.name for path in (run / "rollouts").iterdir()) == ["step-3.jsonl", "step-6.jsonl"]
    assert {"torch", "transformers"} <= set(json.loads((run / "env.json").read_text())["versions"])
    assert opd.load_config(run / "config.yaml") == build_config(raw_recipe())


def test_a_checkpoint_is_a_hugging_face_folder(raw_recipe, tmp_path):
    opd.train(build_config(raw_recipe(steps=2)), tmp_path / "run")
    folder = tmp_path / "run" / "checkpoints" / "step-2"
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert model.dtype == torch.float32
    assert tokenizer.chat_template
    start = AutoModelForCausalLM.from_pretrained(raw_recipe()["student"]["model"])
    moved = [not torch.equal(a, b) for a, b in zip(model.parameters(), start.parameters())]
    assert all(moved)


def test_lora_trains_and_resumes(raw_recipe, tmp_path, metrics_of):
    student = {**raw_recipe()["student"], "lora": {"r": 4, "alpha": 8, "dropout": 0.1}}
    config = build_config(raw_recipe(student=student, optimizer={"lr": 1e-2}))
    opd.train(config, tmp_path / "whole")
    assert (tmp_path / "whole" / "checkpoints" / "step-6" / "adapter_model.safetensors").exists()
    opd.train(build_config(raw_recipe(student=student, optimizer={"lr": 1e-2}, steps=6)), tmp_path / "part")
    for step in ("step-6",):
        for path in sorted((tmp_path / "part" / "checkpoints" / step).rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
    opd.train(config, tmp_path / "part", resume=True)
    assert metrics_of(tmp_path / "part") == metrics_of(tmp_path / "whole")


def test_the_same_seed_gives_the_same_run_and_another_does_not(raw_recipe, tmp_path, metrics_of):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        opd.train(build_config(raw_recipe(seed=seed, steps=2, eval={})), tmp_path / name)
    assert metrics_of(tmp_path / "a") == metrics_of(tmp_path / "b")
    assert metrics_of(tmp_path / "a") != metrics_of(tmp_path / "c")


def test_bfloat16_precision_keeps_a_sampling_copy(raw_recipe, tmp_path):
    recipe = raw_recipe(steps=30, objective={"precision": "bfloat16"}, eval={**raw_recipe()["eval"], "every": 0})
    summary = opd.train(build_config(recipe), tmp_path / "run")
    assert summary["eval"]["after"]["reverse_kl"] < 0.8 * summary["eval"]["before"]["reverse_kl"]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "checkpoints" / "step-30")
    assert model.dtype == torch.float32


def test_student_equal_to_teacher_has_no_loss(raw_recipe, tmp_path):
    for temperature in (0.7, 1.0):
        for form in ("full", "topk-student"):
            same = {"default": {"model": raw_recipe()["student"]["model"]}}
            sampling = {"max_new_tokens": 12, "temperature": temperature}
            recipe = raw_recipe(steps=1, teachers=same, sampling=sampling, terms={"reverse_kl": FORMS[form]}, eval={})
            opd.train(build_config(recipe), tmp_path / f"{form}-{temperature}")
            row = json.loads((tmp_path / f"{form}-{temperature}" / "metrics.jsonl").read_text())
            assert abs(row["loss"]) < 1e-6
            assert row["grad_norm"] < 1e-5


def test_tensorboard_gets_figures_and_rollouts(raw_recipe, tmp_path):
    trackers = {"tensorboard": True, "rollouts_every": 1, "num_rollouts": 1}
    opd.train(build_config(raw_recipe(steps=1, trackers=trackers, eval={})), tmp_path / "run")
    (events,) = (tmp_path / "run" / "tensorboard").iterdir()
    content = events.read_bytes()
    assert b"reverse_kl" in content
    assert b"rollouts/0" in content


@pytest.mark.parametrize(("teacher", "temperature"), [("student", 1.0), ("student", 0.7), ("teacher", 0.7)])
def test_sample_rollouts_carry_the_teachers_view(raw_recipe, tmp_path, teacher, temperature):
    """Each token's advantage is the teacher's log-prob less the student's, at the run's temperature."""
    recipe = raw_recipe(steps=1, eval={}, trackers={"rollouts_every": 1}, terms={"reverse_kl": {"form": "topk", "k": 4}})
    if teacher == "student":
        recipe["teachers"] = {"default": recipe["student"]}
    recipe["sampling"] = {**recipe["sampling"], "temperature": temperature}
    opd.train(build_config(recipe), tmp_path / "run")
    rows = [json.loads(line) for line in (tmp_path / "run" / "rollouts" / "step-1.jsonl").read_text().splitlines()]
    model = AutoModelForCausalLM.from_pretrained(recipe["teachers"]["default"]["model"], dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(recipe["student"]["model"])
    assert len(rows) == 4
    for row in rows:
        context = tokenizer(row["prompt"], add_special_tokens=False, return_tensors="pt").input_ids[0]
        ids = torch.tensor(row["sampled_ids"])
        logits = model(torch.cat([context, ids])[None]).logits[0, len(context) - 1 : -1, : len(tokenizer)]
        logps = (logits / temperature).log_softmax(-1).gather(-1, ids[:, None])[:, 0]
        expected = logps - torch.tensor(row["sampler_logps"])
        assert torch.tensor(row["advantages"]) == pytest.approx(expected.detach(), abs=2e-4)
        if teacher == "student":
            assert max(map(abs, row["advantages"])) < 2e-4
        assert row["tokens"] == [tokenizer.decode([token]) for token in row["sampled_ids"]]
