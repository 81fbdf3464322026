"""Grading a file of responses: `opd grade`."""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, get_args

from opd.errors import UserError
from opd.eval.grading import Grade, Grader, Item, Verdict
from opd.spelling import nearest

CHUNK_ROWS = 256


@dataclass(frozen=True)
class Columns:
    """The names under which rows keep their response and their correct answer."""

    response: str = "response"
    answer: str = "answer"


@dataclass(frozen=True)
class Rows:
    """The lines of a file, with its name for messages. They are kept, since a pipe can be read only once."""

    name: str
    lines: Sequence[bytes]


def read_rows(path: Path) -> Rows:
    """The lines of a file; `-` is standard input. Raises UserError if it cannot be read."""
    if str(path) == "-":
        return Rows("standard input", list(sys.stdin.buffer))
    try:
        with path.open("rb") as file:
            return Rows(str(path), list(file))
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None


def read_items(rows: Rows, columns: Columns, *, need_answer: bool = True) -> Iterator[tuple[Any, Item]]:
    """(id or None, item) of each row of JSON. Raises UserError naming the line of a row it cannot use.

    A row with `"finish": "length"` or `"truncated": true` holds a response that ended at its token limit.
    """
    for number, line in enumerate(rows.lines, start=1):
        if line.strip():
            row = _row(line, f"line {number} of {rows.name}")
            yield row.get("id"), _item(row, columns, f"line {number} of {rows.name}", need_answer)


def _row(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} is not valid JSON: {error}") from None
    if not isinstance(row, dict):
        raise UserError(f"{where} is not a JSON object")
    return row


def _item(row: dict[str, Any], columns: Columns, where: str, need_answer: bool) -> Item:
    if columns.response not in row:
        hint = nearest(columns.response, row)
        raise UserError(f"{where} has no {columns.response!r}{hint}; name the column with --response NAME")
    response, answer = row[columns.response], row.get(columns.answer)
    if not isinstance(response, str):
        raise UserError(f"{where}: {columns.response!r} must be text, not {type(response).__name__}")
    answers = answer if isinstance(answer, list) else [answer]
    if need_answer and (not answers or answer is None):
        raise UserError(f"{where} has no {columns.answer!r}; name the column with --answer NAME, or set --reward")
    if answer is not None and not all(isinstance(a, str | int | float) and not isinstance(a, bool) for a in answers):
        raise UserError(f"{where}: {columns.answer!r} must be text, a number, or a list of these")
    texts = [str(answer) for answer in answers]
    truncated = row.get("finish") == "length" or row.get("truncated") is True
    return Item(response, None if answer is None else texts if isinstance(answer, list) else texts[0], truncated, row)


def grade_file(rows: Rows, columns: Columns, grader: Grader) -> Iterator[tuple[dict[str, Any], Grade]]:
    """(line to print, grade) of each row in the file's order, graded in chunks. Raises UserError."""
    items = read_items(rows, columns, need_answer=grader.verifier is None)
    done = 0
    while chunk := list(islice(items, CHUNK_ROWS)):
        try:
            grades = grader.grade_many([item for _, item in chunk])
        except UserError as error:
            raise UserError(f"rows {done + 1} to {done + len(chunk)} of {rows.name}: {error}") from None
        for (name, _), grade in zip(chunk, grades, strict=True):
            line = {"id": name} if name is not None else {}
            score = {} if grade.score is None else {"score": grade.score}
            yield {**line, "verdict": grade.verdict, "extracted": grade.extracted, **score}, grade
        done += len(chunk)


def summary(grades: Sequence[Grade]) -> Mapping[str, float]:
    """Rows, and the number and share of each verdict; with a verifier also the mean score."""
    counts = {verdict: sum(grade.verdict == verdict for grade in grades) for verdict in get_args(Verdict)}
    rates = {f"{verdict}_rate": round(count / len(grades), 6) for verdict, count in counts.items()}
    scores = [grade.score for grade in grades if grade.score is not None]
    return {"rows": len(grades), **counts, **rates} | ({"mean_score": sum(scores) / len(scores)} if scores else {})
