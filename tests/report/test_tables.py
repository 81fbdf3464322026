"""Tables as text, as CSV and as Markdown."""

import csv
import io
from math import inf, nan

import numpy as np
import pytest

from opd.eval.statistics import Difference, Interval
from opd.report.tables import Column, Table
from opd.report.text import duration, nats, one_line, p_value, quantity, visible


@pytest.mark.parametrize(
    ("kind", "value", "text"),
    [
        ("percent", Interval(0.5, 0.4, 0.65), "50.0 [40.0, 65.0]"),
        ("points", Difference(-0.0001, -0.05, 0.05, 0.9), "+0.0 [-5.0, +5.0]"),
        ("points", -0.031, "-3.1"),
        ("recovery", Interval(0.5, -inf, inf), "50 [-∞, ∞]"),
        ("recovery", Interval(nan, nan, nan), "–"),
        ("percent", Interval(0.5, nan, nan), "50.0"),
        ("p", 0.0002, "<0.001"),
        ("p", 0.0213, "0.021"),
        ("count", 40.0, "40"),
        ("count", None, "–"),
        ("quantity", nan, "–"),
        ("count", "not reached", "not reached"),
    ],
)
def test_a_value_as_text(kind, value, text):
    assert Column("x", kind).show(value) == text


@pytest.mark.parametrize(
    ("function", "value", "text"),
    [
        (quantity, 950, "950"),
        (quantity, 81_700, "81.7k"),
        (quantity, 817_299, "817k"),
        (quantity, 1.2e6, "1.20M"),
        (duration, 12.34, "12.3 s"),
        (duration, 246, "4.1 min"),
        (duration, 7200, "2.0 h"),
        (nats, 2.5287, "2.53"),
        (nats, 0.03238, "0.0324"),
        (nats, 0.000012, "0.0000"),
        (nats, 0.0, "0"),
        (nats, -0.5, "-0.500"),
        (p_value, 0.5, "0.500"),
    ],
)
def test_numbers(function, value, text):
    assert function(value) == text


def test_csv_has_bare_numbers_and_three_columns_for_an_interval():
    columns = [Column("group"), Column("accuracy", "percent"), Column("difference to a", "points", "difference")]
    rows = [["a", Interval(0.5, 0.25, 0.75), None], ["b", None, Difference(0.1, 0.0, 0.2, 0.04)]]
    found = list(csv.reader(io.StringIO(Table("t", "T", columns, rows).csv())))
    assert found == [
        ["group", "accuracy", "accuracy_low", "accuracy_high", "difference", "difference_low", "difference_high"],
        ["a", "0.5", "0.25", "0.75", "", "", ""],
        ["b", "", "", "", "0.1", "0.0", "0.2"],
    ]


def test_csv_never_begins_a_formula():
    table = Table("t", "T", [Column("=x"), Column("n", "points")], [["=cmd()|'/c calc'!A1", -1.0], ["@sum", 2]])
    assert list(csv.reader(io.StringIO(table.csv()))) == [["'=x", "n"], ["'=cmd()|'/c calc'!A1", "-1.0"], ["'@sum", "2"]]


def test_markdown_keeps_its_shape():
    text = Table("t", "T", [Column("a|b"), Column("n", "count")], [["x|y\n<b>`*_[", 1]], "A note.").markdown()
    assert text == ("**T**\n\n| a\\|b | n |\n| --- | ---: |\n| x\\|y &lt;b>\\`\\*\\_\\[ | 1 |\n\nA note.\n")


def test_what_acts_instead_of_being_seen_is_shown_by_its_code():
    assert visible("a\x1b[2J\u202eb\u200f\r\n\tc") == "a\\u001b[2J\\u202eb\\u200f\\u000d\n\tc"


def test_long_text_is_cut_in_the_middle_of_one_line():
    assert one_line("a\n  b") == "a b"
    cut = one_line("x" * 1_000_000, 20)
    assert len(cut) == 20
    assert "…" in cut


def test_numbers_of_numpy_are_bare_numbers():
    assert Table("t", "T", [Column("x", "quantity")], [[np.float64(0.5)]]).csv() == "x\n0.5\n"
