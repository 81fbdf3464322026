"""Tables: rows of values that are written as text for readers, and as bare numbers for CSV."""

import csv
import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from opd.eval.statistics import Interval
from opd.report.text import duration, nats, one_line, p_value, quantity

NOTHING = "–"
Kind = Literal[
    "text", "count", "percent", "share", "points", "recovery", "p", "nats", "quantity", "number", "ratio", "duration"
]
FORMATS: dict[str, Callable[[float], str]] = {
    "count": lambda value: f"{value:.0f}",
    "percent": lambda value: f"{100 * value:.1f}",
    "share": lambda value: f"{100 * value:.1f}",
    "points": lambda value: f"{round(100 * value, 1) + 0.0:+.1f}",
    "recovery": lambda value: f"{100 * value:.0f}",
    "p": p_value,
    "nats": nats,
    "quantity": quantity,
    "number": lambda value: f"{value:.1f}",
    "ratio": lambda value: f"{value:.3f}",
    "duration": duration,
}
UNITS = {"percent": " (%)", "points": " (points)", "recovery": " (%)", "nats": " (nats/token)"}
RAW_UNITS = {"nats": "_nats_per_token", "duration": "_s"}  # percentages are fractions there
FORMULA = ("=", "+", "-", "@")  # begin what a spreadsheet would run


@dataclass(frozen=True)
class Column:
    """`name` is the column's in CSV, where it is not the head."""

    head: str
    kind: Kind = "text"
    name: str = ""

    @property
    def title(self) -> str:
        return self.head + UNITS.get(self.kind, "")

    def show(self, value: Any) -> str:
        """A value as text; an `Interval` with its bounds."""
        if isinstance(value, str):
            return one_line(value)
        if isinstance(value, Interval):
            estimate, low, high = map(self.show, (value.value, value.low, value.high))
            return estimate if math.isnan(value.low) else f"{estimate} [{low}, {high}]"
        if value is None or math.isnan(value):
            return NOTHING
        return FORMATS[self.kind](value) if math.isfinite(value) else "∞" if value > 0 else "-∞"


@dataclass(frozen=True)
class Table:
    """`name` is the file's; a row has a value a column: text, a number, an `Interval`, or None."""

    name: str
    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Any]]
    note: str = ""

    def shown(self) -> list[list[str]]:
        return [[column.show(value) for column, value in zip(self.columns, row)] for row in self.rows]

    def csv(self) -> str:
        """Bare numbers; an interval takes three columns."""
        wide = [any(isinstance(row[place], Interval) for row in self.rows) for place in range(len(self.columns))]
        names = [
            _bare(column.name or column.head).replace(" ", "_") + RAW_UNITS.get(column.kind, "") for column in self.columns
        ]
        file = io.StringIO()
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(
            name for head, both in zip(names, wide) for name in ([head, f"{head}_low", f"{head}_high"] if both else [head])
        )
        for row in self.rows:
            writer.writerow(cell for value, both in zip(row, wide) for cell in (_three(value) if both else [_bare(value)]))
        return file.getvalue()

    def markdown(self) -> str:
        heads = [_escape(column.title) for column in self.columns]
        rules = ["---" if column.kind == "text" else "---:" for column in self.columns]
        body = [[_escape(cell) for cell in row] for row in self.shown()]
        lines = [f"| {' | '.join(cells)} |" for cells in [heads, rules, *body]]
        return "\n".join([f"**{_escape(self.title)}**", "", *lines, *(["", _escape(self.note)] if self.note else [])]) + "\n"


def _bare(value: Any) -> Any:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, str):
        text = one_line(value)
        return f"'{text}" if text.startswith(FORMULA) else text
    return repr(float(value)) if isinstance(value, float) else value  # numpy would name its type


def _three(value: Any) -> list[Any]:
    if isinstance(value, Interval):
        return [_bare(float(number)) for number in (value.value, value.low, value.high)]
    return [_bare(value), "", ""]


def _escape(text: str) -> str:
    for mark in "\\`*_[]|":
        text = text.replace(mark, f"\\{mark}")
    return text.replace("<", "&lt;").replace("\n", " ")
