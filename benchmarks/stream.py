"""How much of sampling, scoring and updating goes on at the same time.

    python -m benchmarks.stream [--real] [--out benchmarks/results/stream.json]

First with stages that only wait (their seconds are given), in several proportions: seconds a step beside the slowest stage
and the sum of all. `--real` adds the tiny family with its teacher behind `opd serve teacher` in another process, with and
without `lookahead`, in interleaved runs; trainer and server have one thread each, as on machines of their own. Prints JSON.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.machine import describe
from benchmarks.stream_stubs import Stages, measure

ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}
FIGURES = ("perf/step_s", "perf/wait_s", "perf/sample_s", "perf/score_s", "perf/update_s")
PROPORTIONS = (
    Stages(0.30, 0.30, 0.30),
    Stages(0.60, 0.20, 0.20),
    Stages(0.20, 0.60, 0.20),
    Stages(0.20, 0.20, 0.60),
    Stages(0.50, 0.10, 0.40),
)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10, help="steps of each stub run")
    parser.add_argument("--real", action="store_true", help="also the tiny family with a server in another process")
    parser.add_argument("--rounds", type=int, default=3, help="interleaved rounds of the real runs")
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    options = parser.parse_args(arguments)
    result: dict[str, Any] = {"machine": describe(), "stubs": [stub(stages, options.steps) for stages in PROPORTIONS]}
    if options.real:
        result["real"] = real(options.rounds)
    report = json.dumps(result, indent=2)
    print(report)
    if options.out:
        options.out.write_text(report + "\n")


def stub(stages: Stages, steps: int) -> dict[str, Any]:
    """One proportion of the stages, without and with lookahead."""
    row: dict[str, Any] = {"sample_s": stages.sample_s, "score_s": stages.score_s, "update_s": stages.update_s}
    for lookahead in (0, 1):
        seconds, staleness = measure(stages, lookahead, steps=steps)
        step_s = statistics.median(seconds)
        row[f"lookahead_{lookahead}"] = {
            "step_s": round(step_s, 4),
            "over_slowest": round(step_s / stages.slowest_s, 3),
            "over_sum": round(step_s / stages.sum_s, 3),
            "max_staleness": max(staleness),
        }
    return row


def real(rounds: int, steps: int = 12) -> dict[str, Any]:
    """The quick start with sampled tokens' full KL from a served teacher, and in process: medians over steps and rounds."""
    runs: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as folder, served("tiny:teacher") as url:
        for number in range(rounds):
            for name, overrides in {
                "in process": [],
                "served": [f"teachers.default.url={url}"],
                "served, lookahead 1": [f"teachers.default.url={url}", "lookahead=1"],
            }.items():
                runs.setdefault(name, []).append(_run(Path(folder) / f"{number}-{name}", overrides, steps))
    medians = {
        name: {key.removeprefix("perf/"): round(statistics.median(run[key] for run in found), 4) for key in FIGURES}
        for name, found in runs.items()
    }
    return {"steps": steps, "rounds": rounds, "runs": medians}


def _run(out: Path, overrides: Sequence[str], steps: int) -> dict[str, float]:
    """Medians over the steps of one run in a process of its own, the first two left out."""
    settings = [f"steps={steps}", "eval.prompts=null", "checkpoint.every=0", *overrides]
    command = [sys.executable, "-m", "opd", "train", "quickstart", *settings, "--out", str(out)]
    subprocess.run(command, env=ONE_THREAD, check=True, capture_output=True)
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()][2:]
    return {key: statistics.median(row.get(key, 0.0) for row in rows) for key in FIGURES}


@contextmanager
def served(model: str) -> Iterator[str]:
    """The address of `opd serve teacher` for `model` in another process."""
    command = [sys.executable, "-m", "opd", "serve", "teacher", "--model", model, "--port", "0"]
    with subprocess.Popen(command, env=ONE_THREAD, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        assert server.stdout is not None
        try:
            yield server.stdout.readline().split(" at ")[1].split()[0]
        finally:
            server.terminate()


if __name__ == "__main__":
    main()
