"""What a report says: its tables, and what stands beside them in words."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from opd.eval.statistics import interval, interval_of_suites
from opd.report.comparison import (
    RATES,
    Question,
    Spending,
    Standing,
    adjusted,
    costs,
    differing_settings,
    goal_results,
    mean_standings,
    spendings,
    standings,
    suites_of_all,
)
from opd.report.findings import TEACHER, finding, notes
from opd.report.loading import Group, Run
from opd.report.results import HELDOUT, is_part, title, whole_of
from opd.report.style import NUM_STYLES
from opd.report.tables import Column, Table
from opd.report.text import one_line

MEAN, SPENDINGS = "mean-of-suites", "sampled-tokens"  # the names of their tables
TARGET_SHARE = 0.9  # of the best group's final accuracy: the default target


@dataclass(frozen=True)
class Contents:
    """`scores` are by suite, the held-out problems first; `goals` are the teacher's rows there.

    `styled` are the groups in the order in which they take colours. `spendings` are of the held-out problems; there are none
    where fewer than two groups have one.
    """

    question: Question
    groups: Sequence[Group]
    styled: Sequence[Group]
    scores: dict[str, list[Standing]]
    goals: dict[str, Standing]
    spendings: Sequence[Spending]
    tables: Sequence[Table]
    findings: Sequence[str]
    notes: Sequence[str]


def contents(groups: Sequence[Group], suites: Sequence[str], question: Question, target: float | None) -> Contents:
    """Compares `groups` on `suites`; `target` is the accuracy whose cost is asked for."""
    scores = {suite: standings(groups, suite, question) for suite in suites}
    averaged = suites_of_all(scores)
    mean = mean_standings(groups, averaged, question) if len(averaged) > 1 else []
    wholes, parts = ([suite for suite in suites if is_part(suite) == part] for part in (False, True))
    *tested, mean = adjusted([*(scores[suite] for suite in wholes), mean])
    scores |= zip(wholes, tested)
    scores |= zip(parts, adjusted([scores[suite] for suite in parts]))  # their own family: the others' p stay as they are
    of_wholes = _family([*tested, mean], "of whole suites in this report" if parts else "of this report")
    of_parts = _family([scores[suite] for suite in parts], "of domains in this report")
    goals = {suite: goal for suite in suites if (goal := _teacher(suite, question, scores[suite]))}
    rows = {suite: [*found, goals[suite]] if suite in goals else found for suite, found in scores.items()}
    tables: list[Table] = []
    for suite in suites:
        family = of_parts if is_part(suite) else of_wholes
        tables += [_scores(suite, rows[suite], question, family), _verdicts(suite, rows[suite])]
    if mean:
        tables.append(_mean(mean, averaged, goals, question, of_wholes))
    spent = spendings(groups, HELDOUT, question.metric) if HELDOUT in scores else []
    if len(spent) > 1:
        tables.append(_spendings(spent, question))
    if HELDOUT in scores and (cost := _cost(groups, scores[HELDOUT], question, target)):
        tables.append(cost)
    tables += [*_settings(groups), _runs(groups)]
    if not any(scores.values()):
        return Contents(question, groups, groups, {}, {}, (), tables, ["No run has been evaluated yet."], [])
    said = [suite for suite in suites if not is_part(suite) or whole_of(suite) not in suites]  # parts repeat their suite
    told = {title(suite): scores[suite] for suite in said} | {f"the mean of {len(averaged)} suites": mean}
    findings = [line for name, found in told.items() if (line := finding(name, found, question))]
    noted = notes(groups, {suite: rows[suite] for suite in said}, question)
    styled, spent = _styled(groups, scores, question), spent if len(spent) > 1 else []
    return Contents(question, groups, styled, scores, goals, spent, tables, findings, noted)


def _styled(groups: Sequence[Group], scores: dict[str, list[Standing]], question: Question) -> Sequence[Group]:
    """Where there are more groups than colours: the baseline first, then the best on the first suite."""
    if len(groups) <= NUM_STYLES:
        return groups
    rows = next(iter(scores.values()), [])
    reached = {row.group.name: row.score.value for row in rows if row.score is not None}
    return sorted(groups, key=lambda group: (group is not question.baseline, -reached.get(group.name, -1.0)))


def _teacher(suite: str, question: Question, found: Sequence[Standing]) -> Standing | None:
    """The teacher's own row: it is no variant, so it is not tested against the baseline."""
    if question.teacher is None or not found:
        return None
    results = goal_results(suite, question, found[0].results)
    scores = question.metric.scores(results[0]) if results else None
    if scores is None:
        return None
    group = Group(TEACHER, [question.teacher])
    return Standing(group, results, interval(scores), len(scores))


