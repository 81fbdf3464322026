import pytest

from opd.eval.answers.expressions import Ambiguous, Unreadable, read_expression

X, Y, ONE, TWO = ("name", "x"), ("name", "y"), ("number", "1"), ("number", "2")


@pytest.mark.parametrize(
    ("text", "tree"),
    [
        ("2x", ("*", TWO, X)),
        ("-x + 1", ("+", ("neg", X), ONE)),
        ("x^2y", ("*", ("^", X, TWO), Y)),
        ("x^{-1}", ("^", X, ("neg", ONE))),
        ("x^y^2", ("^", X, ("^", Y, TWO))),
        (r"\frac12", ("/", ONE, TWO)),
        (r"\frac{1}2", ("/", ONE, TWO)),
        (r"1\frac{1}{2}", ("+", ONE, ("/", ONE, TWO))),
        (r"2(\frac{1}{2})", ("*", TWO, ("/", ONE, TWO))),
        ("x / 2 y", ("*", ("/", X, TWO), Y)),
        (r"\sqrt2", ("root", TWO, None)),
        (r"\sqrt[y]{x}", ("root", X, Y)),
        ("sqrt(x)", ("root", X, None)),
        ("2pi", ("*", TWO, ("constant", "pi"))),
        (r"\sin^2 x", ("^", ("call", "sin", X), TWO)),
        (r"\sin^{-1} x", ("call", "arcsin", X)),
        (r"\cos 2 x + 1", ("+", ("call", "cos", ("*", TWO, X)), ONE)),
        (r"\log_2 x", ("/", ("call", "ln", X), ("call", "ln", TWO))),
        (r"\lfloor x \rfloor", ("call", "floor", X)),
        ("|x|y", ("*", ("call", "abs", X), Y)),
        ("x!", ("call", "factorial", X)),
        ("x!!", ("call", "fac2", X)),
        ("2cosx", ("*", TWO, ("call", "cos", X))),
        (r"\binom{x}{y}", ("binom", X, Y)),
        ("x_1", ("name", "x_1")),
        ("x_{1}", ("name", "x_1")),
        (r"y^{\prime}", ("name", "y'")),
        (r"\dot{x}_{0}", ("name", r"\dot x_0")),
        ("I(0)", ("name", "I(0)")),
        ("x(x+1)", ("*", X, ("+", X, ONE))),
        ("1e-3", ("number", "1e-3")),
    ],
)
def test_read_expression(text: str, tree: tuple):
    assert read_expression(text) == tree


@pytest.mark.parametrize(
    "text",
    [
        "", "x +", "(x", "x)", r"\sum x", "x & y", "0.333...", r"0.\overline{3}", r"\infty", "(" * 500 + "x" + ")" * 500,
        "x^" + "-" * 3_000 + "1", r"\sqrt" * 3_000 + "x", "|" * 3_000, "\x00",
    ],
)  # fmt: skip
def test_what_is_not_understood_is_refused(text: str):
    with pytest.raises(Unreadable):
        read_expression(text)


@pytest.mark.parametrize("text", ["2 3", "1 2 x", "x + 10 5", r"\sqrt2 3", r"\frac12 3", "x^2 3"])
def test_a_number_after_a_number_is_no_product(text: str):
    with pytest.raises(Ambiguous):
        read_expression(text)
