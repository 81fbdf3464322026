"""The quick starts over seeds of the whole tiny family: accuracy before and after, beside the teacher's.

    python -m benchmarks.quickstart --recipe quickstart --seeds 0 1 2 --out benchmarks/results/quickstart.json

A seed fixes the teacher, the student's start, the prompts' order and the sampling noise. Prints JSON.
"""

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import opd
from benchmarks.machine import describe
from opd.data import Columns, DatasetConfig, load_prompts


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="quickstart")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    options = parser.parse_args(arguments)
    rows = [run(options.recipe, seed) for seed in options.seeds]
    report = json.dumps({"machine": describe(), "recipe": options.recipe, "runs": rows}, indent=2)
    print(report)
    if options.out:
        options.out.write_text(report + "\n")


def run(recipe: str, seed: int) -> dict[str, Any]:
    """One seed: the summary of the run, the teacher's accuracy, and what the student gained."""
    names = [f"student.model=tiny:student@{seed}", f"teachers.default.model=tiny:teacher@{seed}", f"seed={seed}"]
    with tempfile.TemporaryDirectory() as folder:
        summary = opd.train(opd.load_config(recipe, names), Path(folder) / "run")
        rows = [json.loads(line) for line in (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()]
        heldout = load_prompts(DatasetConfig("tiny:heldout", columns=Columns(prompt="problem")), "heldout")
        teacher = opd.evaluate(f"tiny:teacher@{seed}", heldout, Path(folder) / "eval", max_new_tokens=48)["accuracy"]
    before, after = summary["eval"]["before"]["accuracy"], summary["eval"]["after"]["accuracy"]
    kl = next(name for name in ("reverse_kl", "reverse_kl_sampled") if name in rows[0])
    return {
        "seed": seed,
        "teacher_accuracy": teacher,
        "gain_points": round(100 * (after - before), 1),
        "share_of_teacher": round(after / teacher, 3),
        **summary,
        "kl_curve": [round(row[kl], 4) for row in rows[:: max(1, len(rows) // 20)]],
    }


if __name__ == "__main__":
    main()