def _compared(rows: Sequence[Standing], question: Question) -> tuple[list[Column], list[list[Any]]]:
    """The columns that every table of scores begins with, and their cells."""
    columns = [Column("group"), Column(question.metric.name, "percent")]
    columns.append(Column(f"difference to {one_line(question.baseline.name, 24)}", "points", "difference"))
    columns.append(Column("p (Holm)", "p", "p_holm"))
    return columns, [[row.group.name, row.score, row.difference, row.adjusted_p] for row in rows]


def _family(tables: Sequence[Sequence[Standing]], where: str) -> str:
    """Which comparisons p-values are adjusted for, in words."""
    num = sum(row.adjusted_p is not None for rows in tables for row in rows)
    return f"all {num} comparisons {where}" if num > 1 else f"the only comparison {where}"


def _scores(suite: str, rows: Sequence[Standing], question: Question, family: str) -> Table:
    metric = question.metric.name
    columns, table = _compared(rows, question)
    if question.teacher is not None or question.reference is not None:
        columns.append(Column("recovery", "recovery"))
        table = [[*cells, row.recovery] for cells, row in zip(table, rows)]
    if suite == HELDOUT:
        columns += [Column("reverse KL", "nats"), Column("sampled tokens", "quantity"), Column("wall time", "duration")]
        spent = [[_spent(row.group, name) for name in ("sampled_tokens", "perf/step_s")] for row in rows]
        table = [[*cells, row.figure("reverse_kl"), *both] for cells, row, both in zip(table, rows, spent)]
    columns += [Column("runs"), Column("step"), Column("problems", "count")]
    table = [[*cells, _count(row.group), _steps(row), row.num_problems] for cells, row in zip(table, rows)]
    name = "Accuracy" if metric == "accuracy" else metric
    return Table(f"{suite}-scores", f"{name} on {title(suite)}", columns, table, _how_to_read(suite, rows, question, family))


def _how_to_read(suite: str, rows: Sequence[Standing], question: Question, family: str) -> str:
    note = "Means over problems and runs, with 95 % intervals."
    if any(row.difference is not None for row in rows):
        note += _what_p_is(question, family)
    if question.reference is not None or question.teacher is not None:
        goal = "the teacher" if question.reference is None else question.reference.name
        note += f" Recovery: share of the gap between each run's start and {goal} that is closed."
    if suite == HELDOUT:
        note += " Reverse KL: on the student's own rollouts of held-out problems. Tokens and wall time: of training, a run."
    return note


def _what_p_is(question: Question, family: str) -> str:
    return (
        f" p: that there is no difference to {one_line(question.baseline.name, 40)} on the same problems: the larger of a "
        "permutation test's and of the level at which the interval, which counts the runs too, touches 0; adjusted (Holm) "
        f"for {family}."
    )


def _mean(
    rows: Sequence[Standing], suites: Sequence[str], goals: Mapping[str, Standing], question: Question, family: str
) -> Table:
    if question.teacher is not None and all(suite in goals for suite in suites):
        scores = [question.metric.scores(goals[suite].results[0]) for suite in suites]
        num_problems = sum(goals[suite].num_problems for suite in suites)
        rows = [*rows, Standing(Group(TEACHER, [question.teacher]), (), interval_of_suites(scores), num_problems)]
    columns, table = _compared(rows, question)
    columns += [Column("suites", "count"), Column("problems", "count")]
    table = [[*cells, len(suites), row.num_problems] for cells, row in zip(table, rows)]
    names = ", ".join(one_line(suite, 40) for suite in suites)
    note = f"The unweighted mean over the suites that all groups have: {names}. The 95 % intervals resample each suite's "
    note += "problems; with several runs they count the spread of the runs' own means too."
    if any(row.difference is not None for row in rows):
        note += _what_p_is(question, family)
    return Table(MEAN, f"Mean of the suites, {question.metric.name}", columns, table, note)


def _count(group: Group) -> str:
    finished = sum(run.finished for run in group.runs)
    if finished == len(group.runs):
        return str(finished)
    return f"{finished} of {len(group.runs)} finished" if finished else f"{len(group.runs)} unfinished"


def _steps(row: Standing) -> str | None:
    """The step of the checkpoints, or the first and the last where they differ."""
    steps = sorted({result.step for result in row.results if result.step is not None})
    return "–".join(map(str, dict.fromkeys([steps[0], steps[-1]]))) if steps else None


