"""The correct answers of whole suites: `OPD_SUITES` names a folder of JSON lines with `id` and `answer`.

Each is graded as it is in several forms, rewritten with the same value, and changed (see `benchmarks.grading`).
"""

import os
from pathlib import Path

import pytest

from benchmarks.grading import Case, all_cases, failures, load, throughput, verdicts
from opd.eval.grading import Grader

pytestmark = [pytest.mark.real, pytest.mark.timeout(1800)]

ANSWERS_PER_S = 100  # the least throughput on two cores


@pytest.fixture(scope="module")
def suites() -> dict[str, list[str]]:
    return load(Path(os.environ["OPD_SUITES"]))


@pytest.fixture(scope="module")
def graded(suites: dict[str, list[str]]) -> tuple[list[Case], list[str]]:
    """All cases of all rules, and their verdicts."""
    found = all_cases(suites, None)
    with Grader(num_workers=2) as grader:
        return found, verdicts(found, grader)


@pytest.mark.parametrize("form", ["self, box", "self, prose", "self, as written", "rewritten", "perturbed"])
def test_every_answer_is_graded_right(graded: tuple[list[Case], list[str]], form: str):
    found, given = graded
    chosen = [(case, verdict) for case, verdict in zip(found, given) if case.form == form]
    assert len(chosen) > 2_000
    assert failures(*zip(*chosen)) == []  # type: ignore[arg-type]


def test_every_answer_has_rewritings_and_changes(suites: dict[str, list[str]]):
    for suite, answers in suites.items():
        for answer in answers:
            forms = [case.form for case in all_cases({suite: [answer]}, 2)]
            assert "rewritten" in forms or "where" in answer, answer
            assert "perturbed" in forms, answer


def test_throughput(suites: dict[str, list[str]]):
    for answers in (suites, {name: suites[name] for name in suites if name in {"minerva", "olympiadbench"}}):
        assert throughput(all_cases(answers, 2))["per_s"] > ANSWERS_PER_S
