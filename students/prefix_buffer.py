"""The prefix buffer: of each task the last rollout with the teacher's log-probs, from which a later one may start again."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from opd.records import Array, Turn
from opd.saved_rollouts import ARRAYS, pack_turns, unpack_turns


@dataclass(frozen=True)
class Kept:
    """A rollout that was kept."""

    turns: tuple[Turn, ...]
    step: int  # whose rollout it is

    @property
    def num_bytes(self) -> int:
        arrays = (getattr(turn, name) for turn in self.turns for name in ARRAYS)
        return sum(array.nbytes for array in arrays if array is not None)


class PrefixBuffer:
    """By task; at most `max_bytes` of arrays together, beyond which those kept longest go first."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes, self.num_bytes = max_bytes, 0
        self._kept: dict[str, Kept] = {}  # the oldest first

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, task: str) -> Kept | None:
        return self._kept.get(task)

    def put(self, task: str, turns: Sequence[Turn], step: int) -> None:
        """Keeps the last rollout of `task` instead of the one before it."""
        self._drop(task)
        kept = Kept(tuple(turns), step)
        self._kept[task] = kept
        self.num_bytes += kept.num_bytes
        while self.num_bytes > self.max_bytes:
            self._drop(next(iter(self._kept)))

    def clear(self) -> None:
        self._kept, self.num_bytes = {}, 0

    def _drop(self, task: str) -> None:
        if (kept := self._kept.pop(task, None)) is not None:
            self.num_bytes -= kept.num_bytes

    def state_dict(self) -> tuple[list[dict[str, Any]], dict[str, Array]]:
        """JSON rows, the oldest first, and arrays by name."""
        rows, arrays = [], {}
        for number, (task, kept) in enumerate(self._kept.items()):
            turns, own = pack_turns(kept.turns, str(number))
            arrays |= own
            rows.append({"task": task, "step": kept.step, "turns": turns})
        return rows, arrays

    def load_state_dict(self, rows: Sequence[Mapping[str, Any]], arrays: Mapping[str, Array]) -> None:
        """What `state_dict` returned."""
        self.clear()
        for number, row in enumerate(rows):
            self.put(row["task"], unpack_turns(row["turns"], arrays, str(number)), row["step"])
