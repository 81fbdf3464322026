"""Rollouts on disk, to the last bit: one safetensors file with the arrays of all turns, the rest in its metadata.

Prompts are not kept: they follow from the step and the slot.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from opd.errors import UserError
from opd.records import Prompt, Rollout, Turn

ARRAYS = ("context_ids", "sampled_ids", "sampler_logps", "topk_ids", "topk_logps")
SCALARS = ("finish", "num_reused", "num_discarded", "versions")


def save_rollouts(path: Path, rollouts: Sequence[Rollout]) -> None:
    """Writes all but the prompts, of which the ids are kept to compare."""
    arrays: dict[str, np.ndarray] = {}
    rows = []
    for number, rollout in enumerate(rollouts):
        turns = []
        for place, turn in enumerate(rollout.turns):
            given = {name: getattr(turn, name) for name in ARRAYS if getattr(turn, name) is not None}
            arrays |= {f"{number}.{place}.{name}": np.ascontiguousarray(array) for name, array in given.items()}
            turns.append({name: getattr(turn, name) for name in SCALARS})
        scores = {"outcome": rollout.outcome, "score": rollout.score}
        rows.append({"slot": rollout.slot, "prompt": rollout.prompt.id, "turns": turns, **scores})
    save_file(arrays, path, metadata={"rollouts": json.dumps(rows)})


def load_rollouts(path: Path, prompt_of: Callable[[int], Prompt]) -> list[Rollout]:
    """What `save_rollouts` wrote, with the prompts of their slots.

    Raises `UserError` when the file is damaged, or when a slot's prompt is not the one it was.
    """
    try:
        with safe_open(path, framework="numpy") as file:
            rows = json.loads((file.metadata() or {})["rollouts"])
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise UserError(f"{path}: not whole ({error}); delete its checkpoint and resume from the one before") from None
    rollouts = []
    for number, row in enumerate(rows):
        prompt = prompt_of(row["slot"])
        if prompt.id != row["prompt"]:
            raise UserError(
                f"prompts: slot {row['slot']} had prompt {row['prompt']} when the run stopped and now has {prompt.id}; "
                "restore the data as they were"
            )
        turns = []
        for place, scalars in enumerate(row["turns"]):
            given = {name: arrays.get(f"{number}.{place}.{name}") for name in ARRAYS}
            versions = tuple((start, version) for start, version in scalars.pop("versions"))
            turns.append(Turn(**given, **scalars, versions=versions))  # type: ignore[arg-type]
        rollouts.append(Rollout(prompt, row["slot"], tuple(turns), row["outcome"], row["score"]))
    return rollouts
