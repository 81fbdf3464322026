"""Pieces of an alignment, and the record that they make together."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from opd.alignment.spans import Units
from opd.records import Array, SpanMap

NO_JOINT, INNER_JOINT, END = range(3)  # not known to be, within one text, at a text's end


@dataclass(frozen=True, eq=False)
class Part:
    """The units of some consecutive student tokens; offsets count from the part's own beginning."""

    units: Units
    teacher_ids: Array
    num_student: int
    num_settled: int
    joints: Array  # [u] int8: whether what follows the unit is tokenised independently of what precedes, as below

    def __getitem__(self, of: slice) -> "Part":
        """The units `of.start` to `of.stop`."""
        start, stop, _ = of.indices(len(self.joints))
        student, teacher = (
            [0 if not unit else int(ends[unit - 1]) for unit in (start, stop)]
            for ends in (self.units.student_ends, self.units.teacher_ends)
        )
        units = Units(
            self.units.student_ends[start:stop] - student[0],
            self.units.teacher_ends[start:stop] - teacher[0],
            self.units.num_bytes[start:stop],
            self.units.aligned[start:stop],
        )
        settled = min(max(self.num_settled - start, 0), stop - start)
        return Part(units, self.teacher_ids[slice(*teacher)], student[1] - student[0], settled, self.joints[start:stop])


def one_unit(num_student: int, teacher_ids: Array, num_bytes: int, *, aligned: bool, closed: bool) -> Part:
    """A part of one unit. `closed`: no further text can change it."""
    units = Units(np.array([num_student]), np.array([len(teacher_ids)]), np.array([num_bytes]), np.array([aligned]))
    return Part(units, teacher_ids, num_student, int(closed), np.array([END if closed else NO_JOINT], np.int8))


def joined(parts: Sequence[Part]) -> Part:
    """The parts one after another. A part that another follows is settled: each is tokenised by itself."""
    if len(parts) == 1:
        return parts[0]
    num_units = [len(part.joints) for part in parts]
    student_starts = np.cumsum([0, *(part.num_student for part in parts)])
    teacher_starts = np.cumsum([0, *(len(part.teacher_ids) for part in parts)])
    empty = np.zeros(0, np.int32)

    def together(arrays: Sequence[Array], dtype: type) -> Array:
        return np.concatenate([empty, *arrays]).astype(dtype)

    joints = together([part.joints for part in parts], np.int8)
    joints[np.cumsum(num_units[:-1], dtype=np.int64) - 1] = END
    return Part(
        Units(
            student_ends=together([part.units.student_ends + start for part, start in zip(parts, student_starts)], np.int64),
            teacher_ends=together([part.units.teacher_ends + start for part, start in zip(parts, teacher_starts)], np.int64),
            num_bytes=together([part.units.num_bytes for part in parts], np.int64),
            aligned=together([part.units.aligned for part in parts], bool),
        ),
        teacher_ids=together([part.teacher_ids for part in parts], np.int32),
        num_student=int(student_starts[-1]),
        num_settled=sum(num_units[:-1]) + parts[-1].num_settled if parts else 0,
        joints=joints,
    )


def span_map(part: Part, context_ids: Array, room: int | None) -> SpanMap:
    """The record of a part after the teacher's context [c].

    Only the first `room` teacher tokens are kept (None: all); units that held others are not aligned.
    """
    found = SpanMap(
        context_ids=np.asarray(context_ids, np.int32),
        token_ids=part.teacher_ids.astype(np.int32),
        student_ends=part.units.student_ends.astype(np.int32),
        teacher_ends=part.units.teacher_ends.astype(np.int32),
        num_bytes=part.units.num_bytes.astype(np.int32),
        aligned=part.units.aligned,
        settled=part.num_settled,
    )
    if room is None or len(found.token_ids) <= max(room, 0):
        return found
    room = max(room, 0)
    return replace(
        found,
        token_ids=found.token_ids[:room],
        teacher_ends=np.minimum(found.teacher_ends, room),
        aligned=found.aligned & (found.teacher_ends <= room),
    )
