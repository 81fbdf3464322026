"""An alignment to look at: the student's tokens and the teacher's under each other, unit by unit, in plain text."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len, set_cell_size

from opd.records import SpanMap

UNALIGNED = "x"
LEGEND = f"units are between |, tokens between +; a:b counts tokens where not 1:1, {UNALIGNED} marks what is not aligned"
VISIBLE = {" ": "·", "\n": "↵", "\t": "→", "|": "\\|", "+": "\\+"}
MAX_ROWS = 8  # of one line of the text


@dataclass(frozen=True)
class Unit:
    """A unit as shown: the tokens of either side, and below them its sizes or that it is not aligned."""

    student: str
    teacher: str
    mark: str  # "" for one token on either side, `2:1` for others, `x` for what is not aligned

    @property
    def width(self) -> int:
        return max(map(cell_len, (self.student, self.teacher, self.mark)))


def units(spans: SpanMap, student: Sequence[bytes], teacher: Sequence[bytes]) -> list[Unit]:
    """The units of an alignment; `student` [n] and `teacher` [m] are what each token writes."""
    found = []
    i = j = 0
    for i_end, j_end, aligned in zip(spans.student_ends.tolist(), spans.teacher_ends.tolist(), spans.aligned.tolist()):
        sizes = f"{i_end - i}:{j_end - j}"
        mark = UNALIGNED if not aligned else "" if sizes == "1:1" else sizes
        found.append(Unit(_shown(student[i:i_end]), _shown(teacher[j:j_end]), mark))
        i, j = i_end, j_end
    return found


def lines(shown: Sequence[Unit], num_lines: int, width: int = 100) -> list[str]:
    """The first `num_lines` lines of the text: rows of at most `width` columns, each of a line a side and one of marks.

    Of a long line the first `MAX_ROWS` rows are shown, and how many units follow.
    """
    found: list[str] = []
    row: list[Unit] = []
    num_ended = num_rows = num_left = 0
    for unit in shown:
        if num_ended == num_lines:
            break
        if num_rows == MAX_ROWS:
            num_left += 1
        elif row and _width(row) + 1 + unit.width > width:
            found += _row(row)
            num_rows += 1
            row = [unit] if num_rows < MAX_ROWS else []
            num_left += num_rows == MAX_ROWS
        else:
            row.append(unit)
        if VISIBLE["\n"] in unit.student:
            found += [*_row(row), *_rest(num_left)]
            row, num_ended, num_rows, num_left = [], num_ended + 1, 0, 0
    return [*found, *_row(row), *_rest(num_left)]


def _rest(num_units: int) -> list[str]:
    return [f"         ... and {num_units} more units of this line"] if num_units else []


def _width(row: Sequence[Unit]) -> int:
    return len("student  ") + sum(unit.width + 1 for unit in row)


def _row(row: Sequence[Unit]) -> list[str]:
    if not row:
        return []
    found = []
    for head, name, between in (("student", "student", "|"), ("teacher", "teacher", "|"), ("", "mark", " ")):
        cells = between.join(set_cell_size(getattr(unit, name), unit.width) for unit in row)
        found.append(f"{head:9}{cells}".rstrip())
    return found


def _shown(tokens: Sequence[bytes]) -> str:
    """Tokens as written, `+` between them; white space visible, bytes that are no character as `\\xe9`."""
    return "+".join(_readable(token.decode(errors="backslashreplace")) for token in tokens)


def _readable(text: str) -> str:
    return "".join(VISIBLE.get(c, c if c.isprintable() else c.encode("unicode_escape").decode()) for c in text)
