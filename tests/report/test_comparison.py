"""Standings, costs and differing settings, on small results whose answers are known by hand."""

from pathlib import Path

import numpy as np
import pytest

from opd.eval.statistics import interval_of_suites, paired_suites
from opd.report.comparison import (
    Question,
    adjusted,
    costs,
    differing_settings,
    goal_results,
    mean_standings,
    spendings,
    standings,
    suites_of_all,
)
from opd.report.loading import Group, Run
from opd.report.results import Result, parse_metric, parse_result

ACCURACY = parse_metric("accuracy")


def result(correct: dict[str, int], step: int | None = None) -> Result:
    """Key -> how many of 4 samples are right."""
    rows = [
        {"id": key, "key": key, "verdicts": ["correct"] * right + ["wrong"] * (4 - right)} for key, right in correct.items()
    ]
    return parse_result({"suite": "s", "step": step, "rows": rows}, "s")


def group(name: str, *curves: dict[int, Result], metrics: dict | None = None, settings: dict | None = None) -> Group:
    return Group(name, [Run(Path(name), settings or {}, metrics or {}, {"s": curve}, True) for curve in curves])


def problems(right: int, number: int = 20, first: int = 0) -> dict[str, int]:
    return {f"p{index}": right for index in range(first, first + number)}


def test_the_last_evaluation_counts_and_differences_are_taken_against_the_baseline():
    low = group("low", {0: result(problems(0), 0), 10: result(problems(1), 10)})
    high = group("high", {0: result(problems(0), 0), 10: result(problems(3), 10)})
    first, second = standings([low, high], "s", Question(ACCURACY, low))
    assert first.score is not None
    assert second.score is not None
    assert (first.score.value, second.score.value) == (0.25, 0.75)
    assert first.difference is None
    assert second.difference is not None
    assert second.difference.value == 0.5
    assert (second.num_problems, second.shared) == (20, 20)
    assert second.difference.p < 0.001


def test_p_values_are_adjusted_for_the_number_of_comparisons():
    rng = np.random.default_rng(0)
    scores = [{key: int(count) for key, count in zip(problems(0), rng.integers(0, 5, 20))} for _ in range(4)]
    groups = [group(str(place), {1: result(score, 1)}) for place, score in enumerate(scores)]
    rows = standings(groups, "s", Question(ACCURACY, groups[0]))
    assert [row.adjusted_p for row in rows] == [None] * 4
    (together,) = adjusted([rows])
    alone = [row.difference.p for row in rows if row.difference is not None]
    best = alone.index(min(alone))
    assert together[0].adjusted_p is None
    assert together[1 + best].adjusted_p == pytest.approx(min(1.0, 3 * min(alone)))
    both = adjusted([rows, rows[:1], rows])  # as for two suites
    assert both[0][1 + best].adjusted_p == both[2][1 + best].adjusted_p == pytest.approx(min(1.0, 6 * min(alone)))


def on_suites(name: str, *runs: dict[str, Result]) -> Group:
    """Suite -> the final result, a run."""
    return Group(name, [Run(Path(name), {}, {}, {suite: {9: last} for suite, last in run.items()}, True) for run in runs])


def test_the_mean_of_suites_weighs_them_alike():
    small, large = {**problems(4, 5), **problems(2, 5, first=5)}, {**problems(1, 40), **problems(0, 40, first=40)}
    more = {**problems(2, 40), **problems(1, 40, first=40)}
    low = on_suites("low", {"a": result(small), "b": result(large)})
    high = on_suites("high", {"a": result(small), "b": result(more), "only here": result(small)})
    groups, question = [low, high], Question(ACCURACY, low)
    scores = {suite: standings(groups, suite, question) for suite in ("a", "b", "only here")}
    assert suites_of_all(scores) == ["a", "b"]
    first, second = mean_standings(groups, ["a", "b"], question)
    assert first.score is not None
    assert first.score.value == pytest.approx((0.75 + 0.125) / 2)
    assert first.score == interval_of_suites([[[1] * 5 + [0.5] * 5], [[0.25] * 40 + [0] * 40]])
    assert first.difference is None
    assert second.difference is not None
    assert second.difference.value == pytest.approx(0.125)
    assert (second.num_problems, second.shared) == (90, 90)
    alike, before, after = [1] * 5 + [0.5] * 5, [0.25] * 40 + [0] * 40, [0.5] * 40 + [0.25] * 40
    assert second.difference == paired_suites([(alike, alike), (before, after)])


def test_held_out_problems_are_no_suite_of_the_mean():
    both = on_suites(
        "both", {"heldout": result(problems(1)), "heldout (opd eval)": result(problems(1)), "a": result(problems(1))}
    )
    scores = {suite: standings([both], suite, Question(ACCURACY, both)) for suite in both.runs[0].results}
    assert suites_of_all(scores) == ["a"]
    assert suites_of_all({}) == []


def test_runs_that_lack_a_suite_are_left_out_of_the_mean():
    whole, part = {"a": result(problems(4)), "b": result(problems(2))}, {"a": result(problems(0))}
    group, other = on_suites("group", whole, part), on_suites("other", part)
    (row,) = mean_standings([group, other], ["a", "b"], Question(ACCURACY, other))
    assert row.score is not None
    assert (row.group, row.score.value, row.difference) == (group, 0.75, None)


