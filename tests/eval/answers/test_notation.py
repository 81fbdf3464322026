import time

import pytest

from opd.eval.answers.notation import normalise, tidy


@pytest.mark.parametrize(
    ("raw", "tidied"),
    [
        (r"**73**", "73"),
        (r"\boxed{73}", "73"),
        (r"$x$, $y$", "x, y"),
        (r"12\,\mathrm{cm}^2", "12 cm^2"),
        (r"1\,000", "1000"),
        (r"11,\! 111,\!111", "11111111"),
        (r"90^\circ", "90 degrees"),
        ("90°", "90 degrees"),
        ("π ≈ 3.14", r"\pi \approx 3.14"),
        (r"\left[2,\infty\right)", r"[2,\infty)"),
        (r"2 ≤ x < ∞", r"2 \le x < \infty"),
        (r"x \leqslant 3", r"x \le 3"),
        (r"8 \%", "8 %"),
        (r"np.arcsin(10/13)", "arcsin(10/13)"),
        (r"x**2", "x^2"),
        (r"a \\ b", r"a \row b"),
        (r"\displaystyle \frac{1}{2} .", r"\frac{1}{2}"),
        ("0.333...", "0.333..."),
        (r"−5", "-5"),
    ],
)
def test_tidy(raw: str, tidied: str):
    assert tidy(raw) == tidied


@pytest.mark.parametrize(
    ("raw", "normal"),
    [
        (r" $\dfrac{1}{2}$. ", r"\frac{1}{2}"),
        ("1,234,567", "1234567"),
        ("1{,}234", "1234"),
        ("12 345", "12345"),
        (r"12\;345\;678.5", "12345678.5"),
        ("12 34", "12 34"),
        ("1, 234", "1,234"),
        ("(1,234)", "(1,234)"),
        (r"\left( 3, \frac{\pi}{2} \right)", r"(3,\frac{\pi}{2})"),
        (r"\text{Evelyn}", "Evelyn"),
        (r"\leftarrow", r"\leftarrow"),
        ("1 1/2", "1 1/2"),
        (r"a \\ b", r"a\rowb"),
        ("(C)", "C"),
        (r"\[ 5 \]", "5"),
        (r"\$18", "18"),
    ],
)
def test_normalise(raw: str, normal: str):
    assert normalise(raw) == normal


PIECES = [
    "1",
    "{",
    "}",
    "$ ",
    "\\text{",
    "\\text",
    "\\left",
    "1,234,",
    " ",
    "\\,",
    "**",
    "** ",
    "1{,}",
    "\\\\",
    "°",
    "1\\!",
    "^ {",
    "\n",
]


@pytest.mark.parametrize("piece", PIECES)
def test_normalising_is_linear(piece: str):
    started_s = time.perf_counter()
    normalise(piece * (100_000 // len(piece)))
    assert time.perf_counter() - started_s < 2.0
