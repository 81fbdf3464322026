import pytest

from opd.eval.answers.units import is_unit, may_be_variable, split_unit


@pytest.mark.parametrize(
    "text", ["", " cm", " apples", " eggs per day", " m/s^2", " square inches", " inches^2", " men", " erg / s"]
)
def test_units(text: str):
    assert is_unit(text)


@pytest.mark.parametrize(
    "text", ["x", "xy", " xyz", " bcd", " sqrt", " arctan", "^2", " m /", r"\pi", " apples" * 20, " x apples"]
)
def test_no_units(text: str):
    assert not is_unit(text)


def test_a_unit_may_be_a_variable():
    assert may_be_variable("m")
    assert may_be_variable("mg")
    assert not may_be_variable("cm")
    assert not may_be_variable("")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (r"12\pi cm^2", (r"12\pi", "cm^2")),
        (r"2\sqrt{5} square units", (r"2\sqrt{5}", "square units")),
        (r"2\sqrt{5} m", (r"2\sqrt{5}", "m")),
        (r"\lambda_{red}", (r"\lambda_{red}", "")),
        ("2RC + R", ("2RC + R", "")),
        ("x", ("x", "")),
    ],
)
def test_split_unit(text: str, parts: tuple[str, str]):
    assert split_unit(text) == parts
