"""The prefix buffer: of each task the last rollout with the teacher's log-probs, from which a later one may start again.

Of a turn's context only what the turns before it do not hold is kept, so that an episode takes the room of its tokens.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from opd.records import Array, Turn
from opd.saved_rollouts import ARRAYS, pack_turns, unpack_turns


@dataclass(frozen=True)
class Kept:
    """A rollout that was kept. `turns` have the rest of their contexts only, behind the first `shared` tokens of what the
    turn before them read and wrote."""

    turns: tuple[Turn, ...]
    shared: tuple[int, ...]

    @classmethod
    def of(cls, turns: Sequence[Turn]) -> "Kept":
        shorter, shared = [], []
        before = np.zeros(0, np.int32)
        for turn in turns:
            same = common_beginning(before, turn.context_ids)
            shorter.append(replace(turn, context_ids=turn.context_ids[same:].copy()))
            shared.append(same)
            before = np.concatenate([turn.context_ids, turn.sampled_ids])
        if shorter:  # the last turn is always sampled anew, so that nobody asks what was answered to it
            shorter[-1] = replace(shorter[-1], observations=())
        return cls(tuple(shorter), tuple(shared))

    def whole(self) -> tuple[Turn, ...]:
        """The turns with their contexts."""
        turns: list[Turn] = []
        before = np.zeros(0, np.int32)
        for turn, same in zip(self.turns, self.shared):
            turns.append(replace(turn, context_ids=np.concatenate([before[:same], turn.context_ids]).astype(np.int32)))
            before = np.concatenate([turns[-1].context_ids, turn.sampled_ids])
        return tuple(turns)

    @property
    def num_bytes(self) -> int:
        arrays = (getattr(turn, name) for turn in self.turns for name in ARRAYS)
        texts = sum(len(json.dumps(turn.observations)) for turn in self.turns if turn.observations)
        return texts + sum(array.nbytes for array in arrays if array is not None)


class PrefixBuffer:
    """By task; at most `max_bytes` together, beyond which those kept longest go first."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes, self.num_bytes, self.num_evicted = max_bytes, 0, 0
        self._kept: dict[str, Kept] = {}  # the oldest first

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, task: str) -> tuple[Turn, ...] | None:
        """The turns of the rollout that is kept of `task`; of the last one the observations are not known."""
        kept = self._kept.get(task)
        return None if kept is None else kept.whole()

    def put(self, task: str, turns: Sequence[Turn]) -> None:
        """Keeps the last rollout of `task` instead of the one before it."""
        self._drop(task)
        self._add(task, Kept.of(turns))

    def clear(self) -> None:
        self._kept, self.num_bytes = {}, 0

    def _add(self, task: str, kept: Kept) -> None:
        self._kept[task] = kept
        self.num_bytes += kept.num_bytes
        while self.num_bytes > self.max_bytes:
            self._drop(next(iter(self._kept)))
            self.num_evicted += 1

    def _drop(self, task: str) -> None:
        if (kept := self._kept.pop(task, None)) is not None:
            self.num_bytes -= kept.num_bytes

    def state_dict(self) -> tuple[dict[str, Any], dict[str, Array]]:
        """JSON values, and arrays by name."""
        rows, arrays = [], {}
        for number, (task, kept) in enumerate(self._kept.items()):
            turns, own = pack_turns(kept.turns, str(number))
            arrays |= own
            rows.append({"task": task, "shared": list(kept.shared), "turns": turns})
        return {"rows": rows, "evicted": self.num_evicted}, arrays

    def load_state_dict(self, state: Mapping[str, Any], arrays: Mapping[str, Array]) -> None:
        """What `state_dict` returned. Raises KeyError or TypeError for anything else."""
        self.clear()
        for number, row in enumerate(state["rows"]):
            self._add(row["task"], Kept(unpack_turns(row["turns"], arrays, str(number)), tuple(row["shared"])))
        self.num_evicted = state["evicted"]


def common_beginning(a: Array, b: Array) -> int:
    """How many leading ids of two sequences are equal."""
    least = min(len(a), len(b))
    same = a[:least] == b[:least]
    return least if same.all() else int(same.argmin())
