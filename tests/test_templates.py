"""Which names a template may have, and which braces are none."""

import pytest

from opd.errors import UserError
from opd.templates import check_template

NAMES = ("prompt", "answer")


@pytest.mark.parametrize(
    "text",
    [
        "{prompt} {answer} {prompt}",
        r"\frac{1}{2} \frac{a}{b} \text{so on} \boxed{} \begin{align}",
        "x_{max} and x^{n} or {} { name } {1} {a, b} {a|b} {'a': 1}",
        "",
    ],
)
def test_names_that_are_allowed_and_braces_that_are_text(text):
    check_template("f.template", text, NAMES)


@pytest.mark.parametrize(
    "text", ["{promt}", r"\boxed{{promt}}", "{prompt}{promt}", r"\frac{a}{b} {promt}", "x{promt}_{answer}"]
)
def test_other_names_are_refused(text):
    with pytest.raises(UserError) as error:
        check_template("f.template", text, NAMES)
    said = "f.template: {promt} stands for nothing; allowed is {prompt}, {answer}, and { promt } with spaces is text"
    assert str(error.value) == said


def test_needed_names():
    check_template("f", "{answer}", NAMES, needed=("answer",))
    with pytest.raises(UserError, match=r"^f: it must contain \{answer\}$"):
        check_template("f", "{prompt}", NAMES, needed=("answer",))
