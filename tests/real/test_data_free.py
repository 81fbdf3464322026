"""Data-free distillation with real checkpoints: `OPD_REAL_MODELS` names a folder with `smollm2` and `qwen05`."""

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

import opd
from opd.cli import build
from opd.config import build_config
from opd.data_free.pool import read_pool

FOLDER = Path(os.environ.get("OPD_REAL_MODELS", Path.home() / ".cache" / "opd-real-models"))
STUDENT, TEACHER = str(FOLDER / "smollm2"), str(FOLDER / "qwen05")

pytestmark = [pytest.mark.real, pytest.mark.timeout(1800)]


def run(*words):
    found = CliRunner().invoke(build(), list(map(str, words)))
    assert found.exit_code == 0, found.output
    return found.stdout


def author(out, num, *options):
    options = ("--domain", "math", "--max-new-tokens", 256, "--max-rows", 4, "--max-attempts", 16, *options)
    return run("prompts", "author", "--teacher", TEACHER, "--n", num, "--out", out, *options)


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    path = tmp_path_factory.mktemp("pool") / "math.jsonl"
    author(path, 6)
    return path


def test_a_real_teacher_writes_problems_and_a_smaller_pool_is_their_beginning(pool, tmp_path):
    rows = read_pool(pool, "pool")
    assert [row.id for row in rows] == [f"math-{place}" for place in range(6)]
    assert len({row.text for row in rows}) == 6
    assert all(len(row.text.split()) > 3 and "<|" not in row.text for row in rows)
    author(tmp_path / "small.jsonl", 3)
    assert pool.read_bytes().startswith((tmp_path / "small.jsonl").read_bytes())
    author(tmp_path / "other.jsonl", 1, "--seed", 1)
    assert read_pool(tmp_path / "other.jsonl", "pool")[0].text != rows[0].text


def test_a_real_pool_is_inspected(pool, tmp_path):
    found = json.loads(run("prompts", "inspect", pool, "--tokenizer", TEACHER, "--out", tmp_path / "report.html", "--json"))
    assert (found["math"]["num_prompts"], found["math"]["exact_duplicates"]["num_groups"]) == (6, 0)
    shares = found["math"]["u4"]["at"].values()
    assert shares
    assert all(0.5 < share <= 1.0 for share in shares)
    page = (tmp_path / "report.html").read_text()
    assert any(row.text.split()[0] in page for row in read_pool(pool, "pool"))


def test_a_real_student_learns_from_a_teacher_of_another_family(pool, tmp_path):
    raw = {
        "steps": 3,
        "student": {"model": STUDENT},
        "teachers": {"default": {"model": TEACHER}},
        "prompts": {"type": "authored", "path": str(pool), "size": 2},
        "batch": {"prompts": 4},
        "sampling": {"max_new_tokens": 32, "max_context": 1024},
        "terms": {"reverse_kl": {"form": "sampled"}},
        "optimizer": {"lr": 1e-5},
        "checkpoint": {"every": 0},
        "trackers": {"rollouts_every": 1},
    }
    opd.train(build_config(raw), tmp_path / "run")
    lines = (tmp_path / "run" / "rollouts" / "step-1.jsonl").read_text().splitlines()
    shown = [json.loads(line) for line in lines]
    assert sorted(row["id"] for row in shown) == ["math-0", "math-0", "math-1", "math-1"]
    assert len({row["response"] for row in shown}) == 4  # each copy has a seed of its own
