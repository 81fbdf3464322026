"""The structure of an answer: one number, text or formula, or a list, tuple, interval, union, matrix or equation of such.

A comma without a space before three digits groups thousands in a number, in an equation or inequality (`x = 1,000`) and
where all elements of a list are written so (`1,000, 2,000`); otherwise it separates (`(100,200)`). `10-20` and `2024-01-05`
are a range and a date, no differences. `\\{x\\}` is no `x`, but `\\{5\\}` is 5.
"""

import re
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from opd.eval.answers.notation import tidy, without_spaces
from opd.eval.answers.numbers import Number, read_number
from opd.eval.answers.units import NO_UNIT, Unit, split_unit

MAX_CHARS = 2_000  # a longer answer is not taken apart
MAX_DEPTH = 8

Kind = Literal["number", "based", "text", "formula", "list", "tuple", "union", "equation", "unreadable"]


@dataclass(frozen=True)
class Form:
    """What an answer is. `text` is its normal text, by which equal forms may be recognised; `tidied` keeps its spaces.

    `parts`: elements of a list (in any order) or a tuple (in order), pieces of a union, both sides of an equation.
    `brackets`: of a tuple `()`, an interval `(]`, a set `{}`, a ratio or time `::`, a determinant `||`; none of a bare list.
    `unit` is what follows it; `name` the variable of an inequality or of `x \\in [1, 2]`.
    """

    kind: Kind
    text: str
    tidied: str
    parts: tuple["Form", ...] = ()
    brackets: str = ""
    number: Number | None = None
    unit: Unit = NO_UNIT
    name: str = ""


_OPENING, _CLOSING = "([{", ")]}"
_NAME = re.compile(
    r"(?!\\?(?:a?(?:sin|cos|tan)h?|arc(?:sin|cos|tan)|cot|sec|csc|ln|log|exp|sqrt|abs|pi)[xyzn]?(?![a-zA-Z]))"
    r"\\?[a-zA-Z]+(?:_(?:\w|\{[^{}]*\}))?'*(?:\([a-z]\))?"
)
_MATRIX = re.compile(r"\\begin ?\{([bpvBV]?matrix|array|cases)\}(?: ?\{[lcr| ]*\})?(.*)\\end ?\{\1\}")
_BASED = re.compile(r"\(? ?(\d+) ?\)? ?_ ?(?:\{ ?(\d+) ?\}|(\d+))")
_WORDS = re.compile(r"(?i:yes|no|odd)|(?=.*(?:[a-zA-Z]{4}|[a-zA-Z]{2,} [a-zA-Z]{2,}))[a-zA-Z][a-zA-Z .,'!?]*")
_FUNCTIONS = re.compile(r"\b(?:(?:sqrt|sin|cos|tan|cot|sec|csc|ln|log|exp)[xyzn]?|pi|arc[a-z]+|infinity|infty|inf)\b")
_CAPITALS = re.compile(r"(?!YES$|NO$|ODD$|EVEN$|TRUE$|FALSE$)[A-Z]{2,5}")  # of points (`ABCD`), where case counts
_ARTICLE = re.compile(r"^(?:an?|the) ")
_GROUPED = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?!,?\d)")
_CLOCK = re.compile(r"(\d{1,2}):(\d\d) ?([aApP])\.? ?[mM]\.?")
_GROUPED_LIST = re.compile(r" ?\d{1,3}(?:,\d{3})++(?:, \d{1,3}(?:,\d{3})++)+ ?")
_RANGE = re.compile(r"\d++(?:-\d++)+")  # `10-20`, `2024-01-05`; with spaces it is a difference
_PROPOSITION = re.compile(r" ?(?:\\(?:neg|lnot) ?)?(?:[a-zA-Z]|\([^=<>\d]*\)) ?")
_VARIABLE = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]")
_WORD_IN_TEXT = re.compile(r"[$ ]*\\(?:text(?:bf|it|rm|normal)?|math(?:rm|bf)|mbox) *\{ *([a-z]{3,}) *\}[$ .]*")
_LEADING_NAME = re.compile(r"[a-zA-Z] ?(?=\()")
_INFINITY = Form("formula", r"\infty", r"\infty")
_MINUS_INFINITY = Form("formula", r"-\infty", r"-\infty")


