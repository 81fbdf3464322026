"""Time and memory of one whole OPD step (sample, score, update), beside TRL's DistillationTrainer.

    python -m benchmarks.step --model FOLDER --prompts FILE.jsonl [--peer trl] [--peer-python PYTHON]

Same folders, prompts, batch, tokens and full-vocabulary reverse KL. Each provider runs in processes of its own, the rounds
interleaved; of a provider's precisions the faster counts. Prints JSON.
"""

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.machine import describe

PRECISIONS = {"opd": ("bfloat16",), "trl": ("bfloat16", "float32")}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="student's folder")
    parser.add_argument("--teacher", help="teacher's folder; default: the student's")
    parser.add_argument("--prompts", required=True, help="JSON lines with a column `problem`")
    parser.add_argument("--peer", choices=["trl"], help="measure this toolkit too")
    parser.add_argument("--peer-python", default=sys.executable, help="the interpreter that has it")
    parser.add_argument("--batch", type=int, default=8, help="prompts a step")
    parser.add_argument("--new-tokens", type=int, default=64, help="tokens of a completion")
    parser.add_argument("--steps", type=int, default=3, help="measured steps of a process; one more warms it up")
    parser.add_argument("--rounds", type=int, default=2, help="processes of each provider and precision")
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    options = parser.parse_args(arguments)
    providers = ["opd"] + ([options.peer] if options.peer else [])
    runs: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for _ in range(options.rounds):
        for provider in providers:
            for precision in PRECISIONS[provider]:
                runs.setdefault((provider, precision), []).append(run(provider, precision, options))
    report = json.dumps(summarise(runs, options), indent=2)
    print(report)
    if options.out:
        options.out.write_text(report + "\n")


def run(provider: str, precision: str, options: argparse.Namespace) -> dict[str, Any]:
    """One process of one provider: seconds of each step, sampled tokens, peak memory."""
    task = {
        "model": options.model,
        "teacher": options.teacher or options.model,
        "prompts": options.prompts,
        "precision": precision,
        "batch": options.batch,
        "new_tokens": options.new_tokens,
        "steps": options.steps,
    }
    python = options.peer_python if provider != "opd" else sys.executable
    command = [python, "-m", f"benchmarks.step_{provider}", json.dumps(task)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{provider} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def summarise(runs: dict[tuple[str, str], list[dict[str, Any]]], options: argparse.Namespace) -> dict[str, Any]:
    """Medians over all measured steps, and the ratio to the peer's faster precision."""
    rows = []
    for (provider, precision), results in runs.items():
        seconds = [s for result in results for s in result["step_s"]]
        rows.append(
            {
                "provider": provider,
                "precision": precision,
                "median_step_s": round(statistics.median(seconds), 3),
                "min_step_s": round(min(seconds), 3),
                "all_step_s": [round(s, 3) for s in seconds],
                "peak_gib": round(max(result["peak_gib"] for result in results), 3),
                "tokens_per_step": statistics.mean(t for result in results for t in result["tokens"]),
            }
            | ({"version": results[0][provider]} if provider in results[0] else {})
        )
    report: dict[str, Any] = {
        "machine": describe(),
        "settings": {name: getattr(options, name) for name in ("batch", "new_tokens", "steps", "rounds")},
        "rows": rows,
    }
    peers = [row for row in rows if row["provider"] != "opd"]
    if peers:
        best, ours = min(peers, key=lambda row: row["median_step_s"]), rows[0]
        report["time_ratio"] = round(ours["median_step_s"] / best["median_step_s"], 3)
        report["memory_ratio"] = round(ours["peak_gib"] / best["peak_gib"], 3)
    return report


if __name__ == "__main__":
    main()