def test_problems_that_only_one_has_are_left_out_of_the_difference():
    low = group("low", {1: result(problems(1), 1)})
    high = group("high", {1: result({**problems(1, 10), **problems(4, 10, first=20)}, 1)})  # better only on its own problems
    row = standings([low, high], "s", Question(ACCURACY, low))[1]
    assert row.score is not None
    assert row.score.value == 0.625
    assert row.difference is not None
    assert (row.shared, row.num_problems, row.difference.value) == (10, 20, 0.0)


def test_groups_without_common_problems_are_not_compared():
    low, high = group("low", {1: result(problems(1), 1)}), group("high", {1: result(problems(4, first=50), 1)})
    row = standings([low, high], "s", Question(ACCURACY, low))[1]
    assert row.difference is None
    assert row.shared == 0
    assert row.adjusted_p is None


def test_what_was_sampled_until_the_last_evaluation():
    curves = {0: result(problems(0), 0), 3: result(problems(1), 3)}, {0: result(problems(0), 0), 2: result(problems(3), 2)}
    metrics = {"step": np.arange(1, 5.0), "sampled_tokens": np.full(4, 10.0)}
    both, unknown = group("both", *curves, metrics=metrics), group("unknown", curves[0])
    elsewhere = Group("elsewhere", [Run(Path("e"), {}, metrics, {"other": curves[0]}, True)])
    (row,) = spendings([unknown, both, elsewhere], "s", ACCURACY)
    assert row.group is both
    assert row.sampled_tokens.tolist() == [30.0, 20.0]
    assert row.scores.tolist() == [0.25, 0.75]


def test_recovery_is_the_share_of_the_gap_to_the_teacher():
    student = group("student", {0: result(problems(0), 0), 9: result(problems(3), 9)})
    teacher = group("teacher", {-1: result(problems(4))}).runs[0]
    row = standings([student], "s", Question(ACCURACY, student, teacher=teacher))[0]
    assert row.recovery is not None
    assert row.recovery.value == pytest.approx(0.75)


def test_recovery_towards_a_reference_group():
    student = group("student", {0: result(problems(0), 0), 9: result(problems(1), 9)})
    reference = group("reference", {0: result(problems(0), 0), 9: result(problems(2), 9)})
    rows = standings([student, reference], "s", Question(ACCURACY, student, reference=reference))
    assert [row.recovery.value for row in rows if row.recovery] == [pytest.approx(0.5), pytest.approx(1.0)]


def test_no_recovery_without_a_start():
    student = group("student", {9: result(problems(3), 9)})
    teacher = group("teacher", {-1: result(problems(4))}).runs[0]
    assert standings([student], "s", Question(ACCURACY, student, teacher=teacher))[0].recovery is None


def test_the_teacher_is_found_by_its_problems_not_by_the_name_of_its_suite():
    of_others, of_ours = result(problems(4, first=50)), result(problems(4))
    teacher = Run(Path("t"), {}, {}, {"s": {-1: of_others}, "named otherwise": {-1: of_ours}}, True)
    question = Question(ACCURACY, group("g"), teacher=teacher)
    assert goal_results("s", question, [result(problems(1))]) == [of_ours]
    assert goal_results("s", question, [result(problems(1, first=90))]) == []


def test_unfinished_runs_count_only_where_none_is_finished():
    done = Run(Path("a"), {}, {}, {"s": {1: result(problems(4), 1)}}, finished=True)
    going = Run(Path("b"), {}, {}, {"s": {1: result(problems(0), 1)}}, finished=False)
    both, only = Group("both", [done, going]), Group("only", [going])
    rows = standings([both, only], "s", Question(ACCURACY, both))
    assert [row.score.value for row in rows if row.score] == [1.0, 0.0]


def test_cost_is_that_of_the_first_evaluation_at_the_target():
    metrics = {"step": np.arange(1, 5.0), "sampled_tokens": np.full(4, 10.0), "perf/step_s": np.full(4, 0.5)}
    quick = {0: result(problems(0), 0), 2: result(problems(2), 2), 4: result(problems(3), 4)}
    slow = {0: result(problems(0), 0), 2: result(problems(1), 2), 4: result(problems(2), 4)}
    never = {0: result(problems(0), 0), 4: result(problems(1), 4)}
    groups = [
        group("some", quick, slow, never, metrics=metrics),
        group("none", never, metrics=metrics),
        group("evaluated", quick),
    ]
    some, none = costs(groups, "s", ACCURACY, 0.5)
    assert (some.reached, some.num_runs) == (2, 3)
    assert (some.steps, some.sampled_tokens, some.wall_s) == (3.0, 30.0, 1.5)  # means of steps 2 and 4
    assert (none.reached, none.num_runs, none.steps) == (0, 1, None)


def test_only_settings_that_differ_between_groups_are_listed():
    first = group("first", {}, {}, settings={"lr": 1e-3, "seed": 0, "steps": 4, "lora": None, "betas": [0.9, 0.99]})
    second = group("second", {}, settings={"lr": 2e-3, "seed": 1, "steps": 4, "betas": [0.9, 0.95], "lora.rank": 8})
    assert differing_settings([first, second, group("evaluated", {})]) == {
        "betas": ["[0.9, 0.99]", "[0.9, 0.95]"],
        "lora": ["null", "–"],
        "lora.rank": ["–", "8"],
        "lr": ["0.001", "0.002"],
    }


def test_runs_of_one_group_may_differ_too():
    runs = [Run(Path(name), {"lr": lr}, {}, {}, True) for name, lr in (("a", 1), ("b", 2))]
    assert differing_settings([Group("both", runs), Group("one", runs[:1])]) == {"lr": ["1 | 2", "1"]}