def read_form(answer: str) -> Form:
    """The structure of an answer as written. Linear in its length; what it cannot take apart is "unreadable"."""
    return _read_short(answer) if len(answer) <= MAX_CHARS else Form("unreadable", "", "")


@lru_cache(maxsize=4096)  # a problem's correct answer is compared with many samples
def _read_short(answer: str) -> Form:
    word = _WORD_IN_TEXT.fullmatch(answer)
    if word and not _FUNCTIONS.search(word[1]):
        return Form("text", word[1], word[1])
    return _read(tidy(answer), 0)


def _read(text: str, depth: int) -> Form:
    text = _unwrapped(text.strip())
    normal = without_spaces(text)
    unreadable = Form("unreadable", normal, text)
    if depth > MAX_DEPTH or not text:
        return unreadable
    if (number := read_number(text)) is not None:
        is_variable = number.unit.may_be_variable
        return Form("number", normal, text if is_variable else number.written, number=number, unit=number.unit)
    if matrix := _MATRIX.fullmatch(text):
        return _matrix(matrix, normal, text, depth)
    cuts = _top_level(text)
    if cuts is None:
        return unreadable

    if depth == 0 and _RANGE.fullmatch(text):
        return Form("text", normal, text)

    def parts(pattern: str) -> list[str]:
        return _cut(text, [(start, end) for name, start, end in cuts if name == pattern])

    for separator in ("cup", "and", ","):
        if len(pieces := parts(separator)) > 1:
            if separator == "and" and re.search(r"\\l(?:and|or)\b", text) and all(map(_PROPOSITION.fullmatch, pieces)):
                return Form("text", normal, text)
            read = tuple(_read(piece, depth + 1) for piece in pieces if piece.strip())
            return _joined(separator, read, normal, text)
    if len(sides := parts("in")) == 2:
        return replace(_read(sides[1], depth + 1), name=name_of(sides[0]))
    if len(sides := parts("approx")) > 1:
        return _approximated(sides, depth)
    return _bracketed(text, normal, depth) or _single(text, normal, cuts, depth)


def name_of(text: str) -> str:
    """The name of a quantity (`x_1`, `\\alpha`, `f(x)`, `area`) that a tidy text is; empty if it is none."""
    close = re.sub(r" ?([_(){}']) ?", r"\1", text.strip())
    return close if _NAME.fullmatch(close) else ""


def _approximated(sides: list[str], depth: int) -> Form:
    """Of `\\sqrt{2} \\approx 1.414` the left side counts; `x \\approx 1.414` is an equation."""
    first = sides[0].strip()
    return _read(f"{first} = {sides[1]}" if name_of(first) not in {"", "e"} else first or sides[1], depth + 1)


def _joined(separator: str, parts: tuple[Form, ...], normal: str, text: str) -> Form:
    intervals = all(part.kind == "tuple" and part.brackets != "::" for part in parts)
    if separator == "cup" or (separator == "and" and " or " in text and intervals):
        return Form("union", normal, text, parts)
    flat = tuple(inner for part in parts for inner in (part.parts if _is_alternatives(part) else (part,)))
    return Form("list", normal, text, flat)


def _is_alternatives(form: Form) -> bool:
    """`a \\pm b`, or a list inside a list (`1, 2 and 3`)."""
    return form.kind == "list" and form.brackets == ""


