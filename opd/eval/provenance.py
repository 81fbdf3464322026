"""What the run that a checkpoint comes from has to do with the problems it is evaluated on."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opd.config import RunConfig, build_config
from opd.data import DatasetConfig, load_prompts
from opd.errors import UserError
from opd.eval.overlap import overlap, problem_key
from opd.files import write_text
from opd.model_card import model_card
from opd.recipes import read_recipe
from opd.records import Prompt
from opd.registry import PROMPT_SOURCES


@dataclass(frozen=True)
class Checkpoint:
    """Step `step` of a run; its model lies in `path`."""

    run: Path
    step: int
    config: RunConfig

    @property
    def path(self) -> Path:
        return self.run / "checkpoints" / f"step-{self.step}"


def find_checkpoint(model: str, which: str = "last") -> Checkpoint | None:
    """The checkpoint that `model` is, or, where it is a run's directory, the one called `which`: last, best or a step.

    None where `model` belongs to no run. Raises `UserError` for a checkpoint that is not there, or a damaged recipe.
    """
    path = Path(os.path.abspath(Path(model).expanduser()))
    in_run = path.parent.name == "checkpoints" and path.name.removeprefix("step-").isdigit()
    run = path.parent.parent if in_run else path
    is_run = (run / "config.yaml").is_file() and (run / "env.json").is_file()
    if which != "last" and (in_run or not is_run):
        raise UserError(f"--checkpoint: {model} is not a run's directory; leave --checkpoint out")
    if not is_run:
        return None
    try:
        config = build_config(read_recipe(run / "config.yaml"))
    except UserError as error:
        raise UserError(f"--model: {run / 'config.yaml'} is damaged: {error}") from None
    step = int(path.name.removeprefix("step-")) if in_run else _step(run, which)
    return Checkpoint(run, step, config)


def steps_of(run: Path) -> list[int]:
    """The steps of a run's whole checkpoints, ascending."""
    states = (run / "checkpoints").glob("step-*/trainer/state.json")
    return sorted(int(state.parent.parent.name.removeprefix("step-")) for state in states)


def selected_step(run: Path) -> int | None:
    """The step that was best on the run's selection set, where it has one: each checkpoint says which it was so far."""
    steps = steps_of(run)
    try:
        state = (run / "checkpoints" / f"step-{steps[-1]}" / "trainer" / "state.json").read_text(encoding="utf-8")
        return int(json.loads(state)["recorder"]["selection"]["step"])
    except (IndexError, OSError, ValueError, KeyError, TypeError):
        return None


def _step(run: Path, which: str) -> int:
    steps = steps_of(run)
    if not steps:
        raise UserError(f"--model: {run} has no checkpoint")
    if which == "last":
        return steps[-1]
    if which == "best":
        best = selected_step(run)
        if best is None:
            raise UserError(f"--checkpoint: {run} selected none; train with eval.selection.path=FILE, or name a step")
        return best
    if not which.isdigit() or int(which) not in steps:
        raise UserError(f"--checkpoint: {run} has no step {which}; it has {', '.join(map(str, steps))} (or: last, best)")
    return int(which)


def selection_notes(checkpoint: Checkpoint, problems: Sequence[Prompt]) -> list[str]:
    """A warning where the checkpoint was, or may have been, chosen on problems that are now reported."""
    keys, chosen_on = {problem_key(problem.problem) for problem in problems}, checkpoint.config.eval
    steps, best = steps_of(checkpoint.run), selected_step(checkpoint.run)
    notes = []
    shared = len(keys & _keys(chosen_on.selection))
    if checkpoint.step == best and shared:
        notes.append(
            f"WARNING: step {best} was chosen for its accuracy on {shared} of these {len(keys)} problems (eval.selection), "
            "so its accuracy here is too high; report other problems"
        )
    shared = len(keys & _keys(chosen_on.prompts))
    if checkpoint.step != best and steps and checkpoint.step != steps[-1] and shared:
        notes.append(
            f"WARNING: step {checkpoint.step} is not the run's last, and {shared} of these {len(keys)} problems were "
            "evaluated while training: if it was chosen by them, its accuracy here is too high; use eval.selection"
        )
    return notes


def _keys(source: DatasetConfig | None) -> set[str]:
    """Problems of a data set; none where it is not there any more."""
    if source is None:
        return set()
    try:
        return {problem_key(prompt.problem) for prompt in load_prompts(source, "eval")}
    except UserError:
        return set()


def training_overlap(config: RunConfig, problems: Sequence[Prompt]) -> dict[str, Any] | None:
    """13-gram overlap of a run's training prompts with these problems; None where the prompts cannot be read (any more)."""
    try:
        source = PROMPT_SOURCES.load(config.prompts["type"], "prompts.type")(config.prompts["config"], config.seed)
    except UserError:
        return None
    return overlap_with(source, problems)


def overlap_with(source: Any, problems: Sequence[Prompt]) -> dict[str, Any]:
    """As `training_overlap`, from the prompt source itself."""
    texts = (prompt.problem for prompt in source.known())
    return overlap(texts, [(problem.id, problem.problem) for problem in problems])


def overlap_notes(overlap: Mapping[str, Any] | None) -> list[str]:
    """A warning where training prompts contain problems of the suite."""
    if not overlap or not overlap["num_overlapping"]:
        return []
    return [
        f"WARNING: {overlap['num_overlapping']} of {overlap['num_problems']} problems share 13 words in a row with one of "
        f"{overlap['num_training']} training prompts; {overlap['num_copies']} seem to be copies"
    ]


def results_of(run: Path, step: int) -> list[dict[str, Any]]:
    """What the run's directory holds of evaluations after `step` steps: on held-out problems, then on suites by name."""
    own, others = run / "eval" / f"step-{step}.json", sorted((run / "eval" / f"step-{step}").glob("*.json"))
    results = [json.loads(file.read_text(encoding="utf-8")) for file in (own, *others) if file.is_file()]
    for result in results[own.is_file() :]:
        if result["suite"] == "heldout":  # the name of evaluations while training
            result["suite"] = "heldout (opd eval)"
    return results


def write_card(checkpoint: Checkpoint) -> None:
    """Renews the checkpoint's model card with every result there is; a run that goes on may have deleted the checkpoint."""
    if not checkpoint.path.is_dir():
        return
    results = results_of(checkpoint.run, checkpoint.step)
    write_text(checkpoint.path / "README.md", model_card(checkpoint.config, checkpoint.step, results))
