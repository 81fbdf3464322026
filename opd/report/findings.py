"""A comparison in words: what was found, and what a reader must know beside it."""

import json
import re
from collections.abc import Mapping, Sequence

from opd.report.comparison import Question, Standing
from opd.report.loading import Group
from opd.report.results import Result, title
from opd.report.tables import Column
from opd.report.text import one_line, p_value

NUMBER = re.compile(r"\d+(?:\.\d+)?")
LEVEL = 0.05  # of an adjusted p-value
TEACHER = "(teacher)"  # the name of its row


def finding(name: str, found: Sequence[Standing], question: Question) -> str | None:
    """The best group on what is called `name` in one sentence, with what speaks for its lead over the baseline."""
    scored = [row for row in found if row.score is not None]
    if not scored:
        return None
    best = max(scored, key=lambda row: row.score.value)  # type: ignore[union-attr]
    score = Column("", "percent").show(best.score)
    if len(scored) == 1:
        return f"On {name}, {one_line(best.group.name)} alone has results: {question.metric.name} {score} %."
    text = f"On {name}, {one_line(best.group.name)} has the highest {question.metric.name}: {score} %"
    if best.group is question.baseline:
        behind = [one_line(row.group.name) for row in scored if row.adjusted_p is not None and row.adjusted_p < LEVEL]
        lead = f"ahead of {', '.join(behind)} beyond chance" if behind else "ahead of no other group beyond chance"
        return f"{text}; it is the baseline, {lead} at the 5 % level."
    if best.difference is None or best.adjusted_p is None:
        return f"{text}."
    difference = Column("", "points").show(best.difference)
    against = f"{difference} points against {one_line(question.baseline.name)}, p {_sign(best.adjusted_p)} (Holm)"
    return f"{text}; {against}: {'beyond' if best.adjusted_p < LEVEL else 'not beyond'} chance at the 5 % level."


def _sign(p: float) -> str:
    shown = p_value(p)
    return f"< {shown[1:]}" if shown.startswith("<") else f"= {shown}"


def notes(groups: Sequence[Group], rows: Mapping[str, Sequence[Standing]], question: Question) -> list[str]:
    """What readers must know once: each result's notes with who has them, and what could not be compared, or not well.

    `rows` are by suite, with the teacher's.
    """
    lines, own = [], []
    for suite, found in rows.items():
        texts = [(text, row.group.name) for row in found for result in row.results for text in result.notes]
        own += [f"{title(suite)}: {line}" for line in _merged([pair for pair in texts if pair[1] != TEACHER], len(groups))]
        said = [_evaluated_differently([result for row in found for result in row.results])]
        said += [_incomparable(row, found, question) for row in found]
        lines += [f"{title(suite)}: {line}" for line in said if line]
    return [one_line(line, 600) for line in dict.fromkeys([*own, *lines])]


def _merged(said: Sequence[tuple[str, str]], num_groups: int) -> list[str]:
    """Notes as (text, group): those that differ in numbers alone become one, with the range of each number."""
    alike: dict[str, list[tuple[str, str]]] = {}
    for text, group in said:
        alike.setdefault(NUMBER.sub("#", text), []).append((text, group))
    lines = []
    for pairs in alike.values():
        numbers = zip(*(NUMBER.findall(text) for text, _ in pairs))
        ranges = [sorted(set(place), key=float) for place in numbers]
        spans = iter([f"{span[0]} to {span[-1]}" if len(span) > 1 else span[0] for span in ranges])
        text = NUMBER.sub(lambda _: next(spans), pairs[0][0])  # noqa: B023 (called at once)
        names = list(dict.fromkeys(group for _, group in pairs))
        lines.append(text if len(names) == num_groups else f"{text} ({', '.join(names)})")
    return lines


def _evaluated_differently(results: Sequence[Result]) -> str:
    """The settings of evaluation that all results state and not all share; but for the seed, they should be equal."""
    stated = set.intersection(*(set(result.settings) for result in results)) - {"seed"}
    values = {name: {json.dumps(result.settings[name]): None for result in results} for name in sorted(stated)}
    differing = [f"{name} {' or '.join(found)}" for name, found in values.items() if len(found) > 1]
    return f"not all were evaluated alike: {', '.join(differing)}" if differing else ""


def _incomparable(row: Standing, found: Sequence[Standing], question: Question) -> str | None:
    if row.score is None:
        least = min(result.samples for result in row.results)
        return f"{row.group.name} has {least} sample{'s' if least > 1 else ''} a problem, too few for {question.metric.name}"
    if row.recovery is not None and row.recovery.note:
        return f"{row.group.name} has no recovery: {row.recovery.note}"
    if row.group is question.baseline or row.group.name == TEACHER:
        return None
    theirs = next((other.num_problems for other in found if other.group is question.baseline), None)
    if theirs is None:
        return f"the baseline {question.baseline.name} has no results, so nothing is tested against it"
    if not row.shared:
        return f"{row.group.name} and {question.baseline.name} share no problem, so they are not compared"
    if row.shared == row.num_problems == theirs:
        return None
    share = f"share {row.shared} problem{'s' if row.shared > 1 else ''}"
    return f"{row.group.name} and {question.baseline.name} {share}; the difference is taken on these"