def _spent(group: Group, name: str) -> float | None:
    """The mean over the counted runs of what a run spent."""
    values = [run.spent(name, [run.steps])[0] for run in group.counted]
    return float(np.mean(values))


def _verdicts(suite: str, rows: Sequence[Standing]) -> Table:
    largest = min((result.samples for row in rows for result in row.results), default=1)
    columns = [Column("group"), Column("samples", "count"), *(Column(label, "share") for label in RATES.values())]
    columns.insert(7, Column("mean tokens", "number"))
    several = [f"pass@{largest}", f"maj@{largest}"] if largest > 1 else []
    columns += [Column(name, "share") for name in several]
    table = []
    for row in rows:
        cells = [row.group.name, sum(sum(map(len, result.correct)) for result in row.results), *map(row.figure, RATES)]
        cells.insert(7, row.figure("mean_tokens"))
        table.append([*cells, *(row.figure(name) for name in several)])
    note = "Correct, wrong, no answer, truncated and timed out add up to 100 %. "
    note += "At limit: as long as allowed. Repetitive: the response repeats itself."
    return Table(f"{suite}-verdicts", f"Verdicts on {title(suite)}, % of samples", columns, table, note)


def _spendings(rows: Sequence[Spending], question: Question) -> Table:
    metric, most = question.metric.name, max(float(row.sampled_tokens.mean()) for row in rows)
    columns = [Column("group"), Column("sampled tokens", "quantity"), Column("of the most", "percent", "share_of_the_most")]
    columns += [Column(metric, "percent"), Column("lowest run", "percent"), Column("highest run", "percent")]
    columns.append(Column("runs", "count"))
    cells = []
    for row in rows:
        tokens, scores = float(row.sampled_tokens.mean()), row.scores
        share = tokens / most if most else None
        cells.append([row.group.name, tokens, share, *map(float, (scores.mean(), scores.min(), scores.max())), len(scores)])
    note = "Tokens until the last evaluation, a run, with those thrown away with stopped rollouts and dropped groups. "
    note += "Of the most: relative to the group that sampled the most."
    return Table(SPENDINGS, f"Held-out {metric} against sampled tokens", columns, cells, note)


def _cost(groups: Sequence[Group], found: Sequence[Standing], question: Question, target: float | None) -> Table | None:
    scored = [row for row in found if row.score is not None]
    if not scored:
        return None
    best = max(scored, key=lambda row: row.score.value)  # type: ignore[union-attr]
    if target is None:
        target = TARGET_SHARE * best.score.value  # type: ignore[union-attr]
        why = f"{100 * TARGET_SHARE:.0f} % of the final {question.metric.name} of the best group, {best.group.name}"
    else:
        why = "as asked for"
    rows = [
        [cost.group.name, f"{cost.reached} of {cost.num_runs}"]
        + ([cost.steps, cost.sampled_tokens, cost.wall_s] if cost.reached else ["not reached"] * 3)
        for cost in costs(groups, HELDOUT, question.metric, target)
    ]
    columns = [Column("group"), Column("runs that reached it"), Column("steps", "count")]
    columns += [Column("sampled tokens", "quantity"), Column("wall time", "duration")]
    note = f"The first evaluation on held-out problems at or above {100 * target:.1f} % ({why}). Means over the runs that "
    note += "reached it, as closely as the runs were evaluated; wall time is that of the training steps."
    return Table("cost", f"Cost to reach {100 * target:.1f} %", columns, rows, note)


def _settings(groups: Sequence[Group]) -> list[Table]:
    trained = [group for group in groups if group.runs[0].settings]
    found = differing_settings(groups)
    if len(trained) < 2:
        return []
    columns = [Column("setting"), *(Column(one_line(group.name, 40)) for group in trained)]
    note = "" if found else "The groups' settings are equal, but for the seed."
    return [Table("settings", "Settings that differ", columns, [[name, *values] for name, values in found.items()], note)]


def _runs(groups: Sequence[Group]) -> Table:
    columns = [Column("group"), Column("run"), Column("state"), Column("steps", "count")]
    columns += [Column("sampled tokens", "quantity"), Column("wall time", "duration")]
    rows = [
        [group.name, run.path.name, _state(run), run.steps or None]
        + [run.spent(name, [run.steps])[0] for name in ("sampled_tokens", "perf/step_s")]
        for group in groups
        for run in group.runs
    ]
    note = "Unfinished runs are read as far as they got; they count only in groups without a finished run."
    finished = all(run.finished for group in groups for run in group.runs)
    return Table("runs", "Runs", columns, rows, "" if finished else note)


def _state(run: Run) -> str:
    if not run.settings:
        return "results"
    return "finished" if run.finished else "unfinished"
