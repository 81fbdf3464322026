"""A student's tokens beside a teacher's: one pair of tokenizers, aligned turn by turn.

The student's text is tokenised by the teacher, and both are cut where their bytes agree (`opd.alignment.spans`). Tokens
that are more than text go through a table (`opd.alignment.special_tokens`); an EOS that the student sampled is the
teacher's turn end, and none is invented.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from opd.alignment import spans, utf8
from opd.alignment.settled import Settling
from opd.alignment.special_tokens import SpecialRow, SpecialTable, turn_end
from opd.alignment.token_bytes import TokenBytes
from opd.errors import UserError
from opd.records import Array, Prompt, SpanMap


@dataclass(frozen=True, eq=False)
class _Part:
    """The units of some consecutive student tokens; offsets count from the part's own beginning."""

    units: spans.Units
    teacher_ids: Array
    num_student: int
    num_settled: int


class Aligner:
    """One student tokenizer against one teacher tokenizer.

    Example: `Aligner(student, teacher, student_eos=(2,), teacher_eos=(151645,)).align(turn.sampled_ids, context_ids)`
    """

    def __init__(
        self,
        student: Any,
        teacher: Any,
        *,
        student_eos: Sequence[int],
        teacher_eos: Sequence[int],
        special_tokens: Mapping[str, str] | None = None,
        max_context: int | None = None,
        field: str = "teacher",
        student_field: str = "student.model",
    ) -> None:
        """`student` and `teacher` are fast transformers tokenizers, the others the ids that end their turns.

        `special_tokens` says what the teacher reads for an added token of the student: a token of its own, other text, or
        nothing (`""`, masked). `max_context` is the most tokens the teacher takes. Raises `UserError` naming `field`, or
        `student_field` for the student's tokenizer.
        """
        self._teacher, self._field, self._max_context = teacher, field, max_context
        self._student_eos = frozenset(student_eos)
        self._student_backend = _backend(student, student_field)
        self._backend = _plain_reader(_backend(teacher, field))
        self._student_bytes = TokenBytes.of(self._student_backend, student_field)
        self._teacher_bytes = TokenBytes.of(self._backend, field)
        self._settling = Settling(self._backend)
        self._turn_end = turn_end(teacher, teacher_eos)
        table = SpecialTable(
            self._student_backend,
            self._backend,
            student_eos=student_eos,
            turn_end=self._turn_end,
            chosen=special_tokens or {},
            template=teacher.chat_template if isinstance(teacher.chat_template, str) else "",
            field=field,
        )
        self.special_table: tuple[SpecialRow, ...] = table.rows
        self.special_lines: list[str] = table.lines()
        # What stands for itself, apart from the text around it. A special token without a row is one the table masks.
        self._apart = self._student_bytes.special.copy()
        self._read_as: dict[int, tuple[int, ...]] = {}
        for row in self.special_table:
            if row.how != "turn end" and not row.in_text:
                self._apart[row.index] = True
                self._read_as[row.index] = row.teacher_ids

    def context(self, prompt: Prompt) -> Array:
        """[c] int32: the prompt as the teacher sees it, under its own chat template.

        Raises `UserError` naming the teacher's field where the template does not take the conversation.
        """
        from opd.tokenization import render  # which needs transformers

        if prompt.text is None and not self._teacher.chat_template:
            raise UserError(
                f"{self._field}: its tokenizer has no chat template to show it the conversation; choose an instruct model, "
                "or use prompts.plain=true"
            )
        try:
            return render(self._teacher, prompt)
        except UserError as error:
            raise UserError(f"{self._field}: {error}") from None

    def align(self, sampled_ids: Array, context_ids: Array) -> SpanMap:
        """The sampled tokens [n] of a turn, or of its beginning, beside the teacher's tokens of the same text.

        `context_ids` [c] are the teacher's, as from `context`. Teacher tokens beyond `max_context` are cut off, and the
        units that held them are not aligned.
        """
        ids = np.asarray(sampled_ids)
        parts = []
        for start, stop, first in self._stretches(ids):
            apart = stop == start + 1 and self._is_apart(ids, start)
            parts.append(self._align_apart(ids, start) if apart else self._align_text(ids[start:stop], first))
        joined = _joined(parts, np.asarray(context_ids, np.int32))
        return joined if self._max_context is None else _within(joined, self._max_context - len(context_ids))

    def text_of(self, sampled_ids: Array) -> str:
        """The text of sampled tokens [n] that the teacher is shown, without what the special table puts in its place."""
        ids = np.asarray(sampled_ids)
        stretches = [(ids[start:stop], first) for start, stop, first in self._stretches(ids)]
        return "".join(utf8.read(self._student_bytes.text(part, first)[0].tobytes()).text for part, first in stretches)

    def pieces(self, spans: SpanMap, sampled_ids: Array) -> tuple[list[bytes], list[bytes]]:
        """What each student token [n] and each teacher token [m] writes, to show it: its name where it has no bytes."""
        sides = (
            (self._student_bytes, self._student_backend, sampled_ids),
            (self._teacher_bytes, self._backend, spans.token_ids),
        )
        student, teacher = (
            [table[row] or (backend.id_to_token(row) or "").encode() for row in table.rows(np.asarray(ids)).tolist()]
            for table, backend, ids in sides
        )
        return student, teacher

    @cached_property
    def same_bytes(self) -> Array:
        """[V] int32 over the student's ids: the teacher's token of the same bytes, or by the special table; -1 for none."""
        student, teacher = self._student_bytes, self._teacher_bytes
        by_bytes: dict[bytes, int] = {}
        for index in np.argsort(teacher.fallback[:-1], kind="stable").tolist():  # a byte's own token before its stand-in
            by_bytes.setdefault(teacher[index], index)
        by_bytes.pop(b"", None)
        found = np.array([by_bytes.get(student[index], -1) for index in range(len(student))], np.int32)
        for row in self.special_table:
            if row.index < len(found):
                found[row.index] = row.teacher_ids[0] if len(row.teacher_ids) == 1 else -1
        return found

    def _is_apart(self, ids: Array, index: int) -> bool:
        last = index == len(ids) - 1
        return (last and int(ids[index]) in self._student_eos) or bool(
            self._apart[min(ids[index], len(self._student_bytes))]
        )

    def _stretches(self, ids: Array) -> list[tuple[int, int, bool]]:
        """(first token, end, whether it is the text's beginning) of each stretch of text and of each token apart from it."""
        apart = self._apart[self._student_bytes.rows(ids)]
        if len(ids):
            apart[-1] = self._is_apart(ids, len(ids) - 1)
        found, start = [], 0
        for stop in [*np.flatnonzero(apart).tolist(), len(ids)]:
            if stop > start:
                found.append((start, stop, start == 0))
            if stop < len(ids):
                found.append((stop, stop + 1, stop == 0))
            start = stop + 1
        return found

    def _align_apart(self, ids: Array, index: int) -> _Part:
        token = int(ids[index])
        ends_turn = index == len(ids) - 1 and token in self._student_eos
        teacher_ids = (self._turn_end,) if ends_turn else self._read_as.get(token, ())
        num_bytes = 0 if ends_turn else int(self._student_bytes.sizes[self._student_bytes.rows(ids[index])])
        units = _one_unit(1, len(teacher_ids), num_bytes, aligned=bool(teacher_ids))
        return _Part(units, np.array(teacher_ids, np.int32), 1, num_settled=1)

    def _align_text(self, ids: Array, first: bool) -> _Part:
        written, student_ends = self._student_bytes.text(ids, first)
        if not len(written):
            return _Part(_one_unit(len(ids), 0, 0, aligned=False), np.zeros(0, np.int32), len(ids), 0)
        read = utf8.read(written.tobytes())
        if read.invalid and (spelled_out := self._spelled_out(written, read)) is not None:
            teacher_ids, num_settled = spelled_out
            units = spans.refine(student_ends, spans.place_exact(self._teacher_bytes.join(teacher_ids)[1], len(written)))
            return _Part(units, teacher_ids, len(ids), _settled_units(units, num_settled))
        encoding = self._backend.encode(read.text, add_special_tokens=False)
        teacher_ids = np.array(encoding.ids, np.int32)
        spelled, teacher_ends = self._teacher_bytes.join(teacher_ids)
        shown = written[: read.size]
        if np.array_equal(spelled, shown):
            placed = spans.place_exact(teacher_ends, len(written))
        elif np.array_equal(spelled[1:], shown) and spelled[0] == spans.SPACE:  # which the teacher puts before each text
            teacher_ends = np.maximum(teacher_ends - 1, 0)
            placed = spans.place_exact(teacher_ends, len(written))
        else:
            offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2)
            placed = spans.place_by_offsets(written, read.char_starts(written), offsets, spelled, teacher_ends)
        units = spans.refine(student_ends, placed)
        return _Part(units, teacher_ids, len(ids), _settled_units(units, self._settling.count(encoding, read.text)))

    def _spelled_out(self, written: Array, read: utf8.Reading) -> tuple[Array, int] | None:
        """The teacher's ids [m] of text with invalid bytes, each of which it has a token for; and how many are settled.

        None where it lacks such tokens. Were invalid bytes shown as U+FFFD, nothing would judge them, and a student whose
        other tokens are mostly judged unfavourably would learn to write them.
        """
        ids: list[int] = []
        at = 0
        for start, end in (*read.invalid, (read.size, read.size)):
            text = written[at:start].tobytes().decode()
            encoding = self._backend.encode(text, add_special_tokens=False)
            num_before = len(ids)
            ids += [*encoding.ids, *self._teacher_bytes.of_byte[written[start:end]].tolist()]
            at = end
        found = np.array(ids, np.int32)
        if found.min(initial=0) < 0 or not np.array_equal(self._teacher_bytes.join(found)[0], written[: read.size]):
            return None
        return found, num_before + self._settling.count(encoding, text)


