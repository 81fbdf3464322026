"""Alignments as shown."""

import numpy as np

from opd.alignment import side_by_side
from opd.records import SpanMap

SPANS = SpanMap(
    context_ids=np.zeros(0, np.int32),
    token_ids=np.arange(4, dtype=np.int32),
    student_ends=np.array([1, 3, 4, 5]),
    teacher_ends=np.array([1, 2, 3, 4]),
    num_bytes=np.array([3, 2, 1, 2]),
    aligned=np.array([True, True, False, True]),
)
SHOWN = side_by_side.units(
    SPANS, [b"So ", b"\xc3", b"\xa9", b"\n", "天".encode()], [b"So ", "é".encode(), b"x", "天".encode()]
)


def test_units_show_white_space_split_characters_and_marks():
    assert [(unit.student, unit.teacher, unit.mark) for unit in SHOWN] == [
        ("So·", "So·", ""),
        ("\\xc3+\\xa9", "é", "2:1"),
        ("↵", "x", "x"),
        ("天", "天", ""),
    ]


def test_rows_end_with_the_texts_lines_and_the_terminals_width():
    assert side_by_side.lines(SHOWN, 9) == [
        "student  So·|\\xc3+\\xa9|↵",
        "teacher  So·|é        |x",
        "             2:1       x",
        "student  天",
        "teacher  天",
        "",
    ]
    assert side_by_side.lines(SHOWN, 1)[-1].endswith("x")
    assert side_by_side.lines(SHOWN, 0) == []
    narrow = side_by_side.lines(SHOWN, 9, width=20)
    assert len(narrow) == 12
    assert max(map(len, narrow)) <= 20


def test_a_long_line_is_cut_and_separators_in_the_text_are_told_apart():
    unit = side_by_side.Unit("a", "a", "")
    end = side_by_side.Unit("↵", "↵", "")
    rows = side_by_side.lines([unit] * 1000 + [end] + [unit] * 3, 2, width=19)
    assert rows[-4:] == ["         ... and 961 more units of this line", "student  a|a|a", "teacher  a|a|a", ""]
    assert side_by_side._shown([b"|", b"+"]) == "\\|+\\+"
