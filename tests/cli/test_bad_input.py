"""Bad input: one line that names the field and the fix, exit code 2, nothing written or lost."""

import json
import sys

import pytest
from omegaconf import OmegaConf

from opd.cli import main


@pytest.fixture(scope="module")
def folder(model_folder):
    return model_folder(0)


@pytest.fixture
def recipe(folder, tmp_path):
    """A recipe of two steps on micro models, as a mapping that a test may spoil."""
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"problem": word}) + "\n" for word in ("abc", "de", "fgh")))
    return {
        "steps": 2,
        "student": {"model": str(folder)},
        "teachers": {"default": {"model": str(folder)}},
        "prompts": {"path": str(tmp_path / "prompts.jsonl"), "columns": {"prompt": "problem"}},
        "batch": {"prompts": 2},
        "sampling": {"max_new_tokens": 4},
        "terms": {"reverse_kl": {}},
    }


@pytest.fixture
def opd(monkeypatch, capsys, tmp_path):
    """`opd(recipe, *arguments)`: (exit code, lines on stderr) of `opd train`."""

    def call(recipe, *arguments):
        path = tmp_path / "recipe.yaml"
        path.write_text(OmegaConf.to_yaml(OmegaConf.create(recipe)))
        monkeypatch.setattr(sys, "argv", ["opd", "train", str(path), "--out", str(tmp_path / "run"), *arguments])
        with pytest.raises(SystemExit) as end:
            main()
        return end.value.code or 0, [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]

    return call


def spoil(recipe, key, value):
    """`recipe` with the dotted `key` set to `value`."""
    changed = OmegaConf.create(recipe)
    OmegaConf.update(changed, key, value)
    return OmegaConf.to_container(changed)


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("student.model", "no/such/folder", "student.model: no such folder"),
        ("teachers.default.model", "./nowhere", "teachers.default.model: no such folder"),
        ("student.model", "tiny:studnt", "tiny:student"),
        ("prompts.path", "missing.jsonl", "prompts.path: no such file"),
        (
            "prompts.columns.prompt",
            "probelm",
            "prompts.columns.prompt: line 1 has no column 'probelm'; did you mean 'problem'",
        ),
        ("optimizer.learning_rate", 1, "unknown key 'optimizer.learning_rate'"),
        ("terms.reverse_kl.from", "full", "unknown key 'terms.reverse_kl.from'; did you mean 'form'"),
        ("terms.reversekl", {}, "no term maker is called 'reversekl'; did you mean 'reverse_kl'"),
        ("optimizer.lr", "fast", "optimizer.lr"),
        ("steps", 0, "steps is 0"),
        ("sampling.max_context", 2, "every prompt of the first steps is longer than the context"),
        ("eval.prompts.path", "nope.jsonl", "eval.prompts.path: no such file"),
    ],
)
def test_one_line_and_exit_code_2(opd, recipe, key, value, expected):
    code, errors = opd(spoil(recipe, key, value))
    assert code == 2
    assert len(errors) == 1
    assert expected in errors[0]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "holds no prompts"),
        (b'{"problem": "a"}\n{"problem": \n', "line 2"),
        (b'{"problem": "a"}\n\n[1]\n', "line 3"),
        (b'{"problem": ""}\n', "line 1 needs non-empty text"),
        (b"\xff\xfe\n", "line 1"),
    ],
)
def test_a_broken_prompts_file_names_the_line(opd, recipe, tmp_path, content, expected):
    (tmp_path / "prompts.jsonl").write_bytes(content)
    code, errors = opd(recipe)
    assert code == 2
    assert "prompts.path" in errors[0] or "prompts.columns" in errors[0]
    assert expected in errors[0]


def test_a_directory_in_use_is_left_alone(opd, recipe, tmp_path):
    assert opd(recipe)[0] == 0
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    code, errors = opd(recipe)
    assert code == 2
    assert "--resume" in errors[0]
    assert "--overwrite" in errors[0]
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before
    code, errors = opd(spoil(recipe, "optimizer.lr", 0.5), "--resume")
    assert code == 2
    assert "optimizer.lr" in errors[0]
    assert opd(recipe, "--overwrite")[0] == 0


