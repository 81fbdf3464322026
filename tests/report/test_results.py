"""Metrics of results, and matching problems by key."""

import numpy as np
import pytest

from opd.errors import UserError
from opd.report.results import common_keys, matrix, parse_metric, parse_result


def parsed(*rows, **extra):
    """Rows as (key, verdicts, classes)."""
    written = [
        {"id": key, "key": key, "verdicts": list(verdicts), "classes": list(classes)} for key, verdicts, classes in rows
    ]
    return parse_result({"suite": "s", "rows": written, **extra}, "s")


RIGHT, WRONG, NONE = "correct", "wrong", "no_answer"
FIRST = parsed(("a", [RIGHT, WRONG, WRONG, WRONG], [0, 1, 1, 2]), ("b", [RIGHT, RIGHT, NONE, WRONG], [0, 0, None, 1]))
OTHER = parsed(("b", [WRONG], [3]), ("c", [RIGHT], [0]))


@pytest.mark.parametrize(
    ("metric", "expected"),
    [("accuracy", [0.25, 0.5]), ("pass@1", [0.25, 0.5]), ("pass@2", [0.5, 1 - 1 / 6]), ("maj@4", [0.0, 1.0])],
)
def test_scores_of_a_problem(metric, expected):
    scores = parse_metric(metric).scores(FIRST)
    assert scores is not None
    np.testing.assert_allclose(scores, expected)


def test_too_few_samples_have_no_score():
    assert parse_metric("pass@2").scores(OTHER) is None
    assert parse_metric("maj@2").scores(OTHER) is None


def test_the_mean_is_the_written_figure_where_there_is_one():
    assert parse_metric("accuracy").mean(FIRST) == pytest.approx(0.375)
    assert parse_metric("pass@2").mean(parsed(("a", [RIGHT], [0]), **{"pass@2": 0.75})) == 0.75


@pytest.mark.parametrize("name", ["pass@0", "pass", "maj@x", "f1", "pass@04x"])
def test_other_metrics_are_refused(name):
    with pytest.raises(UserError, match="--metric"):
        parse_metric(name)


def test_problems_are_matched_by_key_in_one_order():
    assert common_keys([FIRST, OTHER]) == ["b"]
    assert common_keys([]) == []
    scores = matrix([FIRST, OTHER], parse_metric("accuracy"), ["b"])
    assert scores is not None
    np.testing.assert_allclose(scores, [[0.5], [0.0]])


def test_a_matrix_needs_every_result():
    assert matrix([FIRST, OTHER], parse_metric("pass@2"), ["b"]) is None
