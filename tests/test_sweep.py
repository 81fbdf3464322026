"""Sweeps: what is planned, refused, run, and gone on with."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time

import pytest
from filelock import FileLock
from omegaconf import OmegaConf

from opd.config import parse_overrides
from opd.data import Columns, DatasetConfig
from opd.errors import UserError
from opd.recipes import shipped_sweeps
from opd.sweep import evaluate_teacher, plan_sweep, run_sweep


@pytest.fixture
def sweep_file(tmp_path, model_folder):
    """`sweep_file(**changes)`: the path of a sweep of two variants and two seeds over a recipe beside it."""
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"problem": word}) + "\n" for word in ("abc", "de", "fgh")))
    folder = str(model_folder(0))
    recipe = {
        "steps": 2,
        "student": {"model": folder},
        "teachers": {"default": {"model": folder}},
        "prompts": {"path": str(tmp_path / "prompts.jsonl"), "columns": {"prompt": "problem"}},
        "batch": {"prompts": 2},
        "sampling": {"max_new_tokens": 4},
        "terms": {"reverse_kl": {}},
    }
    (tmp_path / "small.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(recipe)))
    sweep = {
        "recipe": "small",
        "seeds": [0, 1],
        "overrides": {"optimizer": {"lr": 1e-4}},
        "variants": {"full": {}, "jsd": {"terms": {"reverse_kl": {"divergence": "jsd"}}, "optimizer": {"lr": 1e-3}}},
    }

    def write(**changes):
        path = tmp_path / "sweep.yaml"
        path.write_text(OmegaConf.to_yaml(OmegaConf.create({**sweep, **changes})))
        return str(path)

    return write


def test_plan(sweep_file, tmp_path):
    runs = plan_sweep(sweep_file(), parse_overrides(["steps=3", "optimizer.lr=1e-2"]), tmp_path / "out")
    assert [run.name for run in runs] == ["full/seed-0", "full/seed-1", "jsd/seed-0", "jsd/seed-1"]
    assert [run.path for run in runs[:2]] == [tmp_path / "out" / "full" / f"seed-{seed}" for seed in (0, 1)]
    assert [(run.raw["seed"], run.raw["optimizer"]["lr"], run.steps) for run in runs] == [
        (0, 1e-2, 3),
        (1, 1e-2, 3),
        (0, 1e-3, 3),  # what a variant sets, it keeps
        (1, 1e-3, 3),
    ]
    assert not any(run.done for run in runs)


def test_a_recipe_may_follow_the_seed(sweep_file, tmp_path):
    changes = {"overrides": {"student": {"model": "tiny:student@${seed}"}}, "variants": {"x": {"teachers": {}}}}
    runs = plan_sweep(sweep_file(**changes), {}, tmp_path / "out")
    assert [run.config.student.model for run in runs] == ["tiny:student@0", "tiny:student@1"]


def test_each_seed_may_have_changes_of_its_own(sweep_file, tmp_path):
    seeds = {3: {"sampling": {"max_new_tokens": 5}}, 4: {}}
    runs = plan_sweep(sweep_file(seeds=seeds), {}, tmp_path / "out")
    found = [(run.variant, run.seed, run.config.seed, run.config.sampling.max_new_tokens) for run in runs]
    assert found == [(variant, seed, seed, length) for variant in ("full", "jsd") for seed, length in ((3, 5), (4, 4))]
    assert [run.config.optimizer.lr for run in runs] == [1e-4, 1e-4, 1e-3, 1e-3]


@pytest.mark.parametrize("seeds", [{"a": {}}, {1: 2}, [1, "x"], 3])
def test_seeds_are_numbers(sweep_file, tmp_path, seeds):
    with pytest.raises(UserError, match=r"^seeds"):
        plan_sweep(sweep_file(seeds=seeds), {}, tmp_path / "out")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"variants": {}}, "at least one variant"),
        *[({"variants": {name: {}}}, "is to be a folder's name") for name in ("a/b", "..", ".x", "report")],
        ({"variants": {"x": 3}}, "variants.x is 3: write the changed keys below it"),
        ({"seeds": [0, 0]}, "names a seed twice"),
        ({"variants": {"x": {"optimizer": {"learning_rate": 1}}}}, "variants.x: unknown key 'optimizer.learning_rate'"),
        ({"variants": {"x": {"terms": {"reverse_kl": {"form": "half"}}}}}, "variants.x: terms.reverse_kl"),
        ({"recipe": "quickstar"}, "did you mean 'quickstart'"),
        ({"seed": [0]}, "unknown key 'seed'; did you mean 'seeds'"),
        ({"seeds": ["one"]}, "seeds"),
    ],
)
def test_mistakes_show_before_anything_runs(sweep_file, tmp_path, changes, expected):
    with pytest.raises(UserError, match=expected.replace("[", r"\[")):
        plan_sweep(sweep_file(**changes), {}, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("name", "description"), list(shipped_sweeps()))
def test_shipped_sweeps_load(name, description, tmp_path):
    assert description
    assert len(plan_sweep(name, {}, tmp_path)) > 1


def test_runs_and_goes_on_with_what_is_left(sweep_file, tmp_path):
    runs = plan_sweep(sweep_file(), {}, tmp_path / "out")
    shown = []
    assert run_sweep(runs[:1], 1, [], lambda name, steps: shown.append((name, steps))) == []
    assert runs[0].done
    assert shown[-1] == ("full/seed-0", 2)
    first = (runs[0].path / "metrics.jsonl").read_bytes()
    assert run_sweep(runs[:2], 2, [], lambda name, steps: None) == []
    assert all(run.done for run in runs[:2])
    assert (runs[0].path / "metrics.jsonl").read_bytes() == first  # it was left alone


def test_a_finished_run_of_another_spec_is_never_passed_off(sweep_file, tmp_path):
    runs = plan_sweep(sweep_file(), {}, tmp_path / "out")
    run_sweep(runs[:1], 1, [], lambda name, steps: None)
    for changes, key in (({"optimizer": {"lr": 0.5}}, "optimizer.lr"), ({"steps": 1}, "steps")):
        with pytest.raises(UserError, match=f"variants.full: {key}: the run in .* began with"):
            plan_sweep(sweep_file(variants={"full": changes}), {}, tmp_path / "out")


def test_one_sweep_at_a_time(sweep_file, tmp_path):
    runs = plan_sweep(sweep_file(), {}, tmp_path / "out")
    (tmp_path / "out" / "recipes").mkdir(parents=True)
    with FileLock(tmp_path / "out" / "recipes" / ".lock"), pytest.raises(UserError, match="another sweep is running"):
        run_sweep(runs, 1, [], lambda name, steps: None)


def test_a_failed_run_is_named_and_the_others_go_on(sweep_file, tmp_path):
    runs = plan_sweep(sweep_file(), {}, tmp_path / "out")[:2]
    runs[0].path.mkdir(parents=True)
    (runs[0].path / "mine.txt").write_text("not a run")
    (failure,) = run_sweep(runs, 1, [], lambda name, steps: None)
    assert failure.startswith("full/seed-0: --out:")
    assert runs[1].done


def test_a_stopped_sweep_leaves_no_run_behind(sweep_file, tmp_path):
    command = [sys.executable, "-m", "opd", "sweep", sweep_file(), "steps=100000", "--out", str(tmp_path / "out")]
    sweep = subprocess.Popen(command, stderr=subprocess.DEVNULL, env=os.environ)
    metrics = tmp_path / "out" / "full" / "seed-0" / "metrics.jsonl"
    while not metrics.exists():
        assert sweep.poll() is None
        time.sleep(0.05)
    sweep.send_signal(signal.SIGTERM)
    assert sweep.wait(60) == 143
    listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
    assert str(tmp_path / "out" / "full") not in listed


@pytest.mark.parametrize("teacher", [{"url": "http://127.0.0.1:1"}, {"revision": "main"}, {"adapter": "folder"}])
def test_a_teacher_that_cannot_be_evaluated_here_is_left_out(sweep_file, tmp_path, teacher):
    (run, *_) = plan_sweep(sweep_file(), {}, tmp_path / "out")
    heldout = DatasetConfig(str(tmp_path / "prompts.jsonl"), columns=Columns("problem"))
    teachers = {"default": dataclasses.replace(run.config.teachers["default"], **teacher)}
    evaluation = dataclasses.replace(run.config.eval, prompts=heldout)
    config = dataclasses.replace(run.config, teachers=teachers, eval=evaluation)
    assert evaluate_teacher([dataclasses.replace(run, config=config)], tmp_path / "out") is None


def test_the_whole_command_ends_with_the_comparison(sweep_file, tmp_path, model_folder):
    heldout = tmp_path / "heldout.jsonl"
    heldout.write_text("".join(json.dumps({"problem": word, "answer": "1"}) + "\n" for word in ("za", "yb")))
    words = [f"eval.prompts.path={heldout}", "eval.prompts.columns.prompt=problem", "eval.kl_prompts=2"]
    command = [sys.executable, "-m", "opd", "sweep", sweep_file(seeds=[0]), *words, "--out", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "out" / "teacher" / "heldout.json").read_text())["num_problems"] == 2
    assert (tmp_path / "out" / "report" / "report.html").is_file()
    table = (tmp_path / "out" / "report" / "tables" / "heldout-scores.md").read_text()
    assert all(name in table for name in ("full", "jsd", "(teacher)"))
