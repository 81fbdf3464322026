"""Checkpoints: a Hugging Face folder that `from_pretrained` loads, and beside it, in `trainer/`, what a resumed run needs.

No pickle: tensors are safetensors, the rest JSON. A checkpoint appears under its name only when it is whole.
"""

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.numpy import load_file as load_arrays
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from transformers import PreTrainedTokenizerBase

from opd.config import BatchConfig
from opd.errors import UserError
from opd.files import new_folder
from opd.objective.learner import Learner
from opd.plugins import PromptSource
from opd.records import Rollout
from opd.saved_rollouts import load_rollouts, save_rollouts
from opd.steering import Steering

WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


def latest(folder: Path) -> Path | None:
    """The newest whole checkpoint below `folder`, or None."""
    named = [path for path in folder.glob("step-*") if path.name.removeprefix("step-").isdigit()]
    steps = [path for path in named if (path / "trainer" / "state.json").is_file()]
    return max(steps, key=step_of, default=None)


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def save(
    folder: Path,
    step: int,
    learner: Learner,
    tokenizer: PreTrainedTokenizerBase,
    state: Mapping[str, Any],
    in_flight: Sequence[Rollout],
    steering: Steering,
    keep: int,
    selected: int | None = None,
    card: str = "",
) -> Path:
    """Writes `folder/step-N` with its model card, and deletes all but the newest `keep` and the one of step `selected`.

    Every process calls this; the main one writes.

    Raises `UserError` when the disk is full; the checkpoints before it stay.
    """
    path = folder / f"step-{step}"
    weights = get_model_state_dict(learner.loss, options=WHOLE)
    moments: Any = get_optimizer_state_dict(learner.loss, learner.optimizer.optimizer, options=WHOLE)
    if learner.accelerator.is_main_process:
        with new_folder(path) as partial:
            student: Any = learner.student
            named = {name.removeprefix("module.").removeprefix("model."): t for name, t in weights.items()}
            student.save_pretrained(partial, state_dict=named)
            tokenizer.save_pretrained(partial)
            (partial / "README.md").write_text(card, encoding="utf-8")
            trainer = partial / "trainer"
            trainer.mkdir()
            tensors = {f"{name}|{key}": t for name, entry in moments["state"].items() for key, t in entry.items()}
            save_file({name: t.contiguous() for name, t in tensors.items()}, trainer / "optimizer.safetensors")
            groups = [{k: v for k, v in group.items() if k != "params"} for group in moments["param_groups"]]
            params = [group["params"] for group in moments["param_groups"]]
            steered, arrays = steering.state_dict()
            if arrays:
                save_arrays(arrays, trainer / "controllers.safetensors")
            record = {
                **state,
                "controllers": steered,
                "learner": learner.state_dict(),
                "param_groups": groups,
                "params": params,
            }
            if in_flight:
                save_rollouts(trainer / "in_flight.safetensors", in_flight)
            (trainer / "state.json").write_text(json.dumps(record), encoding="utf-8")
        whole = [old for old in folder.glob("step-*") if old.name.removeprefix("step-").isdigit()]
        for old in sorted(whole, key=step_of)[:-keep]:
            if step_of(old) != selected:
                shutil.rmtree(old)
    learner.accelerator.wait_for_everyone()
    return path


def read_state(path: Path) -> dict[str, Any]:
    """The JSON part of a checkpoint. Raises `UserError` when it cannot be read."""
    try:
        state = json.loads((path / "trainer" / "state.json").read_text(encoding="utf-8"))
        if not {"step", "recorder", "learner", "param_groups", "params"} <= state.keys():
            raise ValueError("state.json lacks keys")
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(f"{path}: not a whole checkpoint ({error}); delete it and resume from the one before") from None
    return state


def load_optimizer(path: Path, learner: Learner, state: Mapping[str, Any]) -> None:
    """Restores moments, schedule and counters; the weights came with the model folder. Raises `UserError`."""
    try:
        flat = load_file(path / "trainer" / "optimizer.safetensors")
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: not a whole checkpoint ({error}); delete it and resume from the one before") from None
    entries: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in flat.items():
        name, _, moment = key.rpartition("|")
        entries.setdefault(name, {})[moment] = tensor
    groups = [{**group, "params": names} for group, names in zip(state["param_groups"], state["params"])]
    moments: Any = {"state": entries, "param_groups": groups}
    set_optimizer_state_dict(learner.loss, learner.optimizer.optimizer, moments, options=WHOLE)
    learner.load_state_dict(state["learner"])


def load_steering(path: Path, steering: Steering, state: Mapping[str, Any]) -> bool:
    """Restores the rollout controllers. False where what they knew no longer holds, and they begin anew.

    Raises `UserError` when their file is missing or damaged, or the checkpoint is of an earlier version.
    """
    if not steering:
        return True
    file = path / "trainer" / "controllers.safetensors"
    try:
        arrays = load_arrays(file) if file.exists() else {}
        return steering.load_state_dict(state["controllers"], arrays)
    except (OSError, SafetensorError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{file}: not whole ({error}); delete its checkpoint and resume from the one before") from None


def load_in_flight(path: Path, batch: BatchConfig, prompts: PromptSource, step: int) -> dict[int, Rollout]:
    """The rollouts of `step`, by slot, that had started when the checkpoint was written. Raises `UserError`."""
    file = path / "trainer" / "in_flight.safetensors"
    if not file.exists():
        return {}
    drawn = prompts.at(step, 0, batch.prompts)
    rollouts = load_rollouts(file, lambda slot: drawn[slot // batch.rollouts_per_prompt])
    return {rollout.slot: rollout for rollout in rollouts}
