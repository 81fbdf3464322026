"""Where each group stands on one suite: its score, its difference to the baseline, and the share of the gap it closed."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from opd.eval.statistics import Difference, Interval, holm, interval, paired, recovery
from opd.report.loading import Group, Run
from opd.report.results import VERDICTS, Metric, Result, common_keys, matrix

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
    """The groups that have results of `suite`, in order, with p-values adjusted (Holm) over them."""
    found = [_standing(group, suite, question) for group in groups if group.last(suite)]
    tested = [place for place, standing in enumerate(found) if standing.difference is not None]
    adjusted = holm([found[place].difference.p for place in tested])  # type: ignore[union-attr]
    for place, p in zip(tested, adjusted):
        found[place] = Standing(**{**vars(found[place]), "adjusted_p": p})
    return found


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
    """The goal's results on the problems of `like`: a teacher may have met them under another suite's name."""
    if question.reference is not None:
        return question.reference.last(suite)
    if question.teacher is None or not like:
        return []
    wanted = set(like[0].keys)
    found = [result for name in question.teacher.results if (result := question.teacher.last(name)) is not None]
    best = max(found, key=lambda result: len(wanted & set(result.keys)), default=None)
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
