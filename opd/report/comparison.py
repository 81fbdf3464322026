"""Where each group stands on one suite: its score, its difference to the baseline, and the share of the gap it closed."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from opd.eval.statistics import Difference, Interval, holm, interval, interval_of_suites, paired, paired_suites, recovery
from opd.report.loading import Group, Run
from opd.report.results import HELDOUT, HELDOUT_AGAIN, VERDICTS, Metric, Result, common_keys, is_part, matrix

RATES = {**{f"{name}_rate": label for name, label in VERDICTS.items()}, "at_limit_rate": "at limit"}
RATES |= {"repetitive_rate": "repetitive"}


@dataclass(frozen=True)
class Question:
    """What is compared with what. The goal, where there is one, is a teacher's results or a reference group's."""

    metric: Metric
    baseline: Group
    teacher: Run | None = None
    reference: Group | None = None


@dataclass(frozen=True)
class Standing:
    """One group on one suite. `shared` counts the problems that the baseline has too, of `num_problems`."""

    group: Group
    results: Sequence[Result]
    score: Interval | None
    num_problems: int
    shared: int = 0
    difference: Difference | None = None
    adjusted_p: float | None = None
    recovery: Interval | None = None

    def figure(self, name: str) -> float | None:
        """The mean over the runs of a figure of their results; None where one lacks it."""
        values = [result.figures.get(name) for result in self.results]
        return float(np.mean(values)) if values and None not in values else None  # type: ignore[arg-type]


def standings(groups: Sequence[Group], suite: str, question: Question) -> list[Standing]:
    """The groups that have results of `suite`, in order; p-values are not adjusted yet."""
    return [_standing(group, suite, question) for group in groups if group.last(suite)]


def adjusted(tables: Sequence[Sequence[Standing]]) -> list[list[Standing]]:
    """The same standings, with p-values adjusted (Holm) for all comparisons of all `tables`."""
    ps = [row.difference.p for rows in tables for row in rows if row.difference is not None]
    remaining = iter(holm(ps))
    return [[row if row.difference is None else replace(row, adjusted_p=next(remaining)) for row in rows] for rows in tables]


def suites_of_all(scores: Mapping[str, Sequence[Standing]]) -> list[str]:
    """The whole suites, beside the held-out problems, on which all groups have a score that have one on any of them."""
    names = {
        suite: {row.group.name for row in rows if row.score is not None}
        for suite, rows in scores.items()
        if suite not in (HELDOUT, HELDOUT_AGAIN) and not is_part(suite)
    }
    everyone = set().union(*names.values())
    return [suite for suite, having in names.items() if having and having == everyone]


def mean_standings(groups: Sequence[Group], suites: Sequence[str], question: Question) -> list[Standing]:
    """Where the groups stand on the unweighted mean of `suites`; groups without a run that has all of these are left out.

    `num_problems` and `shared` are sums over the suites.
    """
    theirs = _with_all(question.baseline, suites)
    found = []
    for group in groups:
        ours = _with_all(group, suites)
        scores = _matrices(ours, ours, question.metric)
        if scores is None:
            continue
        row = Standing(group, (), interval_of_suites(scores), sum(part.shape[1] for part in scores))
        before, after = _matrices(theirs, ours, question.metric), _matrices(ours, theirs, question.metric)
        if group is not question.baseline and before is not None and after is not None:
            shared = sum(part.shape[1] for part in before)
            row = replace(row, shared=shared, difference=paired_suites(list(zip(before, after))))
        found.append(row)
    return found


def _with_all(group: Group, suites: Sequence[str]) -> list[list[Result]]:
    """[suite][run]: the final results of the counted runs that have all `suites`."""
    found = [[run.last(suite) for suite in suites] for run in group.counted]
    complete = [[result for result in results if result is not None] for results in found if None not in results]
    return [list(results) for results in zip(*complete)]


def _matrices(of: Sequence[Sequence[Result]], like: Sequence[Sequence[Result]], metric: Metric) -> list[np.ndarray] | None:
    """Scores [R, P] a suite, on the problems that `like` has too; None where a suite has none."""
    found = []
    for results, others in zip(of, like):
        keys = [key for key in common_keys(results) if key in set(common_keys(others))]
        scores = matrix(results, metric, keys) if keys else None
        if scores is None:
            return None
        found.append(scores)
    return found or None


def _standing(group: Group, suite: str, question: Question) -> Standing:
    results = group.last(suite)
    keys = common_keys(results)
    scores = matrix(results, question.metric, keys) if keys else None
    standing = {"group": group, "results": results, "num_problems": len(keys)}
    if scores is None:
        return Standing(**standing, score=None)
    theirs = question.baseline.last(suite)
    shared = common_keys([*results, *theirs]) if theirs else []
    if shared and group is not question.baseline:
        before, after = matrix(theirs, question.metric, shared), matrix(results, question.metric, shared)
        if before is not None and after is not None:
            standing["difference"] = paired(before, after)
    closed = _recovery(group, suite, question)
    return Standing(**standing, score=interval(scores), shared=len(shared), recovery=closed)


def _recovery(group: Group, suite: str, question: Question) -> Interval | None:
    """The share of the gap between each run's own start and the goal that is closed; None where a part is missing."""
    pairs = [(run.start(suite), run.last(suite)) for run in group.counted if run.last(suite) is not None]
    starts, ends = [start for start, _ in pairs if start is not None], [end for _, end in pairs if end is not None]
    goals = goal_results(suite, question, ends)
    if len(starts) < len(pairs) or not goals or all(start is end for start, end in pairs):
        return None
    keys = common_keys([*ends, *starts, *goals])
    if not keys:
        return None
    start, end, goal = (matrix(results, question.metric, keys) for results in (starts, ends, goals))
    if start is None or end is None or goal is None:
        return None
    return recovery(start, end, goal)


