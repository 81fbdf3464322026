import time

import pytest

from opd.eval.equality import equivalent, normalise, same_value


@pytest.mark.parametrize(
    ("raw", "normal"),
    [
        (r" $\dfrac{1}{2}$. ", r"\frac{1}{2}"),
        ("1,234,567", "1234567"),
        ("1{,}234", "1234"),
        ("(1,234)", "(1,234)"),
        (r"\left( 3, \frac{\pi}{2} \right)", r"(3,\frac{\pi}{2})"),
        (r"\text{Evelyn}", "Evelyn"),
        (r"\leftarrow", r"\leftarrow"),
        ("1 1/2", "1 1/2"),
        (r"a \\ b", r"a\\b"),
        ("(C)", "C"),
        (r"\[ 5 \]", "5"),
        (r"\$18", "18"),
    ],
)
def test_normalise(raw: str, normal: str):
    assert normalise(raw) == normal


@pytest.mark.parametrize(
    ("extracted", "answer", "same"),
    [
        ("025", "25", True),
        ("142", "142.0", True),
        ("1,000", "1000", True),
        ("5", "6", False),
        ("1.24e-8", "3e-9", False),
        (r"4.50 \times 10^{33}", "4.5e33", True),
        ("1e9999", "2", False),
        ("evelyn", r"\text{Evelyn}", True),
        ("silent", "listen", False),
        ("1/2", "0.5", None),
        ("1 1/2", "11/2", None),
    ],
)
def test_same_value(extracted: str, answer: str, same: bool | None):
    assert same_value(extracted, answer) is same


@pytest.mark.parametrize("piece", ["1", "{", "$ ", "\\text{", "\\left", "1,234,", " ", "\\,"])
def test_comparing_texts_is_linear(piece: str):
    started_s = time.perf_counter()
    same_value(piece * (100_000 // len(piece)), "5")
    assert time.perf_counter() - started_s < 1.0


@pytest.mark.parametrize(
    ("extracted", "answer", "equal"),
    [
        ("1/2", "0.5", True),
        ("sqrt(1/n)", r"\sqrt{\frac{1}{n}}", True),
        (r"2\sqrt{10}", r"\sqrt{40}", True),
        ("x**2 + 1", "1 + x^2", True),
        (r"\frac{9}{2} \times 10^{33}", "4.5e33", True),
        ("2, 1", "1,2", True),
        ("x = 5", "5", True),
        ("(2,1)", "(1,2)", False),
        ("x + 1", "x + 2", False),
        ("", "5", False),
        ("}{", "5", False),
    ],
)
def test_equivalent(extracted: str, answer: str, equal: bool):
    assert equivalent((extracted, (answer,))) is equal
