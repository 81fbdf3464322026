from fractions import Fraction

import pytest

from opd.eval.answers.numbers import read_number, same_number


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("-7", -7),
        ("+ 2", 2),
        ("007", 7),
        ("1,234.50", Fraction("1234.5")),
        (".5", Fraction(1, 2)),
        ("-1./3", Fraction(-1, 3)),
        (r"\frac{-7}{2}", Fraction(-7, 2)),
        (r"\frac43", Fraction(4, 3)),
        (r"-\frac 34", Fraction(-3, 4)),
        (r"1\frac{4}{5}", Fraction(9, 5)),
        (r"-137 \frac{1}{2}", Fraction(-275, 2)),
        ("3 1/2", Fraction(7, 2)),
        (r"0.\overline{3}", Fraction(1, 3)),
        (r"-1.2\overline{34}", Fraction(-611, 495)),
        ("4.5e3", 4500),
        (r"4.5 \times 10^{-1}", Fraction(9, 20)),
        (r"4.5\cdot10^3", 4500),
        ("62.5%", Fraction("62.5")),
        ("5 apples", 5),
        ("5 cm^2", 5),
        ("5 m / s^{2}", 5),
        ("12 345.5", Fraction("12345.5")),
        ("12 345 m", 12345),
        ("1 234/567", Fraction(801, 567)),
        ("3.5 million", 3_500_000),
        ("7 dozen eggs", 84),
        ("25 per cent", 25),
        ("1e-999", Fraction(1, 10**999)),
    ],
)
def test_values(text: str, value: Fraction | int):
    number = read_number(text)
    assert number is not None
    assert number.value == value


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "12x",
        "12pi",
        "12 sqrt 3",
        "3xy",
        "7.6 Z",
        "5!",
        "52_8",
        "1,2",
        r"\frac{1}{0}",
        "1/0",
        "1/x",
        r"2\pi",
        "5^2",
        "2e^{t}",
        "12 34",
        "12 345 6",
        "2 * m",
        "1/T",
        "3 tenths",
        "3 negative",
    ],
)
def test_no_numbers(text: str):
    assert read_number(text) is None


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        ("0.333333", r"\frac{1}{3}", True),
        ("0.33333", r"\frac{1}{3}", False),
        ("0.333...", r"\frac{1}{3}", True),
        ("0.334...", r"\frac{1}{3}", False),
        ("0.666667", r"\frac{2}{3}", True),
        ("0.666666", r"\frac{2}{3}", True),
        ("0.666668", r"\frac{2}{3}", False),
        ("-0.666667", r"\frac{2}{3}", False),
        ("4.03188", "4.03189", False),
        ("4.03188", "4.0318812", True),
        ("10112369", "10112370", False),
        ("1234567.0", "1234567.4", False),
        ("62.5%", "0.625", True),
        ("62.5%", "62.5", True),
        ("1.5%", "1.5", True),
        ("50%", "0.5", True),
        ("62.5%", "0.625%", False),
        ("62.5%", "6250", False),
        ("0", "0.000", True),
        ("1e-8", "1.1e-8", False),
        ("9" * 5_000, "9" * 5_000 + ".0", True),
        ("9" * 5_000, "9" * 4_999 + "8", False),
        ("9" * 5_000, "9", False),
        ("1e999999999", "1e999999999", True),
        ("10e999999998", "1e999999999", True),
        ("1e999999999", "1e999999998", False),
        ("1e" + "9" * 100, "5", False),
        ("0e999999999", "0", True),
    ],
)
def test_same_number(first: str, second: str, same: bool):
    numbers = read_number(first), read_number(second)
    assert numbers[0] is not None
    assert numbers[1] is not None
    assert same_number(numbers[0], numbers[1]) is same
    assert same_number(numbers[1], numbers[0]) is same


@pytest.mark.parametrize(
    ("extracted", "answer", "same"),
    [("0.5", "0.5%", True), ("0.5%", "0.5", False), ("1%", "1", False), ("100%", "1", True), ("0%", "0", True)],
)
def test_a_percent_sign_may_be_left_out_but_not_added_to_a_share(extracted: str, answer: str, same: bool):
    numbers = read_number(extracted), read_number(answer)
    assert numbers[0] is not None
    assert numbers[1] is not None
    assert same_number(numbers[0], numbers[1]) is same


@pytest.mark.parametrize(
    ("text", "may_be_product"), [("6m", True), (r"\frac{37}{4} m", True), ("6 m", False), ("6cm", False)]
)
def test_a_unit_that_may_be_a_variable(text: str, may_be_product: bool):
    number = read_number(text)
    assert number is not None
    assert number.may_be_product is may_be_product
