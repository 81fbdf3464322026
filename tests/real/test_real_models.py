"""Real checkpoints: `OPD_REAL_MODELS` names a folder with `smollm2`, `qwen05` and `qwen15`."""

import json
import os
from pathlib import Path

import pytest

import opd
from opd.config import build_config

FOLDER = Path(os.environ.get("OPD_REAL_MODELS", Path.home() / ".cache" / "opd-real-models"))
PROBLEMS = ["What is 12 + 30?", "Tom has 3 apples and buys 5 more. How many has he?", "Name the capital of France."]

pytestmark = [pytest.mark.real, pytest.mark.timeout(1800)]


@pytest.fixture
def recipe(tmp_path):
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"problem": text}) + "\n" for text in PROBLEMS))

    def build(student, teacher, **sections):
        models = {
            "student": {"model": str(FOLDER / student)},
            "teachers": {"default": {"model": str(FOLDER / teacher)}},
        }
        common = {
            "steps": 2,
            "prompts": {"path": str(tmp_path / "prompts.jsonl"), "columns": {"prompt": "problem"}},
            "batch": {"prompts": 3},
            "sampling": {"max_new_tokens": 16},
            "terms": {"reverse_kl": {"form": "full"}},
            "objective": {"precision": "bfloat16"},
            "optimizer": {"lr": 1e-6},
        }
        return build_config({**common, **models, **sections})

    return build


def rows_of(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_model_is_its_own_teacher_at_every_temperature(recipe, tmp_path):
    for temperature in (0.7, 1.0):
        sections = {
            "objective": {"precision": "float32"},
            "sampling": {"max_new_tokens": 16, "temperature": temperature},
        }
        teachers = {"default": {"model": str(FOLDER / "smollm2"), "dtype": "float32"}}
        run = tmp_path / str(temperature)
        opd.train(recipe("smollm2", "smollm2", steps=1, teachers=teachers, **sections), run)
        assert rows_of(run)[0]["reverse_kl"] < 1e-6
        assert rows_of(run)[0]["mismatch"] < 1e-4


def test_a_real_pair_takes_steps(recipe, tmp_path):
    opd.train(recipe("qwen05", "qwen15"), tmp_path / "run")
    rows = rows_of(tmp_path / "run")
    assert all(0 < row["reverse_kl"] < 5 for row in rows)
    assert all(row["mismatch"] < 0.2 for row in rows)  # bf16 sampling weights against autocast


def test_other_tokenizers_are_refused(recipe, tmp_path):
    with pytest.raises(opd.UserError, match="cross-tokenizer"):
        opd.train(recipe("smollm2", "qwen05"), tmp_path / "run")
