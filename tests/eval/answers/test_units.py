import pytest

from opd.eval.answers.units import NO_UNIT, Unit, read_unit, same_unit, split_unit


def unit(text: str) -> Unit:
    found = read_unit(text)
    assert found is not None, text
    return found


@pytest.mark.parametrize(
    ("text", "powers"),
    [
        ("", {}),
        (" cm", {"centimeter": 1}),
        ("cm", {"centimeter": 1}),
        (" apples", {"apple": 1}),
        (" red apples left", {"apple": 1, "red": 1}),
        (" eggs per day", {"egg": 1, "day": -1}),
        (" eggs a day", {"egg": 1, "day": -1}),
        (" m/s^2", {"meter": 1, "second": -2}),
        (r" kg \cdot m s^{-2}", {"kilogram": 1, "meter": 1, "second": -2}),
        (" meters per second squared", {"meter": 1, "second": -2}),
        (" square inches", {"inch": 2}),
        (" inches^2", {"inch": 2}),
        (" square units", {}),
        (" per day", {"day": -1}),
        (" men", {"man": 1}),
        (" mph", {"mile": 1, "hour": -1}),
        (" degrees C", {"celsius": 1}),
        (" degrees Fahrenheit", {"fahrenheit": 1}),
        (" times", {"time": 1}),
    ],
)
def test_units(text: str, powers: dict[str, int]):
    assert dict(unit(text).powers) == powers


@pytest.mark.parametrize(
    ("text", "scale"),
    [(" million", 10**6), (" hundred thousand dollars", 10**5), (" dozen eggs", 12), (" millions", 10**6), (" m", 1)],
)
def test_scales(text: str, scale: int):
    assert unit(text).scale == scale


NO_UNITS = [
    "x", "xy", " xyz", " bcd", " sqrt", " arctan", "^2", " m /", r"\pi", " apples" * 20, " x apples", "apples",
    "/T", " * m", r" \cdot a", " a", " theta", " sinx", " sin A", " tenths", " halves", " and a half", " squared", " root",
    " factorial", " negative", " below zero", " not", " undefined", " does not exist", " times m", " apples million",
    " percent of apples", " dollars a", " red", " per", " other than apples", " eggs or more", " 3 eggs",
]  # fmt: skip


@pytest.mark.parametrize("text", NO_UNITS)
def test_no_units(text: str):
    assert read_unit(text) is None


def test_a_unit_may_be_a_variable():
    assert unit(" m").may_be_variable
    assert unit("mg").may_be_variable
    assert not unit(" cm").may_be_variable
    assert not NO_UNIT.may_be_variable


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        (" m", " meters", True),
        (" hrs", " hours", True),
        (" km", "", True),
        (" km", " units", True),
        (" degrees", " degrees C", True),
        (" degrees C", " degrees F", False),
        (" km", " cm", False),
        (" minutes", " hours", False),
        (" m", " m^2", False),
        (" m/s", " m s^{-1}", True),
        (" apples", " oranges", False),
    ],
)
def test_same_unit(first: str, second: str, same: bool):
    assert same_unit(unit(first), unit(second)) is same
    assert same_unit(unit(second), unit(first)) is same


@pytest.mark.parametrize(
    ("text", "core", "powers"),
    [
        (r"12\pi cm^2", r"12\pi", {"centimeter": 2}),
        (r"2\sqrt{5} square feet", r"2\sqrt{5}", {"foot": 2}),
        (r"2\sqrt{5} m", r"2\sqrt{5}", {"meter": 1}),
        ("3x apples", "3x", {"apple": 1}),
        (r"\lambda_{red}", r"\lambda_{red}", {}),
        (r"\frac{mv}{2} in", r"\frac{mv}{2} in", {}),
        (r"2 \cdot m", r"2 \cdot m", {}),
        (r"\frac12/h", r"\frac12/h", {}),
        (r"\sqrt2 a", r"\sqrt2 a", {}),
        (r"2\pi million", r"2\pi million", {}),
        ("2RC + R", "2RC + R", {}),
        ("x", "x", {}),
    ],
)
def test_split_unit(text: str, core: str, powers: dict[str, int]):
    found = split_unit(text)
    assert (found[0], dict(found[1].powers)) == (core, powers)
