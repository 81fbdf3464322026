"""The rules that make the benchmark's cases: what they change, and what they leave alone."""

from fractions import Fraction

import pytest

from benchmarks.grading import all_cases, by_rule, failures, table
from benchmarks.grading_perturbations import PERTURBATIONS
from benchmarks.grading_rewritings import REWRITINGS
from benchmarks.grading_text import bare, cases


@pytest.mark.parametrize(
    ("answer", "rule", "expected"),
    [
        ("1234", "thousands", "1,234"),
        (r"\frac{7}{2}", "mixed number", r"3\frac{1}{2}"),
        (r"$\frac{1}{8}$", "decimal", "0.125"),
        (r"\frac{1}{3}", "decimal", None),
        (r"\frac{2}{3}", "repeating decimal", r"0.\overline{6}"),
        ("(3,4]", "inequality", r"3 < x \leq 4"),
        ("(3,4)", "inequality", None),  # it may be a point
        ("1,-2", "reversed list", "-2, 1"),
        ("58,500", "reversed list", None),
        ("(1,-2)", "reversed list", None),
        ("p - q", "reordered sum", "- q  + p"),
        ("y = 2x + 3", "no name", "2x + 3"),
        (r"1 \pm \sqrt{19}", "plus and minus", r"1  + \sqrt{19}, 1  - \sqrt{19}"),
        (r"\text{(C)}", "word", "C"),
        (r"1\frac{4}{5}", "(a)/(b)", None),  # would be a product
    ],
)
def test_rewritings(answer: str, rule: str, expected: str | None):
    assert cases(answer, REWRITINGS).get(rule) == expected


@pytest.mark.parametrize(
    ("answer", "rule", "expected"),
    [
        ("2.7778e-6", "first number", "2.7779e-6"),
        ("58,500", "last number", "58,501"),
        (r"15\mbox{ cm}^2", "last number", r"16\mbox{ cm}^2"),  # not the unit
        ("0", "sign", None),
        ("p - q", "sign", "-(p - q)"),
        ("(3,4]", "upper endpoint", "(3,4)"),
        ("(2,2)", "swapped", None),
        ("(1,2),(2,1)", "swapped", None),  # the same pairs
        ("(1,2)", "swapped", "(2, 1)"),
        ("-2,-2", "element dropped", None),
        ("1,3", "element dropped", "1"),
        (r"\text{(C)}", "word", r"\text{B}"),
        ("52_8", "another base", "52_7"),
    ],
)
def test_perturbations(answer: str, rule: str, expected: str | None):
    assert cases(answer, PERTURBATIONS).get(rule) == expected


@pytest.mark.parametrize("number", [0, 1, -7, 99, 1234])
def test_rewritten_numbers_keep_their_value_and_changed_ones_do_not(number: int):
    rewritten = cases(str(number), REWRITINGS)
    assert Fraction(rewritten["N.0"]) == number
    assert int(rewritten.get("thousands", str(number)).replace(",", "")) == number
    assert float(rewritten["e notation"]) == number
    changed = cases(str(number), PERTURBATIONS)
    assert all(int(changed[name]) != number for name in ("first number", "last number", "sign") if name in changed)


def test_bare():
    assert bare(r"$(-\infty, 0) \cup\{1\}$.") == r"(-\infty, 0) \cup\{1\}"
    assert bare(r"\$18.90") == r"\$18.90"


def test_counts():
    found = all_cases({"suite": ["5"]}, 2)
    selves = ["self, box", "self, prose", "self, as written"]
    assert [case.form for case in found] == [*selves, "rewritten", "rewritten", "perturbed", "perturbed"]
    given = ["correct", "correct", "wrong", "correct", "timeout", "wrong", "correct"]
    assert table(found, given)["all"]["self, as written"] == {"wrong": 1}
    assert [case["verdict"] for case in failures(found, given)] == ["wrong", "timeout", "correct"]
    assert sum(wrong for wrong, _ in by_rule(found, given).values()) == 3
