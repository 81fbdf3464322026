"""Rows of a step: each once an epoch, whatever was asked before."""

import pytest

from opd.strategies.epochs import drawn


@pytest.mark.parametrize("count", [1, 3, 7, 20])
def test_every_row_comes_once_an_epoch(count):
    rows = [row for step in range(21) for row in drawn(7, 5, step, 0, count)]
    for epoch in range(len(rows) // 7):
        assert sorted(rows[epoch * 7 : epoch * 7 + 7]) == list(range(7))


def test_they_stay_what_they_were():
    """Resumed runs must get the same ones from another version."""
    assert drawn(5, 3, 1, 0, 4) == [0, 3, 1, 4]
    assert drawn(5, 3, 1, 1, 4) == [3, 3, 0, 2]
    assert drawn(5, 4, 1, 0, 4) == [3, 4, 3, 1]
