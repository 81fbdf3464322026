"""Sharded training gives the run that one whole process gives; each process samples with whole weights of its own."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

import opd
from opd.config import build_config


def shard(count: int, *words: str) -> None:
    """`opd WORDS` in `count` processes that share the student."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    settings = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
    workers = []
    for rank in range(count):
        named = {**settings, "RANK": rank, "LOCAL_RANK": rank, "ACCELERATE_USE_CPU": 1, "FSDP_VERSION": 2}
        env = {**os.environ, **{name: str(value) for name, value in named.items()}}
        command = [sys.executable, str(Path(__file__).with_name("fsdp_on_cpu.py")), *words]
        workers.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    outputs = [worker.communicate(timeout=240)[0] for worker in workers]
    assert [worker.returncode for worker in workers] == [0] * count, outputs


@pytest.mark.parametrize(
    ("count", "lora"),
    [(1, False), (2, True), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((1, True), (2, False)))],
)
def test_the_same_run_as_one_whole_process(raw_recipe, tmp_path, metrics_of, count, lora):
    student = {**raw_recipe()["student"], **({"lora": {"r": 4, "alpha": 8}} if lora else {})}
    raw = raw_recipe(student=student, optimizer={"lr": 3e-3})
    opd.train(build_config(raw), tmp_path / "whole")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(OmegaConf.to_yaml(OmegaConf.create(raw)))
    out = ["--out", str(tmp_path / "run")]
    shard(count, "train", str(recipe), "steps=4", *out)
    shard(count, "train", str(recipe), *out, "--resume")
    for mine, other in zip(metrics_of(tmp_path / "whole"), metrics_of(tmp_path / "run"), strict=True):
        for name, value in mine.items():
            assert other[name] == pytest.approx(value, abs=1e-5, rel=1e-5), name
