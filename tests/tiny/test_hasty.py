"""The sweep of the hasty student: its habit is unlearned, and nothing else. Slow: the student is trained from nothing."""

import json

import pytest

import opd
from opd.sweep import plan_sweep


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_habit_is_unlearned_and_accuracy_elsewhere_holds_within_two_points(tmp_path):
    (planned,) = (run for run in plan_sweep("sweeps/hasty", {}, tmp_path) if run.name == "nsd/seed-0")
    opd.train(planned.config, tmp_path / "run")
    before, after = (json.loads((tmp_path / f"run/eval/step-{step}.json").read_text()) for step in (0, planned.steps))
    assert before["accuracy"] <= 0.55
    assert after["accuracy"] >= 0.85
    assert before["selection_accuracy"] >= 0.95
    assert after["selection_accuracy"] >= before["selection_accuracy"] - 0.02
