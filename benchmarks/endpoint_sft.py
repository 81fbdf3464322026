"""Supervised traces whole, without their middle, and shortened as much in other ways, on the tiny family's long task.

    python -m benchmarks.endpoint_sft --work runs/endpoint-sft --seeds 0 1 2 --out benchmarks/results/endpoint-sft.json

A seed fixes the student's start, the order of the examples and what `random` keeps. Accuracy is that of one response at
temperature 1 to each held-out problem. Runs that are done already are not repeated. Prints JSON.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import opd
from benchmarks.machine import describe
from opd.data import Columns, DatasetConfig, load_prompts
from opd.recipes import find_recipe, overlay, read_recipe
from opd.sft.config import SftConfig, build_sft_config
from opd.sft.examples import read_examples
from opd.sft.run import fine_tune

RECIPE = "sft/endpoint-quickstart"
KEPT = ("full", "endpoints", "head", "tail", "random")
HELDOUT = DatasetConfig("tiny:long-heldout", columns=Columns(prompt="problem"))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--kept", nargs="+", default=list(KEPT), choices=KEPT)
    parser.add_argument("--steps", type=int, help="updates instead of the recipe's")
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    options = parser.parse_args(arguments)
    changes = {} if options.steps is None else {"steps": options.steps}
    starts = {seed: accuracy(f"tiny:long-student@{seed}", options.work / f"start-{seed}") for seed in options.seeds}
    rows = [run(kept, seed, changes, options.work) for kept in options.kept for seed in options.seeds]
    report = json.dumps({"machine": describe(), "recipe": RECIPE, "start_accuracy": starts, "runs": rows}, indent=2)
    print(report)
    if options.out:
        options.out.write_text(report + "\n")


def run(kept: str, seed: int, changes: Mapping[str, Any], work: Path) -> dict[str, Any]:
    """One fine-tuned student: what it was shown, and how often it is right."""
    config, folder = recipe(kept, seed, changes), work / kept / f"seed-{seed}"
    summary = folder / "run" / "summary.json"
    if not summary.exists():
        fine_tune(config, folder / "run", resume=True)
    done = json.loads(summary.read_text())
    return {
        "kept": kept,
        "seed": seed,
        "deleted_share": round(deleted_share(config), 4),
        "accuracy": accuracy(str(folder / "run" / "final"), folder),
        **{name: done[name] for name in ("steps", "loss", "trained_tokens", "wall_s")},
    }


def recipe(kept: str, seed: int, changes: Mapping[str, Any]) -> SftConfig:
    """The shipped recipe with other steps kept, or all of them."""
    deletion = None if kept == "full" else {"keep": kept, "seed": seed}
    own = {"student": {"model": f"tiny:long-student@{seed}"}, "seed": seed, "dataset": {"delete_steps": deletion}}
    return build_sft_config(overlay(overlay(read_recipe(find_recipe(RECIPE)), own), dict(changes)))


def deleted_share(config: SftConfig) -> float:
    """Of the answers' characters."""
    examples = list(read_examples(config.dataset, "dataset"))
    deleted = sum(example.num_deleted for example in examples)
    return deleted / (deleted + sum(example.num_characters for example in examples))


def accuracy(model: str, folder: Path) -> float:
    """On the held-out problems; read from `folder` where it has been measured."""
    found = folder / "heldout.json"
    if found.exists():
        return float(json.loads(found.read_text())["accuracy"])
    problems = load_prompts(HELDOUT, "heldout")
    result = opd.evaluate(
        model, problems, folder, suite="heldout", overwrite=True, samples=1, temperature=1.0, top_p=1.0, max_new_tokens=80
    )
    return float(result["accuracy"])


if __name__ == "__main__":
    main()
