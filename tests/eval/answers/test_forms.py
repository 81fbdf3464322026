import pytest

from opd.eval.answers.forms import MAX_CHARS, Form, name_of, read_form

PAIR = ("tuple()", "number", "number")


def outline(form: Form) -> object:
    """A form without its texts: a kind, or (kind and brackets, parts)."""
    if not form.parts:
        return form.kind
    return (form.kind + form.brackets, *map(outline, form.parts))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("5", "number"),
        ("58,500", "number"),
        ("52_8", "based"),
        (r"(4210)_{5}", "based"),
        ("Evelyn", "text"),
        ("no solution", "text"),
        ("x + 1", "formula"),
        ("SRMC + 1", "formula"),
        ("{5}", "number"),
        ("((5))", "number"),
        ("(x+1)(x-1)", "formula"),
        ("[x+1]^2", "formula"),
        (r"12\pi cm", "formula"),
        ("1, 2", ("list", "number", "number")),
        ("1, 2 and x", ("list", "number", "number", "formula")),
        ("58,500, 7", ("list", "number", "number", "number")),
        (r"\{1, 2\}", ("list{}", "number", "number")),
        (r"\{1\}", "number"),
        (r"1 \pm \sqrt{2}", ("list", "formula", "formula")),
        (r"\{1 \pm x, 3\}", ("list{}", "formula", "formula", "number")),
        ("(1, 2)", PAIR),
        (r"\langle 1, 2 \rangle", PAIR),
        ("(1,2),(3,4)", ("list", PAIR, PAIR)),
        (r"[2, \infty)", ("tuple[)", "number", "formula")),
        (r"t(0,4]", ("tuple(]", "number", "number")),
        (r"x \in [2, 3]", ("tuple[]", "number", "number")),
        (r"x \ge 2", ("tuple[)", "number", "formula")),
        ("2 > x", ("tuple()", "formula", "number")),
        (r"3 \ge x > 1", ("tuple(]", "number", "number")),
        (r"(0,1) \cup [2,3]", ("union", ("tuple()", "number", "number"), ("tuple[]", "number", "number"))),
        ("x < 0 or x > 1", ("union", ("tuple()", "formula", "number"), ("tuple()", "number", "formula"))),
        ("x = 1 or x = 2", ("list", ("equation", "formula", "number"), ("equation", "formula", "number"))),
        ("y = 2x + 3", ("equation", "formula", "formula")),
        ("10:30", ("tuple::", "number", "number")),
        (r"\begin{pmatrix} 1 \\ x \end{pmatrix}", ("tuple()", "number", "formula")),
        (r"\begin{bmatrix} 1 & 2 \\ 3 & x \end{bmatrix}", ("tuple[]", PAIR, ("tuple()", "number", "formula"))),
        (r"\begin{vmatrix} 1 & 2 \\ 3 & x \end{vmatrix}", ("tuple||", PAIR, ("tuple()", "number", "formula"))),
        (r"\sqrt{2} \approx 1.4", "formula"),
        (r"x \approx 1.4", ("equation", "formula", "number")),
        (r"\pi \approx 3.14", "formula"),
        ("12 000", "number"),
        ("2 3", "formula"),
        ("", "unreadable"),
        ("(1, 2", "unreadable"),
        ("1)(2", "unreadable"),
        ("x + 1 > x < 3", "unreadable"),
        (r"x + y \le 3", "unreadable"),
        ("x = ", "unreadable"),
        ("x" * (MAX_CHARS + 1), "unreadable"),
    ],
)  # fmt: skip
def test_outline(text: str, expected: object):
    assert outline(read_form(text)) == expected


def test_nesting_is_bounded():
    assert "unreadable" in str(read_form("(1," * 20 + "2" + ")" * 20))
    assert read_form("{" * 900 + "5" + "}" * 900).kind == "formula"  # not unwrapped to the end: no number


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("x", "x"),
        ("f ( x )", "f(x)"),
        ("x_ {1}", "x_{1}"),
        (r"\alpha'", r"\alpha'"),
        ("area", "area"),
        ("5", ""),
        (r"\cos x", ""),
        ("cosx", ""),
        (r"\ln(x)", ""),
        (r"\pi", ""),
        ("x + 1", ""),
    ],
)
def test_name_of(text: str, name: str):
    assert name_of(text) == name


def test_units_and_names_are_kept():
    assert dict(read_form(r"2\pi cm").unit.powers) == {"centimeter": 1}
    assert dict(read_form("5 km").unit.powers) == {"kilometer": 1}
    assert read_form("2 < y \\le 3").name == "y"
    assert read_form(r"x \in [2, 3]").name == "x"
    assert read_form("[2, 3]").name == ""