def _bracketed(text: str, normal: str, depth: int) -> Form | None:
    """A tuple, interval or set, if one pair of brackets encloses the text."""
    if (name := _LEADING_NAME.match(text)) and text.endswith("]"):  # `t(0,4]`
        text = text[name.end() :]
    is_set = text.startswith(r"\{") and text.endswith(r"\}")
    opening, inside, closing = ("{", text[2:-2], "}") if is_set else (text[0], text[1:-1], text[-1:])
    if opening not in _OPENING or closing not in _CLOSING or len(text) < 2 or (opening == "{") != is_set:
        return None
    cuts = _top_level(inside)
    if cuts is None:  # `(1,2),(3,4)` and `(a)(b)` start and end with brackets that do not match
        return None
    pieces = _cut(inside, [(start, end) for name, start, end in cuts if name == ","])
    if len(pieces) < 2 and not is_set:
        return _inner(inside, depth) if opening + closing == "()" else None
    parts = tuple(_read(piece, depth + 1) for piece in pieces)
    if not is_set:
        if all(part.brackets == "[]" for part in parts):  # rows of a matrix
            parts = tuple(replace(part, brackets="()") for part in parts)
        return Form("tuple", normal, text, parts, opening + closing)
    parts = tuple(inner for part in parts for inner in (part.parts if _is_alternatives(part) else (part,)))
    is_part_of_one = len(parts) == 1 and parts[0].kind == "formula" and _VARIABLE.search(inside)  # the fraction of x
    return parts[0] if len(parts) == 1 and not is_part_of_one else Form("list", normal, text, parts, "{}")


def _inner(inside: str, depth: int) -> Form | None:
    """What redundant brackets enclose, except a formula, which is read with its brackets."""
    form = _read(inside, depth + 1)
    return form if form.kind in {"number", "tuple", "text"} or re.fullmatch("[a-zA-Z]", inside.strip()) else None


def _single(text: str, normal: str, cuts: list[tuple[str, int, int]], depth: int) -> Form:
    """One relation, number, text or formula."""
    relations = [(start, end) for name, start, end in cuts if name == "relation"]
    if relations:
        sides = _cut(text, relations)
        signs = [text[start:end] for start, end in relations]
        return _relation(sides, signs, normal, text, depth)
    if clock := _CLOCK.fullmatch(text):
        return Form("text", f"{clock[1]}:{clock[2]} {clock[3].lower()}m", text)
    if based := _BASED.fullmatch(text):
        return Form("based", f"{based[1].lstrip('0')}_{based[2] or based[3]}", text)
    if text.count(r"\pm") + text.count(r"\mp") == 1:
        found = tuple(_read(re.sub(r"\\[pm]{2}(?![a-zA-Z])", sign, text), depth + 1) for sign in "+-")
        return Form("list", normal, text, found)
    if len(pieces := _cut(text, [(start, end) for name, start, end in cuts if name == ":"])) > 1:
        return Form("tuple", normal, text, tuple(_read(piece, depth + 1) for piece in pieces), "::")
    if _WORDS.fullmatch(text) and not _FUNCTIONS.search(text):
        word = text if _CAPITALS.fullmatch(text) else re.sub("[^a-z]", "", _ARTICLE.sub("", text.lower()))
        return Form("text", word, text)
    if normal.removeprefix("+").removeprefix("-").removeprefix("\\") in {"infty", "infinity", "inf", "oo"}:
        return _MINUS_INFINITY if normal.startswith("-") else _INFINITY
    core, unit = split_unit(text)
    if unit is not NO_UNIT and not unit.may_be_variable:
        return replace(_read(core, depth + 1), text=normal, unit=unit)
    return Form("formula", normal, text)


