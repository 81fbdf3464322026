"""An interrupted run that is resumed equals an uninterrupted one, wherever it was killed."""

import random
import shutil
import signal
import subprocess
import sys
import time

import pytest
from omegaconf import OmegaConf

import opd
from opd.config import build_config
from opd.errors import UserError
from opd.files import new_folder, write_text


@pytest.fixture(scope="module")
def whole(raw_recipe, tmp_path_factory):
    """The directory of an uninterrupted run of 12 steps."""
    run = tmp_path_factory.mktemp("whole") / "run"
    opd.train(build_config(raw_recipe(steps=12)), run)
    return run


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_kill_at_a_random_step_then_resume(raw_recipe, whole, tmp_path, metrics_of, seed):
    recipe, run = tmp_path / "recipe.yaml", tmp_path / "run"
    recipe.write_text(OmegaConf.to_yaml(OmegaConf.create(raw_recipe(steps=12))))
    command = [sys.executable, "-m", "opd", "train", str(recipe), "--out", str(run)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    rows = random.Random(seed).randint(1, 11)
    while process.poll() is None:
        metrics = run / "metrics.jsonl"
        if metrics.exists() and metrics.read_bytes().count(b"\n") >= rows:
            process.send_signal(signal.SIGKILL)
            break
        time.sleep(0.005)
    process.wait()
    done = subprocess.run([*command, "--resume"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert metrics_of(run) == metrics_of(whole)


def test_a_half_written_checkpoint_is_ignored(raw_recipe, whole, tmp_path, metrics_of):
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    newest = run / "checkpoints" / "step-12"
    newest.rename(run / "checkpoints" / ".step-12.partial")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 13, "lo')  # a line cut off by the kill
    opd.train(build_config(raw_recipe(steps=12)), run, resume=True)
    assert metrics_of(run) == metrics_of(whole)


def test_more_steps_continue_a_finished_run(raw_recipe, tmp_path, metrics_of):
    constant = {"lr": 1e-3}
    opd.train(build_config(raw_recipe(steps=8, optimizer=constant)), tmp_path / "whole")
    opd.train(build_config(raw_recipe(steps=4, optimizer=constant)), tmp_path / "part")
    opd.train(build_config(raw_recipe(steps=8, optimizer=constant)), tmp_path / "part", resume=True)
    assert metrics_of(tmp_path / "part") == metrics_of(tmp_path / "whole")


def test_resume_refuses_another_recipe(raw_recipe, tmp_path):
    opd.train(build_config(raw_recipe(steps=2)), tmp_path / "run")
    with pytest.raises(UserError, match="seed"):
        opd.train(build_config(raw_recipe(steps=2, seed=5)), tmp_path / "run", resume=True)


def test_a_full_disk_is_one_clear_error(tmp_path):
    from opd.files import explain_full_disk

    with pytest.raises(UserError, match="disk is full"), explain_full_disk(tmp_path), open("/dev/full", "w") as file:
        file.write("x" * 100_000)


def test_writes_are_all_or_nothing(tmp_path):
    write_text(tmp_path / "a.json", "old")

    def fill() -> None:
        with new_folder(tmp_path / "folder") as partial:
            (partial / "x").write_text("half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fill()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json"]