def goal_results(suite: str, question: Question, like: Sequence[Result]) -> list[Result]:
    """The goal's results on the problems of `like`: a teacher may have met them under another suite's name, or as a part of
    one."""
    if question.reference is not None:
        return question.reference.last(suite)
    if question.teacher is None or not like:
        return []
    wanted = set(like[0].keys)
    found = [result for name in question.teacher.results if (result := question.teacher.last(name)) is not None]
    best = max(found, key=lambda result: (len(wanted & set(result.keys)), -len(result.keys)), default=None)
    return [best] if best is not None and wanted & set(best.keys) else []


@dataclass(frozen=True)
class Cost:
    """What a group's runs spent until an evaluation first reached the target: means over the `reached` of `num_runs`."""

    group: Group
    reached: int
    num_runs: int
    steps: float | None = None
    sampled_tokens: float | None = None
    wall_s: float | None = None


def costs(groups: Sequence[Group], suite: str, metric: Metric, target: float) -> list[Cost]:
    """The cost to reach `target`, as closely as the runs were evaluated; groups without training are left out."""
    return [_cost(group, suite, metric, target) for group in groups if any(run.metrics for run in group.counted)]


def _cost(group: Group, suite: str, metric: Metric, target: float) -> Cost:
    spent = []
    for run in group.counted:
        curve: Mapping[int, Result] = run.results.get(suite, {})
        steps = next((step for step in sorted(curve) if (metric.mean(curve[step]) or 0.0) >= target), None)
        if steps is not None:
            spent.append((steps, run.spent("sampled_tokens", [steps])[0], run.spent("perf/step_s", [steps])[0]))
    if not spent:
        return Cost(group, 0, len(group.counted))
    return Cost(group, len(spent), len(group.counted), *(float(value) for value in np.mean(spent, axis=0)))


@dataclass(frozen=True)
class Spending:
    """What a group's R runs sampled until their last evaluation, and their scores there."""

    group: Group
    sampled_tokens: np.ndarray  # [R]
    scores: np.ndarray  # [R], fractions


def spendings(groups: Sequence[Group], suite: str, metric: Metric) -> list[Spending]:
    """Groups in order, without those that have no run of which both are known."""
    found = []
    for group in groups:
        ends = [(run, max(run.results[suite])) for run in group.counted if run.results.get(suite)]
        pairs = [(run.spent("sampled_tokens", [step])[0], metric.mean(run.results[suite][step])) for run, step in ends]
        known = [(tokens, score) for tokens, score in pairs if score is not None and np.isfinite(tokens)]
        if known:
            found.append(Spending(group, *np.array(known, np.float64).T))
    return found


def differing_settings(groups: Sequence[Group]) -> dict[str, list[str]]:
    """Settings in which groups differ: dotted name -> each group's value (all its values, where its runs differ)."""
    trained = [group for group in groups if group.runs[0].settings]
    names = sorted({name for group in trained for run in group.runs for name in run.settings} - {"seed"})
    table = {name: [_values(group, name) for group in trained] for name in names}
    return {name: values for name, values in table.items() if len(set(values)) > 1}


def _values(group: Group, name: str) -> str:
    missing = "–"
    found = [run.settings.get(name, missing) for run in group.runs]
    values = [value if isinstance(value, str) else json.dumps(value, ensure_ascii=False) for value in found]
    return " | ".join(dict.fromkeys(values))
