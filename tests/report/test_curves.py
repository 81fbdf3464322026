"""Curves: means and ranges over runs, against steps, tokens and time."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from opd.report.curves import MAX_POINTS, Line, Panel, panels, samples_of
from opd.report.loading import Group, Run, load_groups
from opd.report.results import parse_metric


def run(losses, steps=None, *, tokens=10.0, **more) -> Run:
    number = len(losses)
    metrics = {"step": np.array(steps or range(1, number + 1), float), "loss": np.array(losses, float)}
    metrics |= {"sampled_tokens": np.full(number, tokens), "perf/step_s": np.full(number, 2.0), **more}
    return Run(Path("run"), {}, metrics, {}, True)


def loss_lines(*groups) -> list[Line]:
    found = panels([Group(str(place), runs) for place, runs in enumerate(groups)], parse_metric("accuracy"), None)
    return list(next(panel for panel in found if panel.name == "loss").lines)


def test_a_line_is_the_mean_of_its_runs_and_the_band_their_range():
    (line,) = loss_lines([run([3.0, 1.0]), run([5.0, 2.0], tokens=30.0)])
    np.testing.assert_allclose(line.mean, [4.0, 1.5])
    np.testing.assert_allclose(line.low, [3.0, 1.0])
    np.testing.assert_allclose(line.high, [5.0, 2.0])
    np.testing.assert_allclose(line.x["steps"], [1, 2])
    np.testing.assert_allclose(line.x["tokens"], [20, 40])
    np.testing.assert_allclose(line.x["time"], [2, 4])


def test_steps_that_one_run_lacks_or_where_a_value_is_missing_are_left_out():
    (line,) = loss_lines([run([3.0, 1.0, np.nan, 7.0]), run([5.0, 4.0, 9.0], [1, 3, 4])])
    np.testing.assert_allclose(line.x["steps"], [1, 4])
    np.testing.assert_allclose(line.mean, [4.0, 8.0])


def test_long_runs_are_averaged_over_neighbouring_steps():
    (line,) = loss_lines([run(np.arange(250.0))])
    assert len(line.mean) <= MAX_POINTS
    np.testing.assert_allclose(line.mean[:2], [1.0, 4.0])  # means of 0, 1, 2 and of 3, 4, 5
    np.testing.assert_allclose(line.mean[-1], 249.0)
    np.testing.assert_allclose(line.x["steps"][:2], [2.0, 5.0])


def test_different_divergences_have_different_panels(sweep):
    found = {panel.name: panel for panel in panels(load_groups([sweep]), parse_metric("accuracy"), 0.97)}
    assert list(found) == [
        "heldout-score",
        "heldout-reverse_kl",
        "training-reverse_kl",
        "training-reverse_kl_sampled",
        "loss",
    ]
    assert [line.place for line in found["training-reverse_kl"].lines] == [0]
    assert [line.place for line in found["training-reverse_kl_sampled"].lines] == [1]
    assert found["heldout-score"].levels == [("teacher", 0.97)]
    scores = found["heldout-score"].lines[0]
    np.testing.assert_allclose(scores.x["steps"], [0, 10, 20, 30, 40])
    assert scores.x["tokens"][0] == scores.x["time"][0] == 0


def test_what_became_of_rollouts_has_panels_where_it_was_counted():
    restarts, stops, successes = np.array([0.1, 3.0]), np.array([0.5, 1.0]), np.array([np.nan, 0.25])
    some = Group("some", [run([1.0, 1.0], restart_units=restarts, stopped_rate=stops, success_rate=successes)])
    found = {panel.name: panel for panel in panels([Group("none", [run([1.0, 1.0])]), some], parse_metric("accuracy"), None)}
    assert list(found) == ["loss", "training-success_rate", "training-stopped_rate", "training-restart_units"]
    (line,) = found["training-restart_units"].lines
    assert (line.place, line.mean.tolist()) == (1, [0.1, 3.0])
    assert not found["training-restart_units"].logarithmic
    assert found["training-stopped_rate"].percent
    assert found["training-success_rate"].lines[0].x["steps"].tolist() == [2.0]


def test_groups_of_rollouts_have_panels_where_they_were_compared():
    some, values = run([1.0, 1.0]), np.array([0.5, 0.25])
    more = dict.fromkeys(("response_tokens", "phantom_groups", "live_groups"), values)
    group = Group("a", [replace(some, metrics={**some.metrics, **more})])
    found = {panel.name: panel for panel in panels([group], parse_metric("accuracy"), None)}
    names = ["training-live_groups", "training-phantom_groups", "training-response_tokens"]
    assert list(found) == ["loss", *names]
    assert [found[name].unit for name in names] == ["%", "%", "tokens"]


def test_diagnostics_have_panels_where_they_were_measured(sweep):
    values = np.array([0.5, 0.25])
    more = dict.fromkeys(("overlap_mass", "topk_overlap", "student_topk_kl", "overlap_mass_teacher"), values)
    found = panels([Group("a", [run([1.0, 1.0], **more)])], parse_metric("accuracy"), None)
    names = ["loss", "training-student_topk_kl", "training-topk_overlap", "training-overlap_mass"]
    assert [(panel.name, panel.unit) for panel in found] == list(zip(names, ["", "nats/token", "%", "%"], strict=True))
    path = next(sweep.rglob("eval/step-0.json"))
    path.write_text(json.dumps({**json.loads(path.read_text()), "distinct_4grams": 0.75}))
    found = {panel.name: panel for panel in panels(load_groups([path.parent.parent]), parse_metric("accuracy"), None)}
    panel = found["heldout-distinct_4grams"]
    assert (panel.percent, panel.marked, panel.lines[0].mean.tolist()) == (True, True, [0.75])


@pytest.mark.parametrize(
    ("values", "unit", "expected"),
    [
        ([2.0, 0.05], "nats/token", True),
        ([2.0, 0.5], "nats/token", False),
        ([2.0, -0.1], "", False),
        ([0.9, 0.01], "%", False),
        ([9.0, 0.1], "turns or chunks", False),
    ],
)
def test_the_axis_is_logarithmic_where_the_end_would_be_flat(values, unit, expected):
    y = np.array(values)
    assert Panel("p", "P", [Line(0, {"steps": y}, y, y, y)], unit).logarithmic is expected


def test_a_few_points_of_a_line_with_its_ends():
    y = np.arange(11.0)
    points = list(samples_of(Line(0, {"steps": 10 * y}, y, y, y), "steps"))
    assert points == [(0, 0), (20, 2), (40, 4), (60, 6), (80, 8), (100, 10)]
