import asyncio
import subprocess
import sys
import threading
import time

import pytest

from opd.errors import UserError
from opd.eval.grading import Grade, Grader, Item, grade

HARD = Item(r"\boxed{\frac{2x}{4}}", r"\frac{x}{2}")  # needs algebra


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
    "x + " * 400 + "x",
    "(" * 100_000 + ")" * 100_000,
    "(" * 900 + "x" + ")" * 900,
    "}{",
    r"\frac{1}{",
    r"\sqrt" * 900 + "x",
    "x^" + "-" * 1_900 + "1",
    r"0.\overline{3}",
    "0.333\\ldots",
    "0." + "3" * 100_000,
    "1e999999999",
    "9" * 100_000,
    "1e" + "9" * 5_000,
    r"\sum_{n=1}^{10^{100}} \frac{1}{n}",
    "(" + "1," * 50_000 + "2)",
    "1, " * 600 + "x",
    r"1 \pm 2 \pm 3 " * 100,
    "\\text{" * 300,
    "\x00\udcff\u202e",
]
HOPELESS = [r"\binom{10^{10}}{10^{9}}", "{" * 500 + "x" + "}" * 500, r"10^{10^{10}}", r"x^{x^{10^{10}}}", r"\sin(9^{9^9})"]
HOPELESS += [r"\prod_{n=1}^{10^{9}} n", r"\int_0^1 x^{x^{x^x}} dx", r"\lim_{n \to \infty} n^{n^n}", "a" * 1_900 + "^2"]


@pytest.mark.parametrize("answers", [PATHOLOGICAL, pytest.param(HOPELESS, marks=pytest.mark.slow)], ids=["few", "many"])
def test_pathological_answers_cost_at_most_the_limit(grader: Grader, answers: list[str]):
    items = [Item(f"\\boxed{{{answer}}}", "x+2") for answer in answers]
    items += [Item(f"Answer: {answer}", "x+2") for answer in answers]
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
