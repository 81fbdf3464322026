"""Rollouts on disk, to the last bit: one safetensors file with the arrays of all turns, the rest in its metadata.

Prompts are not kept: they follow from the step and the slot. Turns alone are packed by `pack_turns`.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from opd.errors import UserError
from opd.records import Array, Prompt, Rollout, Turn

ARRAYS = ("context_ids", "sampled_ids", "sampler_logps", "topk_ids", "topk_logps", "teacher_logps")
SCALARS = ("finish", "num_reused", "num_discarded", "versions", "observations", "state_hash", "mistake")


def pack_turns(turns: Sequence[Turn], name: str) -> tuple[list[dict[str, Any]], dict[str, Array]]:
    """(a JSON object a turn, the arrays by `NAME.TURN.FIELD`)."""
    arrays: dict[str, Array] = {}
    for place, turn in enumerate(turns):
        given = {field: getattr(turn, field) for field in ARRAYS if getattr(turn, field) is not None}
        arrays |= {f"{name}.{place}.{field}": np.ascontiguousarray(array) for field, array in given.items()}
    return [{field: getattr(turn, field) for field in SCALARS} for turn in turns], arrays


def unpack_turns(rows: Sequence[Mapping[str, Any]], arrays: Mapping[str, Array], name: str) -> tuple[Turn, ...]:
    """What `pack_turns` packed, from before or after a way through JSON. Raises KeyError or TypeError for anything else."""
    turns = []
    for place, row in enumerate(rows):
        given: dict[str, Any] = {field: arrays.get(f"{name}.{place}.{field}") for field in ARRAYS}
        given |= {field: arrays[f"{name}.{place}.{field}"] for field in ("context_ids", "sampled_ids", "sampler_logps")}
        versions = tuple((start, version) for start, version in row["versions"])
        scalars = {**row, "versions": versions, "observations": tuple(row["observations"])}
        turns.append(Turn(**given, **scalars))
    return tuple(turns)


def save_rollouts(path: Path, rollouts: Sequence[Rollout]) -> None:
    """Writes all but the prompts, of which the ids are kept to compare."""
    arrays: dict[str, np.ndarray] = {}
    rows = []
    for number, rollout in enumerate(rollouts):
        turns, own = pack_turns(rollout.turns, str(number))
        arrays |= own
        scores = {"outcome": rollout.outcome, "score": rollout.score, "restart": rollout.restart}
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
        turns = [unpack_turns(row["turns"], arrays, str(number)) for number, row in enumerate(rows)]
        scores = [{name: row[name] for name in ("outcome", "score", "restart")} for row in rows]
        places = [(row["slot"], row["prompt"]) for row in rows]
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path}: not whole ({error}); delete its checkpoint and resume from the one before") from None
    rollouts = []
    for (slot, known), its_turns, its_scores in zip(places, turns, scores):
        prompt = prompt_of(slot)
        if prompt.id != known:
            raise UserError(
                f"prompts: slot {slot} had prompt {known} when the run stopped and now has {prompt.id}; "
                "restore the data as they were"
            )
        rollouts.append(Rollout(prompt, slot, its_turns, **its_scores))
    return rollouts
