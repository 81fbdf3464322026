import pytest

from opd.eval.t_distribution import quantile


@pytest.mark.parametrize(
    ("level", "df", "expected"),  # from the tables of Abramowitz and Stegun, 26.10
    [(0.95, 1, 12.706), (0.95, 2, 4.303), (0.99, 3, 5.841), (0.9, 5, 2.015), (0.95, 29, 2.045), (0.999, 120, 3.373)],
)
def test_quantiles(level, df, expected):
    assert quantile(level, df) == pytest.approx(expected, abs=6e-4)


def test_many_degrees_of_freedom_are_normal():
    assert quantile(0.95, 100_000) == pytest.approx(1.959964 * (1 + 1.21 / 100_000), abs=1e-5)


def test_levels_close_to_one():
    level = 1 - 1e-9
    assert quantile(level, 2) == pytest.approx(level * (2 / (1 - level**2)) ** 0.5, rel=1e-6)  # its closed form
