"""`benchmarks.step` on a micro model; against TRL, `OPD_PEER_PYTHON` names an interpreter that has it, `OPD_REAL_MODELS` the
checkpoints."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import step_opd

RESULT = Path(step_opd.__file__).parent / "results" / "step-smollm2.json"
MODELS = Path(os.environ.get("OPD_REAL_MODELS", Path.home() / ".cache" / "opd-real-models"))


def test_steps_are_measured(model_folder, tmp_path, monkeypatch, capsys):
    """What runs is the engine, with a stopwatch where the recorder is otherwise."""
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"problem": word}) + "\n" for word in ("abc", "de", "fgh")))
    task = {"model": str(model_folder(0)), "teacher": str(model_folder(1)), "prompts": str(tmp_path / "prompts.jsonl")}
    task |= {"precision": "bfloat16", "batch": 3, "new_tokens": 4, "steps": 2}
    monkeypatch.setattr(sys, "argv", ["step_opd", json.dumps(task)])
    step_opd.main()
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert len(report["step_s"]) == len(report["stages"]) == 2
    assert all(3 <= tokens <= 12 for tokens in report["tokens"])
    for seconds, stages in zip(report["step_s"], report["stages"]):
        assert 0 < stages["perf/sample_s"] + stages["perf/update_s"] <= seconds
    assert report["peak_gib"] > 0


@pytest.mark.peer
@pytest.mark.timeout(1800)
def test_a_step_is_cheaper_than_the_peers(tmp_path):
    problems = [f"A train goes {n} miles an hour for {n + 1} hours. How far does it go? Explain." for n in range(20, 80)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"problem": text}) + "\n" for text in problems))
    command = [sys.executable, "-m", "benchmarks.step", "--model", str(MODELS / "smollm2"), "--peer", "trl"]
    command += [
        "--prompts",
        str(tmp_path / "prompts.jsonl"),
        "--peer-python",
        os.environ.get("OPD_PEER_PYTHON", sys.executable),
    ]
    report = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert report["time_ratio"] <= 0.5
    assert report["memory_ratio"] <= 0.65


def test_the_kept_figures():
    report = json.loads(RESULT.read_text())
    opd, *peers = report["rows"]
    best = min(peers, key=lambda row: row["median_step_s"])
    assert report["time_ratio"] == pytest.approx(opd["median_step_s"] / best["median_step_s"], abs=1e-3)
    assert report["time_ratio"] <= 0.5
    assert report["memory_ratio"] <= 0.65
    assert opd["tokens_per_step"] == pytest.approx(best["tokens_per_step"], rel=0.05)
