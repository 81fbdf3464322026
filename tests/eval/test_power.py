import math

import numpy as np
import pytest

from benchmarks.statistics import power_row
from opd.eval.power import detectable_difference, power_note


@pytest.mark.parametrize(("problems", "samples", "level"), [(30, 8, 0.0), (100, 4, 1.0), (30, 4, -2.0)])
def test_the_stated_difference_is_found_four_times_in_five(problems, samples, level, monkeypatch):
    monkeypatch.setattr("opd.eval.statistics.RESAMPLES", 1500)
    row = power_row(problems, samples, level, rounds=300)
    assert 0.7 <= row["rejected"] <= 0.92


def test_one_sample_states_an_upper_bound(monkeypatch):
    monkeypatch.setattr("opd.eval.statistics.RESAMPLES", 1500)
    assert power_row(100, 1, 0.0, rounds=300)["rejected"] >= 0.75


def test_one_sample_by_hand():
    found = detectable_difference([[i < 9] for i in range(30)])  # accuracy 0.3; halfway to the better model:
    half_way = 0.3 + found / 2
    assert found == pytest.approx((2.04523 + 0.84162) * math.sqrt(2 * half_way * (1 - half_way) / 30), abs=1e-4)


def test_more_problems_and_samples_show_smaller_differences():
    def stated(problems, samples):
        rows = np.random.default_rng(0).random((problems, samples)) < np.linspace(0.1, 0.9, problems)[:, None]
        return detectable_difference(rows.tolist())

    assert stated(30, 2) > stated(30, 8) > stated(120, 8)
    assert stated(30, 2) == pytest.approx(2 * stated(120, 2), rel=0.15)


@pytest.mark.parametrize("right", [False, True])
def test_a_suite_all_wrong_or_all_right_does_not_promise_to_show_everything(right):
    assert 0.02 < detectable_difference([[right] * 8] * 30) < 0.1
    assert 0.15 < detectable_difference([[right]] * 30) < 0.35
    assert detectable_difference([[right] * 8] * 30) < 0.8 * detectable_difference([[right] * 2] * 30)


def test_the_sentence():
    note = power_note([[True, False] * 4] * 30)
    assert note.startswith("30 problems x 8 samples separate differences above about ")
    assert note.endswith(" points (80 % power, paired, 5 % level)")
    assert power_note([[True], [False]]).startswith("2 problems x 1 sample separate")
    assert power_note([[True], [False, True]]).startswith("2 problems x 1-2 samples")
