"""What the teacher reads where the student samples a token that is more than text: one row for each, to be printed.

A student's added token, special or not, is the teacher's token of the same string, or the teacher's way to say the same
(think tags, tool tags), or its literal text; what has no counterpart is masked.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from opd.errors import UserError
from opd.spelling import nearest

How = Literal["turn end", "token", "text", "masked"]

SYNONYMS: tuple[tuple[str, ...], ...] = (
    ("<think>", "[THINK]", "<seed:think>", "<thought>", "<thinking>", "<|START_THINKING|>", "<|begin_of_thought|>"),
    ("</think>", "[/THINK]", "</seed:think>", "</thought>", "</thinking>", "<|END_THINKING|>", "<|end_of_thought|>"),
    ("<tool_call>", "<seed:tool_call>", "<|tool_call_start|>", "<|tool_call_begin|>", "<｜tool▁call▁begin｜>"),
    ("</tool_call>", "</seed:tool_call>", "<|tool_call_end|>", "<｜tool▁call▁end｜>"),
)
"""Tags that mean the same in different families."""


@dataclass(frozen=True)
class SpecialRow:
    """One student token and what the teacher reads instead.

    `token` and `turn end` are one teacher token, `text` is tokenised by the teacher, `masked` is nothing: no loss there.
    """

    token: str
    index: int  # the student's id
    how: How
    teacher: str = ""  # the teacher's token or text
    teacher_ids: tuple[int, ...] = ()
    in_text: bool = False  # part of the text around it, so that the teacher tokenises it with that


class SpecialTable:
    """The rows of a pair of tokenizers."""

    def __init__(
        self,
        student: Any,
        teacher: Any,
        *,
        student_eos: Sequence[int],
        turn_end: int,
        chosen: Mapping[str, str],
        template: str,
    ) -> None:
        """`student` and `teacher` are `tokenizers.Tokenizer`s, the teacher's one reads special tokens as plain text.

        `turn_end` is the teacher's id, `chosen` the user's `special_tokens`, `template` the teacher's chat template. Raises
        `UserError` where `chosen` names no added token of the student.
        """
        self._teacher = teacher
        self._added = {token.content: index for index, token in teacher.get_added_tokens_decoder().items()}
        self._plain = {token.content for token in teacher.get_added_tokens_decoder().values() if not token.special}
        self._template = template
        added = student.get_added_tokens_decoder()
        ends = {student.id_to_token(index): index for index in student_eos}
        _check(chosen, [token.content for token in added.values()], ends)
        end = teacher.id_to_token(turn_end) or ""
        self.rows: tuple[SpecialRow, ...] = tuple(
            self._chosen(token.content, index, chosen[token.content])
            if token.content in chosen
            else SpecialRow(token.content, index, "turn end", end, (turn_end,))
            if index in student_eos
            else self._row(token.content, index, token.special)
            for index, token in sorted(added.items())
        )
        others = [(token, index) for token, index in ends.items() if token is not None and index not in added]
        self.rows += tuple(SpecialRow(token, index, "turn end", end, (turn_end,)) for token, index in others)

    def _row(self, token: str, index: int, special: bool) -> SpecialRow:
        if token in self._added:
            natural = token in self._plain and not special  # the teacher finds it in the text
            return SpecialRow(token, index, "token", token, (self._added[token],), in_text=natural)
        others = [other for group in SYNONYMS if token in group for other in group if other != token]
        for other in others:
            if other in self._added:
                return SpecialRow(token, index, "token", other, (self._added[other],))
        if token not in self._template:
            for other in others:
                if other in self._template:
                    return self._chosen(token, index, other)
        if special:
            return SpecialRow(token, index, "masked")
        return SpecialRow(token, index, "text", token, self._encode(token), in_text=True)

    def _chosen(self, token: str, index: int, value: str) -> SpecialRow:
        if not value:
            return SpecialRow(token, index, "masked")
        if value in self._added:
            return SpecialRow(token, index, "token", value, (self._added[value],))
        return SpecialRow(token, index, "text", value, self._encode(value))

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._teacher.encode(text, add_special_tokens=False).ids)

    def lines(self) -> list[str]:
        """The table as text, a line a row."""
        if not self.rows:
            return ["the student has no special tokens"]
        rows = [(str(row.index), row.token, row.how, _written(row)) for row in self.rows]
        heads = ("id", "student", "read as", "teacher")
        widths = [max(len(cell) for cell in column) for column in zip(heads, *rows)]
        return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in (heads, *rows)]


def turn_end(teacher: Any, teacher_eos: Sequence[int]) -> int:
    """The id that the teacher's own template writes after an assistant's message; else its tokenizer's EOS, else the lowest.

    `teacher` is a transformers tokenizer, `teacher_eos` all ids that end its turns.
    """
    assert teacher_eos, "a teacher without EOS"
    mark = "0end0"
    if teacher.chat_template:
        messages = [{"role": "user", "content": "0"}, {"role": "assistant", "content": mark}]
        for token in teacher(_rendered(teacher, messages).rpartition(mark)[2], add_special_tokens=False)["input_ids"]:
            if token in teacher_eos:
                return int(token)
    return int(teacher.eos_token_id) if teacher.eos_token_id in teacher_eos else min(teacher_eos)


def _rendered(teacher: Any, messages: Sequence[Mapping[str, str]]) -> str:
    from jinja2 import TemplateError

    try:
        return teacher.apply_chat_template(list(messages), tokenize=False)
    except (TemplateError, TypeError, ValueError):  # a template with other needs says nothing about the end of a turn
        return ""


def _check(chosen: Mapping[str, str], tokens: Sequence[str], ends: Mapping[str, int]) -> None:
    for token in chosen:
        if token in ends:
            raise UserError(
                f"alignment.special_tokens: {token!r} ends the student's turn and always is the teacher's turn end; drop it"
            )
        if token not in tokens:
            raise UserError(
                f"alignment.special_tokens: {token!r} is not an added token of the student{nearest(token, tokens)}"
            )


def _written(row: SpecialRow) -> str:
    if row.how == "text":
        return f"{row.teacher!r} in {len(row.teacher_ids)} token{'s' if len(row.teacher_ids) != 1 else ''}"
    return row.teacher