def test_a_folder_that_holds_something_else_is_never_overwritten(opd, recipe, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").write_text("years of work")
    code, errors = opd(recipe, "--overwrite")
    assert code == 2
    assert "no run's" in errors[0]
    assert (tmp_path / "run" / "thesis.tex").read_text() == "years of work"


def test_other_tokenizers_point_to_alignment(opd, recipe, micro_tokenizer, micro_model, tmp_path):
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    raw = json.loads(micro_tokenizer.backend_tokenizer.to_str())
    words = raw["model"]["vocab"]
    words["a"], words["b"] = words["b"], words["a"]
    other = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(raw)), eos_token="<eos>")
    micro_model(1).save_pretrained(tmp_path / "teacher")
    other.save_pretrained(tmp_path / "teacher")
    code, errors = opd(spoil(recipe, "teachers.default.model", str(tmp_path / "teacher")))
    assert code == 2
    assert "teachers.default.model reads with another tokenizer than the student" in errors[0]


def test_long_prompts_are_skipped_and_counted(opd, recipe, tmp_path):
    rows = [{"problem": "a" * 40}, {"problem": "ab"}]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert opd(spoil(recipe, "sampling.max_context", 30)) == (0, [])
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["skipped_prompts"] for row in metrics] == [1, 1]
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["skipped_prompts"] == 2


def test_dry_run_writes_nothing(opd, recipe, tmp_path):
    assert opd(recipe, "--dry-run") == (0, [])
    assert not (tmp_path / "run").exists()


def test_divergence_stops_the_run_and_keeps_the_last_checkpoint(opd, recipe, tmp_path, model_folder):
    recipe = spoil(recipe, "teachers.default.model", str(model_folder(1)))
    spoiled = spoil(spoil(recipe, "optimizer.lr", 1e30), "steps", 12)
    spoiled = spoil(spoil(spoiled, "checkpoint.every", 1), "optimizer.max_grad_norm", 0.0)
    code, errors = opd(spoiled)
    assert code == 2
    assert "not finite" in errors[0]
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert metrics[-1]["nonfinite_updates"] == 1
    assert list((tmp_path / "run" / "checkpoints").glob("step-*/trainer/state.json"))


def test_overwrite_keeps_the_old_run_until_the_new_one_is_loaded(opd, recipe, tmp_path, model_folder):
    assert opd(recipe)[0] == 0
    before = sorted(path.relative_to(tmp_path) for path in (tmp_path / "run").rglob("*"))
    broken = model_folder(3)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    code, errors = opd(spoil(recipe, "student.model", str(broken)), "--overwrite")
    assert code == 2
    assert "student.model" in errors[0]
    assert sorted(path.relative_to(tmp_path) for path in (tmp_path / "run").rglob("*")) == before


def test_a_failed_start_does_not_stand_in_the_way(opd, recipe, tmp_path):
    good = (tmp_path / "prompts.jsonl").read_bytes()
    (tmp_path / "prompts.jsonl").write_bytes(b"{")
    assert opd(recipe)[0] == 2
    (tmp_path / "prompts.jsonl").write_bytes(good)
    assert opd(recipe)[0] == 0


def test_weights_that_are_missing_or_damaged_are_refused(opd, recipe, model_folder):
    from safetensors.torch import load_file, save_file

    folder = model_folder(4)
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in tensors if "mlp" in name)
    save_file({n: t for n, t in tensors.items() if n != name}, folder / "model.safetensors", metadata={"format": "pt"})
    code, errors = opd(spoil(recipe, "teachers.default.model", str(folder)))
    assert code == 2
    assert f"lacks 1 weights, such as {name}" in errors[0]
    tensors[name][:] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    code, errors = opd(spoil(recipe, "teachers.default.model", str(folder)))
    assert code == 2
    assert "not finite" in errors[0]


def test_two_runs_cannot_share_a_directory(opd, recipe, tmp_path):
    from filelock import FileLock

    with FileLock(tmp_path / ".run.lock"):
        code, errors = opd(recipe)
    assert code == 2
    assert "another process is writing" in errors[0]


def test_a_teacher_with_a_shorter_context_is_refused(opd, recipe, model_folder):
    code, errors = opd(spoil(recipe, "teachers.default.model", str(model_folder(5, max_position_embeddings=64))))
    assert code == 2
    assert "set sampling.max_context=64" in errors[0]


def test_messages_that_do_not_fit_the_template_are_named(opd, recipe, tmp_path):
    rows = [{"id": "odd", "problem": [{"role": "user", "content": None}]}]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, errors = opd(recipe)
    assert code == 2
    assert "odd does not fit the chat template" in errors[0]


@pytest.mark.parametrize("content", ["{}", "[]", "{"])
def test_a_damaged_checkpoint_is_named(opd, recipe, tmp_path, content):
    assert opd(recipe)[0] == 0
    (tmp_path / "run" / "checkpoints" / "step-2" / "trainer" / "state.json").write_text(content)
    code, errors = opd(recipe, "--resume")
    assert code == 2
    assert "not a whole checkpoint" in errors[0]
