"""The whole table of coverages: `benchmarks/results/statistics.json` has the figures of more rounds."""

import json
from pathlib import Path

import pytest

from benchmarks.statistics import mean_row, runs_row

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "statistics.json"


def test_the_kept_figures_are_what_the_documentation_says():
    figures = json.loads(RESULTS.read_text())
    for row in figures["mean"]:
        low, high = (0.93, 0.97) if row["samples"] > 1 else (0.93, 1.0)  # counts of few problems: conservative
        assert low <= row["coverage"] <= high, row
    for row in figures["runs"]:
        assert 0.94 <= row["coverage"] <= (0.995 if row["runs"] == 2 else 0.99), row
    for row in figures["difference"] + figures["difference_of_runs"]:
        assert 0.94 <= row["coverage"] <= 0.995, row
        assert row["difference"] or row["rejected"] <= 0.05, row
    for row in figures["power"]:
        assert row.get("rejected", 0.8) >= 0.7, row


@pytest.mark.slow
@pytest.mark.parametrize("problems", [30, 100])
@pytest.mark.parametrize("samples", [4, 8])
@pytest.mark.parametrize("accuracy", [0.1, 0.3, 0.5, 0.7, 0.9])
def test_coverage(problems, samples, accuracy):
    assert 0.925 <= mean_row(problems, samples, accuracy, 1.0, rounds=2000)["coverage"] <= 0.98


@pytest.mark.slow
@pytest.mark.parametrize("num_runs", [2, 3, 5])
@pytest.mark.parametrize("spread", [0.0, 0.1, 0.3, 1.0])
def test_coverage_of_runs(num_runs, spread):
    assert 0.925 <= runs_row(100, 4, num_runs, spread, rounds=2000)["coverage"] <= 0.998
