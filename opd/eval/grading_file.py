"""Grading a file of responses: `opd grade`."""

import json
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


def read_items(path: Path, columns: Columns, *, need_answer: bool = True) -> Iterator[tuple[Any, Item]]:
    """(id or None, item) of each row of a file of JSON lines. Raises UserError naming the line of a row it cannot use.

    A row with `"finish": "length"` or `"truncated": true` holds a response that ended at its token limit.
    """
    try:
        lines = path.open("rb")
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    with lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                row = _row(line, f"line {number} of {path}")
                yield row.get("id"), _item(row, columns, f"line {number} of {path}", need_answer)


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


def grade_file(path: Path, columns: Columns, grader: Grader) -> Iterator[tuple[dict[str, Any], Grade]]:
    """(line to print, grade) of each row in the file's order, graded in chunks. Raises UserError."""
    rows = read_items(path, columns, need_answer=grader.verifier is None)
    done = 0
    while chunk := list(islice(rows, CHUNK_ROWS)):
        try:
            grades = grader.grade_many([item for _, item in chunk])
        except UserError as error:
            raise UserError(f"rows {done + 1} to {done + len(chunk)} of {path}: {error}") from None
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
