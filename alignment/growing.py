"""The alignment of a turn that still grows, at the cost of what is new.

Units before the last settled *joint* are kept: a place at which a unit ends, and what follows is tokenised independently of
what precedes (`opd.alignment.settled`). The rest is aligned again with each append, from an earlier joint on: the overlap
takes what a tokenizer does differently at the beginning of a text (a space that it puts there, a pattern that looks back).
If the overlap does not come to the same joint again, the whole is aligned anew.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from opd.alignment.parts import INNER_JOINT, NO_JOINT, Part, joined, span_map
from opd.records import Array, SpanMap

OVERLAP = 32  # bytes; words and what composes are shorter, and where they are not, the joint is not found again


class AlignParts(Protocol):
    """`opd.alignment.aligner.Aligner.parts`."""

    def __call__(self, ids: Array, start: int = 0, *, inner: bool = False, joints: bool = False) -> list[Part]: ...


@dataclass(frozen=True)
class _Joint:
    student: int  # tokens before it
    num_bytes: int
    inner: bool  # the text goes on


BEGINNING = _Joint(0, 0, inner=False)


class Growing:
    """One growing turn; `Aligner.growing` makes it.

    Example: `growing.append(chunk.sampled_ids); growing.whole().settled`
    """

    tail: SpanMap  # of the student tokens from `student_start` on; what is before them is as it was at the last append
    student_start: int
    teacher_start: int  # the teacher tokens before it, that many of them as its context has room for

    def __init__(self, align: AlignParts, student_eos: Collection[int], context_ids: Array, room: int | None) -> None:
        """`room` is the most teacher tokens after the context [c]; None: any number."""
        self._align, self._student_eos, self._context_ids, self._room = align, student_eos, context_ids, room
        self._ids = np.zeros(0, np.int32)
        self._restart()
        self._show(joined([]))

    def append(self, sampled_ids: Array) -> None:
        """The turn's next tokens [n]."""
        self._ids = np.concatenate([self._ids, np.asarray(sampled_ids, np.int32)])
        found, num_kept = self._from_overlap() or self._from_beginning()
        rest = found[num_kept:]
        self._show(rest)
        if len(self._ids) and int(self._ids[-1]) not in self._student_eos:  # which ends nothing if more is to follow
            self._keep(rest)

    def whole(self) -> SpanMap:
        """As `Aligner.align` has it for all tokens so far, except that no unit once settled is ever called unsettled."""
        return span_map(joined([*self._kept[: self._num_shown], self._rest]), self._context_ids, self._room)

    @property
    def num_sampled(self) -> int:
        """Student tokens so far."""
        return len(self._ids)

    def _restart(self) -> None:
        self._kept: list[Part] = []
        self._num_teacher = 0  # tokens in the kept parts
        self._joints = [BEGINNING]  # the last one is the end of what is kept

    def _from_overlap(self) -> tuple[Part, int] | None:
        """The part from an earlier joint on, and the number of its units that are kept; None if it has them otherwise."""
        start, end = self._joints[0], self._joints[-1]
        part = joined(self._align(self._ids[start.student :], start.student, inner=start.inner, joints=True))
        if start == end:
            return part, 0
        unit = int(np.searchsorted(part.units.student_ends, end.student - start.student))
        is_unit = unit < len(part.joints) and part.units.student_ends[unit] == end.student - start.student
        return (part, unit + 1) if is_unit and part.joints[unit] != NO_JOINT else None

    def _from_beginning(self) -> tuple[Part, int]:
        self._restart()
        return joined(self._align(self._ids, joints=True)), 0

    def _show(self, rest: Part) -> None:
        self._rest, self._num_shown = rest, len(self._kept)
        self.student_start = self._joints[-1].student
        room = None if self._room is None else max(self._room, 0)
        self.teacher_start = self._num_teacher if room is None else min(self._num_teacher, room)
        self.tail = span_map(rest, self._context_ids, None if room is None else room - self._num_teacher)

    def _keep(self, rest: Part) -> None:
        """Keeps the units up to the last settled joint, and the joints that an overlap may begin at."""
        units = np.flatnonzero(rest.joints[: rest.num_settled])
        if not len(units):
            return
        last, byte_ends = self._joints[-1], np.cumsum(rest.units.num_bytes)
        self._joints += [
            _Joint(
                last.student + int(rest.units.student_ends[unit]),
                last.num_bytes + int(byte_ends[unit]),
                bool(rest.joints[unit] == INNER_JOINT),
            )
            for unit in units
        ]
        kept = rest[: int(units[-1]) + 1]
        self._kept.append(kept)
        self._num_teacher += len(kept.teacher_ids)
        end = self._joints[-1]
        far = (
            index
            for index, joint in reversed(list(enumerate(self._joints)))
            if not joint.inner or end.num_bytes - joint.num_bytes >= OVERLAP
        )
        self._joints = self._joints[next(far) :]
