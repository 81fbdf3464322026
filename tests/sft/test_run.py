"""Whole runs on a micro model: what is learnt, that packing changes nothing, resuming, adapters, and what is left behind."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from omegaconf import OmegaConf
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from opd.errors import UserError
from opd.models import load_causal_lm
from opd.records import Prompt
from opd.sft.examples import Example
from opd.sft.run import fine_tune, select
from opd.sft.trainer import SftTrainer

LORA = {"r": 4, "alpha": 8, "dropout": 0.1}


def metrics(run):
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if not name.startswith("perf/")} for row in rows]


def weights(folder):
    return load_file(folder / "model.safetensors")


def assert_close(one, other, tolerance):
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=0, atol=tolerance)


@pytest.fixture(scope="module")
def whole(sft_config, tmp_path_factory):
    """(directory, summary) of the plain run."""
    out = tmp_path_factory.mktemp("runs") / "whole"
    return out, fine_tune(sft_config(), out)


def test_directory_and_summary(whole, student_folder):
    out, summary = whole
    rows = metrics(out)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert rows[-1]["epoch"] == 2
    assert summary == json.loads((out / "summary.json").read_text())
    assert (summary["steps"], summary["num_examples"], summary["loss"]) == (6, 8, rows[-1]["loss"])
    assert summary["trained_tokens"] == sum(row["trained_tokens"] for row in rows) == 2 * 34  # letters and an EOS each
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == ["step-4", "step-6"]
    files = {path.name for path in out.iterdir()}
    assert files == {"checkpoints", "final", "data.json", "env.json", "metrics.jsonl", "sft.yaml", "summary.json"}
    assert "trainer" not in {path.name for path in (out / "final").iterdir()}
    assert not list(out.rglob("*.bin"))
    for name in ("config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja"):
        before, after = ((folder / name).read_text() for folder in (student_folder, out / "final"))
        assert before == after
    load_causal_lm(str(out / "final"), "student.model")
    assert_close(weights(out / "final"), weights(out / "checkpoints" / "step-6"), 0)


def test_tensorboard_keeps_its_events(sft_config, tmp_path):
    fine_tune(sft_config(report_to=["tensorboard"], checkpoint={"every": 1}, steps=2), tmp_path / "run")
    (events,) = (tmp_path / "run" / "tensorboard").iterdir()
    assert b"train/loss" in events.read_bytes()


def test_card_names_no_path(whole, student_folder):
    card = (whole[0] / "final" / "README.md").read_text()
    assert "after step 6 of 6" in card
    assert "8 answers of `answers.jsonl`" in card
    assert str(student_folder.parent) not in card


def test_learning_rates(whole):
    """Warm-up of 0.2 * 6 = 1.2, so 2 updates, from 0; then a cosine to 0 after the sixth."""
    rates = [row["lr"] for row in metrics(whole[0])]
    cosine = [3e-3 * (1 + math.cos(math.pi * i / 4)) / 2 for i in range(4)]
    assert rates == pytest.approx([0, 1.5e-3, *cosine])


def test_first_loss_is_the_mean_over_the_trained_tokens(sft_config, student_tokenizer, student_folder, tmp_path):
    """All eight examples in one update, in four pieces; the reference is the saved model, one example at a time."""
    out = tmp_path / "one"
    fine_tune(sft_config(batch=8, epochs=1, micro_batch_tokens=24), out)
    model = AutoModelForCausalLM.from_pretrained(student_folder)
    total, count = torch.zeros(()), 0
    for row in map(json.loads, Path(sft_config().dataset.path).read_text().splitlines()):
        asked, said = (row[name][0]["content"] for name in ("prompt", "completion"))
        ids = student_tokenizer(f"<bos><user>{asked}<assistant>{said}<eos>", add_special_tokens=False)["input_ids"]
        n = len(said) + 1
        logits = model(input_ids=torch.tensor([ids])).logits[0, -n - 1 : -1]
        total, count = total + F.cross_entropy(logits, torch.tensor(ids[-n:]), reduction="sum"), count + n
    (total / count).backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    (row,) = metrics(out)
    assert row["loss"] == pytest.approx(float(total.detach()) / count, rel=1e-5)
    assert row["grad_norm"] == pytest.approx(float(norm), rel=1e-4)
    assert row["trained_tokens"] == count


@pytest.mark.parametrize("sections", [{"packing": False}, {"micro_batch_tokens": 20, "max_logits_mib": 1}])
def test_packing_changes_nothing(whole, sft_config, tmp_path, sections):
    fine_tune(sft_config(**sections), tmp_path / "other")
    for ours, theirs in zip(metrics(tmp_path / "other"), metrics(whole[0])):
        assert ours == pytest.approx(theirs, rel=1e-4)
    assert_close(weights(tmp_path / "other" / "final"), weights(whole[0] / "final"), 1e-4)


class Killed(BaseException):
    pass


@pytest.mark.parametrize(("student", "at"), [({}, 1), ({}, 3), ({}, 5), ({"lora": LORA}, 5)])
def test_resumed_equals_uninterrupted(sft_config, student_folder, tmp_path, monkeypatch, student, at):
    """Killed in update 2, 4 or 6: before any checkpoint, at an epoch's start, and within an epoch. Adapters have dropout."""
    config = sft_config(student={"model": str(student_folder), **student})
    fine_tune(config, tmp_path / "whole")
    step = SftTrainer.training_step

    def interrupted(self, *arguments):
        if self.state.global_step == at:
            raise Killed
        return step(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(SftTrainer, "training_step", interrupted)
        with pytest.raises(Killed):
            fine_tune(config, tmp_path / "killed")
    fine_tune(config, tmp_path / "killed", resume=True)
    assert metrics(tmp_path / "killed") == metrics(tmp_path / "whole")
    assert_close(weights(tmp_path / "killed" / "final"), weights(tmp_path / "whole" / "final"), 0)


def test_a_kill_while_saving_leaves_the_checkpoint_before(sft_config, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        save = SftTrainer._save_rng_state

        def killed(self, folder):
            if self.state.global_step == 4:
                raise Killed
            save(self, folder)

        patch.setattr(SftTrainer, "_save_rng_state", killed)
        with pytest.raises(Killed):
            fine_tune(sft_config(), tmp_path / "run")
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-2"]
    fine_tune(sft_config(), tmp_path / "run", resume=True)
    assert [row["step"] for row in metrics(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]
    assert not (tmp_path / "run" / ".saving").exists()


def test_a_finished_run_resumes_to_itself(sft_config, tmp_path):
    fine_tune(sft_config(), tmp_path / "run")
    before = {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file() and p.name != "env.json"}
    fine_tune(sft_config(), tmp_path / "run", resume=True)
    assert {p: p.read_bytes() for p in before} == before


def test_a_run_does_not_go_on_with_other_answers(sft_config, answers_file, tmp_path):
    (tmp_path / "answers.jsonl").write_text(answers_file.read_text())
    config = sft_config(dataset={"path": str(tmp_path / "answers.jsonl")})
    fine_tune(config, tmp_path / "run")
    (tmp_path / "answers.jsonl").write_text(answers_file.read_text().replace("cba", "cab"))
    with pytest.raises(UserError, match="began with other answers"):
        fine_tune(config, tmp_path / "run", resume=True)


def test_only_adapters_are_trained_and_final_holds_them_merged(sft_config, student_folder, tmp_path):
    student = {"model": str(student_folder), "lora": {"r": 4, "alpha": 8}}
    fine_tune(sft_config(student=student), tmp_path / "run")
    checkpoint = tmp_path / "run" / "checkpoints" / "step-6"
    assert (checkpoint / "adapter_model.safetensors").is_file()
    assert not (checkpoint / "model.safetensors").exists()
    before, after = weights(student_folder), weights(tmp_path / "run" / "final")
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if "proj" in name}
    load_causal_lm(str(tmp_path / "run" / "final"), "student.model")
    rows = metrics(tmp_path / "run")
    assert rows[-1]["loss"] < rows[0]["loss"]


def test_bfloat16_and_gradient_checkpointing(whole, sft_config, student_folder, tmp_path):
    student = {"model": str(student_folder), "gradient_checkpointing": True}
    fine_tune(sft_config(student=student, precision="bfloat16"), tmp_path / "run")
    assert weights(tmp_path / "run" / "final")["model.norm.weight"].dtype == torch.float32
    for ours, theirs in zip(metrics(tmp_path / "run"), metrics(whole[0])):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=0.03)
        assert ours["loss"] != theirs["loss"]


def test_longer_and_ambiguous_examples_are_counted_not_cut(student_tokenizer):
    said = [{"content": text} for text in ("a" * 3, "a" * 4, "b<eos>", " ")]
    said += [
        {"content": "a", "tool_calls": [{"name": "f"}]},
        {"content": "", "reasoning_content": "a"},
    ]  # not in the template
    asked = Prompt("1", ({"role": "user", "content": "q"},))
    examples = [Example(asked, {"role": "assistant", **answer}) for answer in said]
    kept, counts = select(examples, student_tokenizer, (2,), 8)
    assert [len(example.ids) for example in kept] == [8]  # <bos><user>q<assistant>aaa<eos>
    assert (counts["num_examples"], counts["num_too_long"], counts["num_with_special_tokens"]) == (1, 1, 1)
    assert (counts["num_empty"], counts["num_tool_calls_dropped"]) == (2, 1)
    with pytest.raises(UserError, match=r"no example is left: 2 too long, 1 with a special token .* is 7"):
        select(examples, student_tokenizer, (2,), 7)


def test_a_loss_that_is_not_finite_ends_the_run(sft_config, tmp_path):
    with pytest.raises(UserError, match="not finite at step"):
        fine_tune(sft_config(optimizer={"lr": 1e30, "max_grad_norm": 0.0}), tmp_path / "run")


@pytest.mark.parametrize("resume", [False, True])
def test_a_run_that_failed_before_its_first_update_may_begin_anew(sft_config, tmp_path, monkeypatch, resume):
    def failing(*arguments):
        raise UserError("the loss is not finite at step 1")

    with monkeypatch.context() as patch:
        patch.setattr(SftTrainer, "training_step", failing)
        with pytest.raises(UserError, match="at step 1"):
            fine_tune(sft_config(steps=2), tmp_path / "run")
    assert fine_tune(sft_config(steps=1), tmp_path / "run", resume=resume)["steps"] == 1
    with pytest.raises(UserError, match="holds a run"):
        fine_tune(sft_config(steps=1), tmp_path / "run")


@pytest.mark.slow
def test_two_processes_make_the_same_updates(raw_sft, tmp_path):
    """Two examples of a batch of four for each, in pieces of different number."""
    path, found = tmp_path / "recipe.yaml", []
    path.write_text(OmegaConf.to_yaml(OmegaConf.create(raw_sft(batch=4, micro_batch_tokens=20))))
    for world in (1, 2):
        command = [sys.executable, "-m", "opd", "sft", str(path), "--out", str(tmp_path / str(world))]
        names = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29571"} if world > 1 else {}
        ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank), **names} if names else {} for rank in range(world)]
        running = [subprocess.Popen(command, env=os.environ | rank, stdout=subprocess.DEVNULL) for rank in ranks]
        assert [process.wait() for process in running] == [0] * world
        found.append(metrics(tmp_path / str(world)))
    for one, two in zip(*found):
        assert two == pytest.approx(one, rel=1e-4)
    assert_close(weights(tmp_path / "1" / "final"), weights(tmp_path / "2" / "final"), 1e-5)


@pytest.mark.parametrize("steps", [1, 50])
def test_a_deletion_that_shortens_nothing_says_so(sft_config, raw_sft, answers_file, tmp_path, capsys, steps):
    rows = [json.loads(line) for line in answers_file.read_text().splitlines()]
    rows[0]["completion"][0]["content"] = "a\n\nb\n\nc"
    (tmp_path / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    dataset = {"path": str(tmp_path / "answers.jsonl"), "delete_steps": {"steps": steps}}
    fine_tune(sft_config(dataset=dataset, steps=1), tmp_path / "run")
    said = [line for line in capsys.readouterr().err.splitlines() if "delete_steps" in line]
    if steps == 1:
        assert said == ["note: steps of 1 of 8 answers are deleted (dataset.delete_steps)"]
    else:
        (line,) = said
        assert line.startswith("WARNING: dataset.delete_steps shortens none of 8 answers: none has more than 100 steps")
        assert "lower dataset.delete_steps.steps" in line
