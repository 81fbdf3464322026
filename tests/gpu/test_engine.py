"""The tiny family on CUDA: engine, server, resume, and FSDP2 with one process. Within three minutes.

`OPD_GPU_TESTS_ON=cpu` runs the same commands without a GPU, to try the tests themselves.
"""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

DEVICE = os.environ.get("OPD_GPU_TESTS_ON", "cuda")
ROOT = Path(__file__).parents[2]
STEPS = 12
SETTINGS = ["eval.prompts=null", "checkpoint.every=6", "checkpoint.keep=9", "objective.precision=float32"]
SETTINGS += ["optimizer.lr=5e-4", "optimizer.schedule=constant", "optimizer.warmup_ratio=0"]
# the same maths in another order of sums
CLOSE = 2e-3 if DEVICE == "cuda" else 1e-4

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(DEVICE == "cuda" and not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def opd(*words: str, launcher: tuple[str, ...] = ()) -> None:
    # the user's own cache and threads: the family may be there already, and is built sooner with all cores
    env = {
        name: value
        for name, value in os.environ.items()
        if name not in ({"OPD_CACHE", "OMP_NUM_THREADS"} if DEVICE == "cuda" else {"OPD_CACHE"})
    }
    command = [sys.executable, "-m", *launcher, "opd", *words]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


def train(
    out: Path,
    *overrides: str,
    recipe: str = "quickstart",
    steps: int = STEPS,
    flags: tuple[str, ...] = (),
    command: str = "train",
    launcher=(),
):
    opd(command, recipe, f"steps={steps}", *SETTINGS, *overrides, "--out", str(out), *flags, launcher=launcher)
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def assert_same(ours: list[dict], theirs: list[dict]) -> None:
    assert [row["step"] for row in ours] == [row["step"] for row in theirs]
    for mine, other in zip(ours, theirs):
        for key in ("loss", "reverse_kl", "grad_norm", "entropy"):
            assert mine[key] == pytest.approx(other[key], rel=CLOSE, abs=CLOSE), (mine["step"], key)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return train(tmp_path_factory.mktemp("whole") / "run")


def test_it_trains_on_the_device(whole):
    assert all(row["nonfinite_updates"] == 0 for row in whole)
    assert whole[-1]["reverse_kl"] < 0.9 * whole[0]["reverse_kl"]
    assert all(row["mismatch"] < 1e-2 for row in whole)


def test_bfloat16_trains_too(tmp_path, whole):
    rows = train(tmp_path / "run", "objective.precision=bfloat16")
    assert rows[-1]["reverse_kl"] == pytest.approx(whole[-1]["reverse_kl"], rel=0.2)


def test_a_resumed_run_goes_on_as_the_whole_one(tmp_path, whole):
    rows = train(tmp_path / "run", steps=STEPS // 2)
    resumed = train(tmp_path / "run", flags=("--resume",))
    assert resumed[: len(rows)] == rows
    assert_same(resumed, whole)


@pytest.mark.parametrize("recipe", ["compass-quickstart", "compass-quickstart-moe"])
def test_another_tokenizer_a_weak_reference_and_the_frozen_start(tmp_path, recipe):
    rows = train(tmp_path / "run", "objective.updates_per_batch=2", recipe=recipe, steps=3)
    assert all(row["nonfinite_updates"] == 0 for row in rows)
    assert all(row["align/byte_coverage"] == 1.0 for row in rows)
    assert abs(rows[0]["displacement"]) < abs(rows[-1]["displacement"])


@pytest.mark.parametrize("lookahead", [0, 1])
def test_a_served_teacher_gives_the_same_run(tmp_path, whole, lookahead):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{probe.getsockname()[1]}"
    rows = train(tmp_path / "run", f"teachers.default.url={address}", f"lookahead={lookahead}", command="launch")
    if lookahead:
        assert [row["staleness"] for row in rows] == [0.0] + [1.0] * (STEPS - 1)
        assert rows[-1]["reverse_kl"] < 0.9 * rows[0]["reverse_kl"]
    else:
        assert_same(rows, whole)


def test_fsdp2_with_one_process_gives_the_same_run(tmp_path, whole):
    config = ROOT / "configs" / "accelerate" / "fsdp2.yaml"
    words = ["accelerate.commands.launch", "--config_file", str(config), "--num_processes", "1", "-m"]
    rows = train(tmp_path / "run", launcher=(*words, *(["--cpu"] if DEVICE == "cpu" else [])))
    assert_same(rows, whole)
    if DEVICE == "cuda":  # on a CPU accelerate does not shard; tests/engine/test_fsdp.py does
        assert json.loads((tmp_path / "run" / "env.json").read_text())["distributed"] == "FSDP"
    assert (tmp_path / "run" / "checkpoints" / f"step-{STEPS}" / "model.safetensors").exists()
