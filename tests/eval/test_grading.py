import asyncio
import subprocess
import sys
import threading
import time

import pytest

from opd.errors import UserError
from opd.eval.grading import Grade, Grader, Item, grade, summarise

HARD = Item(r"\boxed{\frac{2}{4}}", r"\frac{1}{2}")  # needs algebra


@pytest.fixture(scope="module")
def grader():
    with Grader(limit_s=1, num_workers=2) as grader:
        yield grader


@pytest.mark.parametrize(
    ("response", "answer", "truncated", "expected"),
    [
        (r"\boxed{5}", "5", False, Grade("correct", "5")),
        (r"\boxed{6}", "5", False, Grade("wrong", "6")),
        (r"\boxed{\frac{2}{4}}", "0.5", False, Grade("correct", r"\frac{2}{4}")),
        (r"\boxed{2}", ["1", "2"], False, Grade("correct", "2")),
        (r"\boxed{1 + x}", ["1", "x + 1"], False, Grade("correct", "1 + x")),
        ("It is 5.", "5", False, Grade("no_answer", None)),
        ("It is 5", "5", True, Grade("truncated", None)),
        (r"\boxed{5} and so", "5", True, Grade("correct", "5")),
        (r"\boxed{6} and so", "5", True, Grade("wrong", "6")),
    ],
)
def test_grade(grader: Grader, response: str, answer: str | list[str], truncated: bool, expected: Grade):
    assert grade(response, answer, truncated) == expected
    assert grader.grade_many([Item(response, answer, truncated)]) == [expected]


PATHOLOGICAL = [
    "9^{9^{9^{9}}}",
    "(((((((9!)!)!)!)!)!)!)!",
    r"\frac{1}{2} + x^{2} " * 5_000,
    "{" * 500 + "x" + "}" * 500,
    "}{",
    r"\frac{1}{",
    r"0.\overline{3}",
    "0.333\\ldots",
    "1e999999999",
    r"\sum_{n=1}^{10^{100}} \frac{1}{n}",
    "\x00\udcff\u202e",
]


def test_pathological_answers_cost_at_most_the_limit(grader: Grader):
    items = [Item(f"\\boxed{{{answer}}}", "x+2") for answer in PATHOLOGICAL]
    items += [Item(f"Answer: {answer}", "x+2") for answer in PATHOLOGICAL]
    grader.grade_many([HARD])
    started_s = time.monotonic()
    grades = grader.grade_many([*items, HARD])
    assert grades[-1].verdict == "correct"
    assert {grade.verdict for grade in grades[:-1]} <= {"wrong", "timeout", "no_answer"}
    num_timeouts = sum(grade.verdict == "timeout" for grade in grades)
    assert time.monotonic() - started_s < 2 * num_timeouts + 5  # the limit of 1 s, and the start of a new worker


def test_a_hopeless_comparison_times_out(grader: Grader):
    grades = grader.grade_many([Item(r"\boxed{x^{x^{9^{9^9}}}}", "9^{9^{9^{9}}} + x"), HARD])
    assert [grade.verdict for grade in grades] == ["timeout", "correct"]


def test_from_a_thread_and_inside_asyncio(grader: Grader):
    grades: list[Grade] = []
    thread = threading.Thread(target=lambda: grades.extend(grader.grade_many([HARD])))
    thread.start()
    thread.join()

    async def blocking_and_not() -> None:
        grades.extend(grader.grade_many([HARD]))
        for more in await asyncio.gather(*(asyncio.to_thread(grader.grade_many, [HARD]) for _ in range(5))):
            grades.extend(more)

    asyncio.run(blocking_and_not())
    assert [grade.verdict for grade in grades] == ["correct"] * 7


def test_easy_answers_start_no_worker_and_equal_comparisons_are_made_once():
    with Grader(limit_s=5, num_workers=2) as grader:
        easy = [Item(r"\boxed{5}", "5"), Item(r"\boxed{1,000}", "1000.0"), Item("none", "5"), Item(r"\boxed{7}", "8")]
        assert [grade.verdict for grade in grader.grade_many(easy)] == ["correct", "correct", "no_answer", "wrong"]
        assert not grader._pool._workers
        assert {grade.verdict for grade in grader.grade_many([HARD] * 9)} == {"correct"}
        assert len(grader._pool._workers) == 1


def test_importing_the_grader_is_cheap():
    code = "import sys, opd.eval.grading; print({'torch', 'transformers', 'sympy', 'math_verify'} & {*sys.modules})"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"


def test_mistakes_are_user_errors(grader: Grader):
    with pytest.raises(UserError, match="no correct answer"):
        grader.grade_many([Item(r"\boxed{5}", None)])
    with pytest.raises(UserError, match="no correct answer"):
        grade("5", [])
    with pytest.raises(UserError, match="must be positive"):
        Grader(limit_s=0)


def test_summarise():
    right, wrong, late = Grade("correct", "1"), Grade("wrong", "2"), Grade("timeout", "3")
    summary = summarise([[right, right], [wrong, late, right, Grade("truncated", None)]])
    assert summary["accuracy"] == pytest.approx((1.0 + 0.25) / 2)
    assert (summary["num_problems"], summary["num_samples"], summary["num_correct"]) == (2, 6, 3)
    assert summary["timeout_rate"] == summary["truncated_rate"] == pytest.approx(1 / 6)
    assert summary["num_no_answer"] == 0
    with pytest.raises(ValueError, match="at least one problem"):
        summarise([[right], []])
