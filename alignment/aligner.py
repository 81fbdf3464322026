"""A student's tokens beside a teacher's: one pair of tokenizers, aligned turn by turn.

The student's text is tokenised by the teacher, and both are cut where their bytes agree (`opd.alignment.spans`). Tokens
that are more than text go through a table (`opd.alignment.special_tokens`); an EOS that the student sampled is the
teacher's turn end, and none is invented.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from opd.alignment import spans, utf8
from opd.alignment.growing import Growing
from opd.alignment.parts import INNER_JOINT, NO_JOINT, Part, joined, one_unit, span_map
from opd.alignment.settled import Settling
from opd.alignment.special_tokens import SpecialRow, SpecialTable, turn_end
from opd.alignment.token_bytes import TokenBytes
from opd.errors import UserError
from opd.records import Array, Prompt, SpanMap


@dataclass(frozen=True, eq=False)
class _Segment:
    """Bytes of a text that the teacher reads by themselves."""

    teacher_ids: Array
    placed: spans.Placed
    text: str
    encoding: Any  # None where the bytes are no text


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
        room = None if self._max_context is None else self._max_context - len(context_ids)
        return span_map(joined(self.parts(np.asarray(sampled_ids))), context_ids, room)

    def growing(self, context_ids: Array) -> Growing:
        """The alignment of a turn that still grows: what `align` says of every beginning, at the cost of what is new."""
        room = None if self._max_context is None else self._max_context - len(context_ids)
        return Growing(self.parts, self._student_eos, context_ids, room)

    def parts(self, ids: Array, start: int = 0, *, inner: bool = False, joints: bool = False) -> list[Part]:
        """The parts of the sampled tokens [n] that come after the first `start` ones of the turn.

        `inner`: the text before them goes on in them. With `joints` their joints are found, too.
        """
        found = []
        for begin, end in self._stretches(ids):
            if end == begin + 1 and self._is_apart(ids, begin):
                found.append(self._align_apart(ids, begin))
            else:
                spelled = self._spelled(ids[begin:end], start + begin == 0, inner and begin == 0)
                found.append(self._align_text(*spelled, joints=joints))
        return found

    def text_of(self, sampled_ids: Array) -> str:
        """The text of sampled tokens [n] that the teacher is shown, without what the special table puts in its place."""
        ids = np.asarray(sampled_ids)
        written = (self._spelled(ids[start:stop], start == 0)[0] for start, stop in self._stretches(ids))
        return "".join(utf8.read(data.tobytes()).text for data in written)

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

    def _spelled(self, ids: Array, first: bool, inner: bool = False) -> tuple[Array, Array]:
        """What a stretch of text says, see `TokenBytes.text`; or what goes on from the text before it."""
        return self._student_bytes.join(ids) if inner else self._student_bytes.text(ids, first)

    def _stretches(self, ids: Array) -> list[tuple[int, int]]:
        """(first token, end) of each stretch of text and of each token apart from it."""
        apart = self._apart[self._student_bytes.rows(ids)]
        if len(ids):
            apart[-1] = self._is_apart(ids, len(ids) - 1)
        found, start = [], 0
        for stop in [*np.flatnonzero(apart).tolist(), len(ids)]:
            if stop > start:
                found.append((start, stop))
            if stop < len(ids):
                found.append((stop, stop + 1))
            start = stop + 1
        return found

    def _align_apart(self, ids: Array, index: int) -> Part:
        token = int(ids[index])
        ends_turn = index == len(ids) - 1 and token in self._student_eos
        teacher_ids = np.array((self._turn_end,) if ends_turn else self._read_as.get(token, ()), np.int32)
        num_bytes = 0 if ends_turn else int(self._student_bytes.sizes[self._student_bytes.rows(ids[index])])
        return one_unit(1, teacher_ids, num_bytes, aligned=len(teacher_ids) > 0, closed=True)

    def _align_text(self, written: Array, student_ends: Array, *, joints: bool) -> Part:
        """The units of tokens that end at the bytes `student_ends` [n] of what they have written [b] uint8."""
        if not len(written):
            return one_unit(len(student_ends), np.zeros(0, np.int32), 0, aligned=False, closed=False)
        read = utf8.read(written.tobytes())
        *_, last = segments = list(self._segments(written, read))
        starts = np.cumsum([0, *(len(segment.teacher_ids) for segment in segments)])
        units = spans.refine(student_ends, spans.in_a_row([segment.placed for segment in segments]))
        num_settled = _settled_units(units, starts[-2] + self._settling.count(last.encoding, last.text), read.size)
        teacher_ids = np.concatenate([segment.teacher_ids for segment in segments])
        found = self._joints(segments, starts, units) if joints else np.full(len(units.aligned), NO_JOINT, np.int8)
        return Part(units, teacher_ids, len(student_ends), num_settled, found)

    def _joints(self, segments: Sequence[_Segment], starts: Array, units: spans.Units) -> Array:
        """[u] int8 `Part.joints` of a text whose segments have the teacher tokens from `starts` on."""
        ends = units.teacher_ends
        found = np.isin(ends, starts[1:-1])
        for segment, start, stop in zip(segments, starts, starts[1:]):
            inside = np.flatnonzero((ends > start) & (ends < stop))
            if segment.encoding is None:
                found[inside] = True
            else:
                found[inside] = self._settling.joints(segment.encoding, segment.text, (ends[inside] - start).tolist())
        return np.where(found, INNER_JOINT, NO_JOINT).astype(np.int8)

    def _segments(self, written: Array, read: utf8.Reading) -> Iterator[_Segment]:
        """Text and, between it, invalid bytes for which the teacher has tokens; the last one is text, if of no length.

        Other invalid bytes are U+FFFD in the text. Were all of them, nothing would judge them, and a student whose other
        tokens are mostly judged unfavourably would learn to write them.
        """
        at = 0
        for start, end in read.invalid:
            teacher_ids = self._teacher_bytes.of_byte[written[start:end]]
            if teacher_ids.min() >= 0:
                if at < start:
                    yield self._segment(written[at:start], utf8.read(written[at:start].tobytes(), final=True))
                placed = spans.place_exact(np.arange(1, end - start + 1), end - start)
                yield _Segment(teacher_ids, placed, "", None)
                at = end
        yield self._segment(written[at:], utf8.read(written[at:].tobytes()) if at else read)

    def _segment(self, written: Array, read: utf8.Reading) -> _Segment:
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
        return _Segment(teacher_ids, placed, read.text, encoding)


def _settled_units(units: spans.Units, num_tokens: int, num_bytes: int) -> int:
    """Units that lie within the first tokens of the teacher and bytes of the text, of which `num_bytes` are read.

    What no token spells yet may be spelled later.
    """
    count = int(np.searchsorted(units.teacher_ends, num_tokens, side="right"))
    count = min(count, int(np.searchsorted(np.cumsum(units.num_bytes), num_bytes, side="right")))
    while count and units.teacher_ends[count - 1] == (units.teacher_ends[count - 2] if count > 1 else 0):
        count -= 1
    return count


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
