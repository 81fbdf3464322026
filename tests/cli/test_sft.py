"""`opd sft` on a micro model."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
from omegaconf import OmegaConf
from safetensors.torch import load_file

from opd.cli import main
from opd.recipes import shipped_sft

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] }}"
    "{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)


@pytest.fixture(scope="module")
def folder(model_folder, tmp_path_factory):
    copy = tmp_path_factory.mktemp("student") / "micro"
    shutil.copytree(model_folder(0), copy)
    (copy / "chat_template.jinja").write_text(TEMPLATE)
    return copy


@pytest.fixture
def recipe(folder, tmp_path):
    rows = [{"prompt": "abcdefgh"[:n], "completion": "hgfedcba"[:n]} for n in range(1, 9)]
    data = tmp_path / "answers.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "student": {"model": str(folder)},
        "dataset": {"path": str(data)},
        "batch": 2,
        "epochs": 1.0,
        "max_tokens": 64,
        "optimizer": {"lr": 1e-3},
        "checkpoint": {"every": 1},
    }


@pytest.fixture
def call(monkeypatch, capsys, tmp_path):
    """`call(recipe, *arguments)`: (exit code, stdout, error lines) of `opd sft`."""

    def run(recipe, *arguments):
        path = tmp_path / "recipe.yaml"
        path.write_text(OmegaConf.to_yaml(OmegaConf.create(recipe)))
        monkeypatch.setattr(sys, "argv", ["opd", "sft", str(path), "--out", str(tmp_path / "run"), *arguments])
        with pytest.raises(SystemExit) as end:
            main()
        out, err = capsys.readouterr()
        return end.value.code or 0, out, [line for line in err.splitlines() if line.startswith("error")]

    return run


def test_prints_the_summary_and_is_never_overwritten_by_accident(call, recipe, tmp_path):
    code, out, errors = call(recipe)
    assert (code, errors) == (0, [])
    assert json.loads(out)["steps"] == 4
    before = load_file(tmp_path / "run" / "final" / "model.safetensors")
    code, _, errors = call(recipe)
    assert code == 2
    assert "--resume" in errors[0]
    code, _, errors = call(recipe, "optimizer.lr=0.1", "--resume")
    assert code == 2
    assert errors[0].startswith("error: optimizer.lr: the run in")
    assert call(recipe, "checkpoint.every=2", "micro_batch_tokens=99", "--resume")[0] == 0
    after = load_file(tmp_path / "run" / "final" / "model.safetensors")
    assert all((before[name] == after[name]).all() for name in before)
    code, out, _ = call(recipe, "steps=1", "--overwrite")
    assert json.loads(out)["steps"] == 1


def test_dry_run_touches_nothing(call, recipe, tmp_path):
    with (tmp_path / "answers.jsonl").open("r+") as data:
        rows = [json.loads(line) for line in data]
        data.seek(0)
        data.writelines(
            json.dumps({**row, "completion": row["completion"] if n else " "}) + "\n" for n, row in enumerate(rows)
        )
    code, out, _ = call(recipe, "dataset.limit=7", "--dry-run")
    assert code == 0
    assert "# 7 rows, 1 with an empty answer" in out
    assert "# at most 3 updates of 2 examples" in out
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("dry_run", [("--dry-run",), ()])
@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("", "dataset.path: DATA holds no rows"),
        ('{"prompt": "a"}\n', "dataset.columns: line 1 has neither"),
        ('{"prompt": "a", "completion": ""}\n', "dataset.path: "),
    ],
)
def test_data_without_answers(call, recipe, tmp_path, lines, expected, dry_run):
    (tmp_path / "answers.jsonl").write_text(lines)
    code, _, (error,) = call(recipe, *dry_run)
    assert code == 2
    assert error.startswith("error: " + expected.replace("DATA", str(tmp_path / "answers.jsonl")))
    assert not (tmp_path / "run").exists()


def test_values_are_checked_before_a_run_is_replaced(call, recipe, tmp_path):
    assert call(recipe, "steps=1")[0] == 0
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    for value in ("optimizer.lr=.nan", "optimizer.betas=[2,3]", "optimizer.weight_decay=-5", "seed=99999999999999"):
        code, _, errors = call(recipe, value, "--overwrite")
        assert (code, len(errors)) == (2, 1)
        assert errors[0].startswith(f"error: {value.partition('=')[0]} is ")
    assert {path: path.read_bytes() for path in before} == before


def test_a_killed_run_resumes_to_the_same_model(call, recipe, tmp_path):
    recipe, out = {**recipe, "epochs": 10.0}, tmp_path / "run"
    assert call(recipe)[0] == 0
    out.rename(tmp_path / "whole")
    command = [sys.executable, "-m", "opd", "sft", str(tmp_path / "recipe.yaml"), "--out", str(out)]
    killed = subprocess.Popen(command, env=os.environ, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    metrics = out / "metrics.jsonl"
    while not (metrics.exists() and len(metrics.read_bytes().splitlines()) > 5):
        assert killed.poll() is None
        time.sleep(0.005)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert not (out / "final").exists()
    for step in range(1, 41):  # as if killed while it wrote a checkpoint, whichever comes next
        (out / ".saving" / f"checkpoint-{step}" / "trainer").mkdir(parents=True, exist_ok=True)
    assert call(recipe, "--resume")[0] == 0
    whole, resumed = ((folder / "final" / "model.safetensors").read_bytes() for folder in (tmp_path / "whole", out))
    assert whole == resumed


def test_ls_names_each_with_its_purpose(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["opd", "ls", "sft"])
    with pytest.raises(SystemExit):
        main()
    listed = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert listed == dict(shipped_sft())
    assert {"sft/quickstart", "sft/compass"} <= listed.keys()


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("student.model", "./nowhere", "student.model: no such folder"),
        ("dataset.path", "missing.jsonl", "dataset.path: no such file"),
        ("dataset.columns", {"prompt": "question"}, "line 1 has neither 'question' with 'completion'"),
        ("max_tokens", 4, "no example is left"),
        ("dataset.template", "no place", "{prompt}"),
        ("student.lora", {"target_modules": "nothing"}, "student.lora.target_modules"),
        ("batches", 3, "unknown key 'batches'"),
    ],
)
def test_bad_input(call, recipe, tmp_path, key, value, expected):
    spoilt = OmegaConf.create(recipe)
    OmegaConf.update(spoilt, key, value, force_add=True)
    code, _, errors = call(OmegaConf.to_container(spoilt))
    assert code == 2
    assert len(errors) == 1
    assert expected in errors[0]
    assert not (tmp_path / "run").exists()


def test_resume_and_overwrite_exclude_each_other(call, recipe):
    assert "exclude each other" in call(recipe, "--resume", "--overwrite")[2][0]