def _relation(sides: list[str], signs: list[str], normal: str, text: str, depth: int) -> Form:
    """An equation, or an inequality as the interval of the variable it is about."""
    forms = [_read(side, depth + 1) for side in sides]
    if not all(side.strip() for side in sides):
        return Form("unreadable", normal, text)
    if set(signs) == {"="}:
        return Form("equation", normal, text, (forms[0], forms[-1]))
    kinds = {sign[-2:] if sign[0] == "\\" else {"<": "lt", ">": "gt"}.get(sign, "=") for sign in signs}
    downwards = kinds <= {"gt", "ge"}
    if not downwards and not kinds <= {"lt", "le"}:
        return Form("unreadable", normal, text)
    closed = [sign[0] == "\\" for sign in signs]
    if downwards:
        sides, forms, closed = sides[::-1], forms[::-1], closed[::-1]
    names = [name_of(side) for side in sides]
    if len(forms) == 3 and names[1]:
        low, high, ends, name = forms[0], forms[2], closed, names[1]
    elif len(forms) == 2 and names[0]:
        low, high, ends, name = _MINUS_INFINITY, forms[1], [False, closed[0]], names[0]
    elif len(forms) == 2 and names[1]:
        low, high, ends, name = forms[0], _INFINITY, [closed[0], False], names[1]
    else:
        return Form("unreadable", normal, text)
    brackets = ("[" if ends[0] else "(") + ("]" if ends[1] else ")")
    return Form("tuple", normal, text, (low, high), brackets, name=name)


def _matrix(matrix: re.Match[str], normal: str, text: str, depth: int) -> Form:
    """A row or column as a tuple, anything else as a tuple of rows."""
    rows = [row for row in re.split(r"\\row(?![a-zA-Z])", matrix[2]) if row.strip()]
    cells = [[_read(cell, depth + 1) for cell in row.split("&")] for row in rows]
    outer = "||" if matrix[1][0] in "vV" else ""
    if len(cells) == 1 or all(len(row) == 1 for row in cells):
        return Form("tuple", normal, text, tuple(cell for row in cells for cell in row), outer or "()")
    return Form("tuple", normal, text, tuple(Form("tuple", "", "", tuple(row), "()") for row in cells), outer or "[]")


_TOKEN = re.compile(r"\\(?:[a-zA-Z]+|.)|,? (?:and|or) |.", re.DOTALL)
_SEPARATORS = {
    r"\cup": "cup",
    r"\bigcup": "cup",
    r"\in": "in",
    r"\approx": "approx",
    r"\le": "relation",
    r"\ge": "relation",
}
_SEPARATORS |= {
    r"\land": "and",
    r"\lor": "and",
    ",": ",",
    ";": ",",
    ":": ":",
    "<": "relation",
    ">": "relation",
    "=": "relation",
}


def _top_level(text: str) -> list[tuple[str, int, int]] | None:
    """(separator, start, end) of those that no brackets enclose; None if brackets do not match."""
    depth, found = 0, []
    for match in _TOKEN.finditer(text):
        token = match.group()
        bracket = token[1:] if token in {r"\{", r"\}"} else token
        if bracket in _OPENING:
            depth += 1
        elif bracket in _CLOSING:
            depth -= 1
            if depth < 0:
                return None
        elif depth == 0 and (name := "and" if token.endswith(" ") and len(token) > 3 else _SEPARATORS.get(token)):
            found.append((name, match.start(), match.end()))
    return _without_thousands(text, found) if depth == 0 else None


def _without_thousands(text: str, found: list[tuple[str, int, int]]) -> list[tuple[str, int, int]]:
    """The separators without commas of `x = 1,000` and `1,000, 2,000`; those of `100,200` and `58,500, 7` do separate."""
    if all(name != "relation" for name, _, _ in found) and not _GROUPED_LIST.fullmatch(text):
        return found
    grouping = {match.start() + at for match in _GROUPED.finditer(text) for at, c in enumerate(match.group()) if c == ","}
    return [cut for cut in found if cut[1] not in grouping]


def _cut(text: str, cuts: list[tuple[int, int]]) -> list[str]:
    edges = [0, *(edge for cut in cuts for edge in cut), len(text)]
    return [text[start:end] for start, end in zip(edges[::2], edges[1::2], strict=True)]


def _unwrapped(text: str) -> str:
    """Without braces around all of it."""
    for _ in range(MAX_DEPTH):
        if not (text.startswith("{") and text.endswith("}")) or _top_level(text[1:-1]) is None:
            break
        text = text[1:-1].strip()
    return text
