"""`benchmarks.step` against TRL: `OPD_PEER_PYTHON` names an interpreter that has it, `OPD_REAL_MODELS` the checkpoints."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

MODELS = Path(os.environ.get("OPD_REAL_MODELS", Path.home() / ".cache" / "opd-real-models"))


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
    assert report["time_ratio"] <= 0.6
    assert report["memory_ratio"] <= 0.9