def _settled_units(units: spans.Units, num_tokens: int) -> int:
    """Units that lie within the first `num_tokens` teacher tokens; what no token spells yet may be spelled later."""
    count = int(np.searchsorted(units.teacher_ends, num_tokens, side="right"))
    while count and units.teacher_ends[count - 1] == (units.teacher_ends[count - 2] if count > 1 else 0):
        count -= 1
    return count


def _one_unit(num_student: int, num_teacher: int, num_bytes: int, aligned: bool) -> spans.Units:
    return spans.Units(np.array([num_student]), np.array([num_teacher]), np.array([num_bytes]), np.array([aligned]))


def _joined(parts: Sequence[_Part], context_ids: Array) -> SpanMap:
    """The parts one after another. A part that another follows is settled: each is tokenised by itself."""
    num_units = [len(part.units.aligned) for part in parts]
    student_starts = np.cumsum([0, *(part.num_student for part in parts)])[:-1]
    teacher_starts = np.cumsum([0, *(len(part.teacher_ids) for part in parts)])[:-1]
    empty = np.zeros(0, np.int32)

    def joined(arrays: Sequence[Array], dtype: type) -> Array:
        return np.concatenate([empty, *arrays]).astype(dtype)

    return SpanMap(
        context_ids=context_ids,
        token_ids=joined([part.teacher_ids for part in parts], np.int32),
        student_ends=joined([part.units.student_ends + start for part, start in zip(parts, student_starts)], np.int32),
        teacher_ends=joined([part.units.teacher_ends + start for part, start in zip(parts, teacher_starts)], np.int32),
        num_bytes=joined([part.units.num_bytes for part in parts], np.int32),
        aligned=joined([part.units.aligned for part in parts], bool),
        settled=sum(num_units[:-1]) + parts[-1].num_settled if parts else 0,
    )


def _within(found: SpanMap, room: int) -> SpanMap:
    """Only the first `room` teacher tokens; what held others is not aligned."""
    room = max(room, 0)
    if len(found.token_ids) <= room:
        return found
    return replace(
        found,
        token_ids=found.token_ids[:room],
        teacher_ends=np.minimum(found.teacher_ends, room),
        aligned=found.aligned & (found.teacher_ends <= room),
    )


def _backend(tokenizer: Any, field: str) -> Any:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        raise UserError(
            f"{field}: {type(tokenizer).__name__} is a slow tokenizer, which does not tell the bytes of its tokens; use a "
            "model with a tokenizer.json"
        )
    return backend


def _plain_reader(backend: Any) -> Any:
    """A tokenizer of its own that reads the text of a special token as text, and whose offsets are not trimmed."""
    reader = Tokenizer.from_str(backend.to_str())
    reader.encode_special_tokens = True
    reader.no_padding()
    reader.no_truncation()
    reader.post_processor = None  # type: ignore[assignment]
    return reader
