"""The whole table of coverages: `benchmarks/results/statistics.json` has the figures of more rounds."""

import json
from pathlib import Path

import pytest

from benchmarks.statistics import mean_row, runs_row

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "statistics.json"


def test_the_kept_figures_are_what_the_documentation_says():
    figures = json.loads(RESULTS.read_text())
    for row in figures["mean"]:
        # Counts of 30 problems lie far apart: with one sample of each the interval is conservative on purpose.
        coarse = row["samples"] == 1 and row["problems"] == 30
        assert 0.93 <= row["coverage"] <= (1 if coarse else 0.97), row
    for row in figures["runs"]:
        # Few seeds make Student's t large, so that the interval is conservative where they differ little, exact where a lot.
        assert 0.93 <= row["coverage"] <= (0.97 if row["runs"] == 5 and row["spread"] == 1 else 0.995), row
    for row in figures["difference"] + figures["difference_of_runs"]:
        # A difference allows for a problem more either way: conservative with few samples, and with few seeds as above.
        several = row["runs"] == 1 and row["samples"] > 1
        assert 0.93 <= row["coverage"] <= (0.975 if several else 0.995), row
        assert row["difference"] or row["rejected"] <= 0.055, row  # 0.05, and a standard error of 0.005
    for row in figures["rare"]:
        assert row["rejected"] <= 0.05, row
        assert row["rejected"] == pytest.approx(1 - row["coverage"]), row  # p and the interval agree
    for row in figures["suites"]:
        assert 0.93 <= row["coverage"] <= (0.975 if row["runs"] == 1 and row["samples"] > 1 else 0.995), row
    for row in figures["recovery"]:
        assert 0.93 <= row["coverage"] <= 0.97, row
    for row in figures["power"]:
        assert row.get("rejected", 0.8) >= 0.7, row


@pytest.mark.slow
@pytest.mark.parametrize("problems", [30, 100])
@pytest.mark.parametrize("samples", [4, 8])
@pytest.mark.parametrize("accuracy", [0.1, 0.3, 0.5, 0.7, 0.9])
def test_coverage(problems, samples, accuracy):
    assert 0.93 <= mean_row(problems, samples, accuracy, 1.0, rounds=2000)["coverage"] <= 0.97


@pytest.mark.slow
@pytest.mark.parametrize("num_runs", [2, 3, 5])
@pytest.mark.parametrize("spread", [0.0, 0.1, 0.3, 1.0])
def test_coverage_of_runs(num_runs, spread):
    """Conservative where seeds differ less than a t quantile of so few of them allows for."""
    assert 0.93 <= runs_row(100, 4, num_runs, spread, rounds=2000)["coverage"] <= 0.995
