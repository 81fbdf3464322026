"""Results of evaluations: a suite's figures, and its problem x sample matrix by the problems' digests."""

import math
import operator
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from opd.errors import UserError
from opd.eval.at_k import avg_at_k, maj_at_k, pass_at_k
from opd.records import DEFAULT_DOMAIN

HELDOUT = "heldout"  # the suite of evaluations while training
HELDOUT_AGAIN = "heldout (opd eval)"  # the same problems, evaluated anew with a run's checkpoint
VERDICTS = {
    "correct": "correct",
    "wrong": "wrong",
    "no_answer": "no answer",
    "truncated": "truncated",
    "timeout": "timed out",
}


def title(suite: str) -> str:
    """A suite as a reader knows it."""
    whole, _, domain = suite.partition("/")
    name = {HELDOUT: "held-out problems", HELDOUT_AGAIN: "held-out problems (opd eval)"}.get(whole, whole)
    return f"{name}, {domain}" if domain else name


def is_part(suite: str) -> bool:
    """Whether it is one domain of another suite."""
    return whole_of(suite) != suite


def whole_of(suite: str) -> str:
    """The suite of which it is one domain, or itself."""
    return suite.partition("/")[0]


@dataclass(frozen=True, eq=False)  # known by identity
class Result:
    """One evaluation of one suite. `keys` [P] name the problems, `correct` and `classes` are the matrices [P][k]."""

    suite: str
    model: str
    step: int | None
    settings: Mapping[str, Any]
    figures: Mapping[str, float]
    notes: Sequence[str]
    keys: Sequence[str]
    correct: Sequence[Sequence[bool]]
    classes: Sequence[Sequence[int | None]] | None

    @property
    def samples(self) -> int:
        """Samples of the problem that has the fewest."""
        return min(map(len, self.correct))


def parse_result(raw: Mapping[str, Any], suite: str) -> Result:
    """A result as it was written. Raises KeyError, TypeError, AttributeError or ValueError for something else."""
    rows, seen = raw["rows"], Counter()
    if not rows or not all(row["verdicts"] for row in rows):
        raise ValueError("no problems, or one without verdicts")
    if any(len(row["verdicts"]) != len(row.get("classes", row["verdicts"])) for row in rows):
        raise ValueError("'verdicts' and 'classes' of a problem differ in number")
    step = raw.get("step")
    keys = []
    for row in rows:
        key = row.get("key", row["id"])  # runs of earlier versions wrote no digests
        seen[key] += 1
        keys.append(key if seen[key] == 1 else f"{key}#{seen[key]}")  # the same problem twice in a suite
    return Result(
        suite=str(raw.get("suite", suite)),
        model=str(raw.get("model", "")),
        step=None if step is None else operator.index(step),
        settings=dict(raw.get("settings") or {}),
        figures={name: value for name, value in raw.items() if isinstance(value, int | float) and math.isfinite(value)},
        notes=[str(note) for note in raw.get("notes") or ()],
        keys=keys,
        correct=[[verdict == "correct" for verdict in row["verdicts"]] for row in rows],
        classes=[row["classes"] for row in rows] if all("classes" in row for row in rows) else None,
    )


def by_domain(raw: Mapping[str, Any], whole: Result) -> dict[str, Result]:
    """The problems of each domain as a result of its own; none where there is one domain."""
    domains = [str(row.get("domain", DEFAULT_DOMAIN)) for row in raw["rows"]]
    found = {}
    for domain in sorted(set(domains)) if len(set(domains)) > 1 else ():
        at = [place for place, name in enumerate(domains) if name == domain]
        verdicts = [verdict for place in at for verdict in raw["rows"][place]["verdicts"]]
        figures = {f"{name}_rate": verdicts.count(name) / len(verdicts) for name in VERDICTS}
        own = {
            name.removesuffix(f"/{domain}"): value for name, value in whole.figures.items() if name.endswith(f"/{domain}")
        }
        found[domain] = replace(
            whole,
            suite=f"{whole.suite}/{domain}",
            figures={**figures, **own},
            notes=[],
            keys=[whole.keys[place] for place in at],
            correct=[whole.correct[place] for place in at],
            classes=None if whole.classes is None else [whole.classes[place] for place in at],
        )
    return found


@dataclass(frozen=True)
class Metric:
    """What is compared: `accuracy` (avg@k of all samples), `pass@k` or `maj@k`."""

    name: str
    k: int = 0

    @cache  # noqa: B019 (a metric lives as long as the comparison)
    def scores(self, result: Result) -> np.ndarray | None:
        """A score a problem, [P] in 0..1; None where the result has too few samples or no classes of answers."""
        if self.name == "accuracy":
            return avg_at_k(result.correct)
        if result.samples < self.k:
            return None
        if self.name.startswith("pass"):
            return pass_at_k(result.correct, self.k)
        return None if result.classes is None else maj_at_k(result.classes, result.correct, self.k)

    def mean(self, result: Result) -> float | None:
        if self.name in result.figures:
            return result.figures[self.name]
        scores = self.scores(result)
        return None if scores is None else float(scores.mean())


def parse_metric(name: str) -> Metric:
    """Raises `UserError` for a name that is no metric."""
    if name == "accuracy":
        return Metric(name)
    found = re.fullmatch(r"(?:pass|maj)@([1-9]\d*)", name)
    if found is None:
        raise UserError(f"--metric: {name!r} is no metric; use accuracy, pass@K or maj@K with a number K, such as pass@4")
    return Metric(name, int(found[1]))


def common_keys(results: Sequence[Result]) -> list[str]:
    """The problems that all results have, in the order of the first."""
    shared = set.intersection(*(set(result.keys) for result in results)) if results else set()
    return [key for key in results[0].keys if key in shared] if results else []


def matrix(results: Sequence[Result], metric: Metric, keys: Sequence[str]) -> np.ndarray | None:
    """Scores [R, P] of `keys` in each result; None where a result lacks what the metric needs."""
    vectors = []
    for result in results:
        scores = metric.scores(result)
        if scores is None:
            return None
        row = dict(zip(result.keys, scores))
        vectors.append([row[key] for key in keys])
    return np.array(vectors, dtype=np.float64)
