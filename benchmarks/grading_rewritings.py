"""Correct answers written differently without a change of value: cases for `benchmarks.grading`.

Each rule makes another text of a correct answer, or None where it does not apply, or might change the value.
"""

import re
from collections.abc import Callable, Iterator
from fractions import Fraction

from benchmarks.grading_text import (
    FRACTION,
    INFINITE,
    NAME,
    SCIENTIFIC,
    Rule,
    equation_sides,
    has_thousands,
    interval_parts,
    is_expression,
    list_items,
    plain_number,
    summands,
    word_of,
)


def _number_rules() -> Iterator[tuple[str, Rule]]:
    def number(rule: Callable[[str, Fraction], str | None]) -> Rule:
        return lambda text: None if (value := plain_number(text)) is None else rule(text, value)

    def whole(rule: Callable[[int], str | None]) -> Rule:
        return number(lambda text, value: rule(int(value)) if value.denominator == 1 else None)

    yield "N.0", whole(lambda n: f"{n}.0")
    yield "N without .0", number(lambda text, value: str(int(value)) if text.endswith(".0") else None)
    yield "thousands", whole(lambda n: f"{n:,}" if abs(n) > 999 else None)
    yield "latex thousands", whole(lambda n: f"{n:,}".replace(",", "{,}") if abs(n) > 999 else None)
    yield "thin thousands", whole(lambda n: f"{n:,}".replace(",", ",\\!") if abs(n) > 999 else None)
    yield "spaced thousands", whole(lambda n: f"{n:,}".replace(",", " ") if abs(n) > 999 else None)
    yield "thin spaced thousands", whole(lambda n: f"{n:,}".replace(",", "\\,") if abs(n) > 999 else None)
    yield "dozens", whole(lambda n: f"{n // 12} dozen" if n > 12 and n % 12 == 0 else None)
    yield "in thousands", whole(lambda n: f"{n // 1000} \\text{{ thousand}}" if n > 999 and n % 1000 == 0 else None)
    yield "fraction", number(lambda _, v: f"\\frac{{{2 * v.numerator}}}{{{2 * v.denominator}}}")
    yield "slash", number(lambda _, v: f"{v.numerator}/{v.denominator}" if v.denominator > 1 else None)
    yield "root", whole(lambda n: f"\\sqrt{{{n * n}}}" if 0 < n < 1000 else None)
    yield "scientific", number(lambda text, v: f"{float(v) / 10:.15g} \\times 10^{{1}}" if len(text) < 13 else None)
    yield "e notation", number(lambda text, v: f"{Fraction(text) * 100}e-2" if v.denominator == 1 else None)
    yield "named", number(lambda text, _: f"x = {text}")
    yield "unit", number(lambda text, _: f"{text} \\text{{ units}}")
    yield "word unit", number(lambda text, _: f"{text} apples")
    yield "centimetres", number(lambda text, _: f"{text}\\,\\mathrm{{cm}}^2")
    yield "metres", number(lambda text, _: f"{text} \\text{{ m}}")
    yield "dollars", number(lambda text, _: f"\\${text}")
    yield "bold", number(lambda text, _: f"\\mathbf{{{text}}}")
    yield "markdown bold", number(lambda text, _: f"**{text}**")
    yield "sum", whole(lambda n: f"{n - 1} + 1")
    yield "leading zero", whole(lambda n: f"0{n}" if n > 0 else None)


def _times_ten(text: str) -> str | None:
    match = SCIENTIFIC.fullmatch(text)
    return f"{match[1]} \\times 10^{{{int(match[2])}}}" if match else None


def _shifted(text: str) -> str | None:
    match = SCIENTIFIC.fullmatch(text)
    return (
        f"{Fraction(match[1]) * 10}\\cdot10^{{{int(match[2]) - 1}}}"
        if match and "." in match[1] and len(match[1]) == 3
        else None
    )


def _one_fraction(text: str, mixed: bool = False) -> Fraction | None:
    match = FRACTION.fullmatch(text)
    return Fraction(int(match[2] or match[3]), int(match[4] or match[5])) * (-1 if match[1] else 1) if match else None


def _decimal(text: str) -> str | None:
    value = _one_fraction(text)
    if value is None or 10**8 % value.denominator:
        return None
    return f"{float(value):.12g}"


def _repeating(text: str) -> str | None:
    value = _one_fraction(text)
    if value is None or value < 0 or value.denominator not in (3, 9, 11, 33, 99, 27, 37):
        return None
    length = next(n for n in range(1, 4) if (10**n - 1) % value.denominator == 0)
    whole, rest = divmod(value, 1)
    return f"{whole}.\\overline{{{int(rest * (10**length - 1)):0{length}d}}}"


def _mixed(text: str) -> str | None:
    value = _one_fraction(text)
    if value is None or value < 1 or value.denominator == 1:
        return None
    whole, rest = divmod(value, 1)
    return f"{whole}\\frac{{{rest.numerator}}}{{{rest.denominator}}}"


def _slashes(text: str) -> str | None:
    changed = FRACTION.fullmatch(text)
    return f"{changed[1]}{changed[2] or changed[3]}/{changed[4] or changed[5]}" if changed else None


def _deep_slashes(text: str) -> str | None:
    found = re.search(r"\\d?frac\s*\{", text)
    if not found or re.search(r"\d\s*$", text[: found.start()]):  # a mixed number would become a product
        return None
    top, rest = _group(text[found.end() - 1 :])
    bottom, rest = _group(rest.lstrip())
    return None if bottom is None else f"{text[: found.start()]} (({top})/({bottom})) {rest}"


def _group(text: str) -> tuple[str | None, str]:
    depth = 0
    for place, char in enumerate(text):
        depth += (char == "{") - (char == "}")
        if depth == 0:
            return (text[1:place], text[place + 1 :]) if place else (None, text)
    return None, text


def _changed(rewritten: str, text: str) -> str | None:
    return rewritten if rewritten != text else None


def _root(text: str) -> str | None:
    match = re.fullmatch(r"(-?)(\d+)\s*\\sqrt\s*(?:\{(\d+)\}|(\d))", text)
    return f"{match[1]}\\sqrt{{{int(match[2]) ** 2 * int(match[3] or match[4])}}}" if match else None


def _reordered_sum(text: str) -> str | None:
    if not is_expression(text) or len(terms := summands(text)) < 2:
        return None
    first, *rest = terms
    rest = [term if term[0] in "+-" else f"+{term}" for term in rest]
    return f"{rest[-1].removeprefix('+').strip()} {' '.join(rest[:-1])} {first if first[0] == '-' else '+ ' + first}"


def _reversed_list(text: str) -> str | None:
    items = list_items(text)
    named = {"=" in item for item in items}
    return ", ".join(items[::-1]) if items != items[::-1] and len(named) == 1 else None


def _braces(text: str) -> str | None:
    items = list_items(text)
    repeated = len(set(items)) < len(items)
    return "\\{" + ", ".join(items) + "\\}" if items and "=" not in text and not repeated else None


def _and(text: str) -> str | None:
    items = list_items(text)
    return f"{', '.join(items[:-1])} \\text{{ and }} {items[-1]}" if items and "=" not in text else None


def _inequality(text: str) -> str | None:
    if (parts := interval_parts(text)) is None:
        return None
    opening, low, high, closing = parts
    below = f"{low} {'<' if opening == '(' else chr(92) + 'le'} x"
    above = f"{'<' if closing == ')' else chr(92) + 'leq'} {high}"
    if low == "-" + INFINITE:
        return f"x {above}"
    return f"x {'>' if opening == '(' else chr(92) + 'ge'} {low}" if high == INFINITE else f"{below} {above}"


def _member(text: str) -> str | None:
    return f"x \\in {text}" if interval_parts(text) and "in" not in text.replace("infty", "") and text[0] != "t" else None


def _cup(text: str) -> str | None:
    parts = re.split(r"\s*\\cup\s*", text)
    return " \\cup ".join(parts[::-1]) if len(parts) == 2 else None


def _unnamed(text: str) -> str | None:
    sides = equation_sides(text)
    return sides[1] if sides and NAME.fullmatch(sides[0]) else None


def _swapped_sides(text: str) -> str | None:
    sides = equation_sides(text)
    return f"{sides[1]} = {sides[0]}" if sides else None


def _plus_minus(text: str) -> str | None:
    match = re.fullmatch(r"([^,{}]*)\\pm ([^,]*)", text)
    return f"{match[1]} + {match[2]}, {match[1]} - {match[2]}" if match else None


def _twice_half(text: str) -> str | None:
    return f"\\frac{{2\\left({text}\\right)}}{{2}}" if is_expression(text) else None


def _thin_spaces(text: str) -> str | None:
    odd = re.match(r"\d+,|.*\\(?:text|begin)", text)
    return None if odd else _changed(text.replace(", ", ",\\,").replace(" ", "\\; "), text)


def _tight(text: str) -> str:
    return re.sub(r"(?<=[^a-zA-Z0-9\\])\s+(?=[^a-zA-Z])|(?<=[^a-zA-Z\\])\s+(?=[^a-zA-Z0-9])", "", text)


def _texts(shape: str) -> Rule:
    return lambda text: shape.format(found) if (found := word_of(text)) else None


REWRITINGS: dict[str, Rule] = {
    **dict(_number_rules()),
    "times ten": _times_ten,
    "shifted": _shifted,
    "dfrac": lambda t: _changed(re.sub(r"\\[dt]?frac", r"\\dfrac", t), t),
    "braced frac": lambda t: _changed(FRACTION.sub(lambda m: f"{m[1]}\\frac{{{m[2] or m[3]}}}{{{m[4] or m[5]}}}", t), t),
    "a/b": _slashes,
    "(a)/(b)": _deep_slashes,
    "decimal": _decimal,
    "repeating decimal": _repeating,
    "mixed number": _mixed,
    "one root": _root,
    "sqrt()": lambda t: _changed(re.sub(r"\\sqrt\{(\d+)\}", r"sqrt(\1)", t), t) if "," not in t else None,
    "explicit product": lambda t: _changed(re.sub(r"(?<=\d)\s*\\(sqrt|pi)", r" \\cdot \\\1", t), t),
    "pi as a word": lambda t: t.replace(" ", "").replace("\\pi", "pi") if re.fullmatch(r"\d+ ?\\pi", t) else None,
    "left right": lambda t: _changed(re.sub(r"(?<!\\left)\(", r"\\left(", re.sub(r"(?<!\\right)\)", r"\\right)", t)), t)
    if t.count("(") == t.count(")") and "[" not in t and "]" not in t else None,
    "no left right": lambda t: _changed(re.sub(r"\\(?:left|right)(?![a-z])\s*", "", t), t),
    "tight": lambda t: _changed(_tight(t), t),
    "thin spaces": _thin_spaces,
    "spaced commas": lambda t: _changed(re.sub(r",\s*", " , ", t), t) if not has_thousands(t) and "where" not in t else None,
    "displaystyle": lambda t: f"\\displaystyle {t}" if "\\" in t else None,
    "reordered sum": _reordered_sum,
    "twice the half": _twice_half,
    "approximation": lambda t: f"{t} \\approx 1.23" if is_expression(t) and not NAME.fullmatch(t) else None,
    "plus zero": lambda t: f"{t} + 0" if is_expression(t) else None,
    "reversed list": _reversed_list,
    "set": _braces,
    "and": _and,
    "bmatrix": lambda t: _changed(t.replace("pmatrix", "bmatrix"), t),
    "dfrac matrix": lambda t: _changed(re.sub(r"(-?)(\d+)/(\d+)", r"\1\\frac{\2}{\3}", t), t) if "matrix" in t else None,
    "inequality": _inequality,
    "member of": _member,
    "no member of": lambda t: _changed(re.sub(r"^(?:x \\in |t(?=\())", "", t), t),
    "union reordered": _cup,
    "no name": _unnamed,
    "sides swapped": _swapped_sides,
    "plus and minus": _plus_minus,
    "no degrees": lambda t: _changed(re.sub(r"\s*\^\s*\{?\\circ\}?|\\text\{ degrees\}", "", t), t),
    "braced degrees": lambda t: _changed(re.sub(r"\^\\circ", r"^{\\circ}", t), t),
    "degrees in words": lambda t: _changed(re.sub(r"\^\{?\\circ\}?$", " degrees", t), t) if "," not in t else None,
    "no unit": lambda t: _changed(re.sub(r"(?<=[\d}])\s*\\(?:text|mbox)\s?\{[^}]*\}(?:\^2)?$", "", t), t),
    "no dollar": lambda t: _changed(t.replace("\\$", ""), t),
    "no percent": lambda t: _changed(re.sub(r"\s*\\?%$", "", t), t),
    "percent": lambda t: _changed(re.sub(r"\s*(?<!\\)%$", r"\\%", t), t),
    "no thousands": lambda t: re.sub(r",\s*", "", t) if has_thousands(t) else None,
    "word": _texts("{}"),
    "bold word": _texts("\\textbf{{{}}}"),
    "letter in brackets": lambda t: f"({found})" if (found := word_of(t)) and len(found) == 1 else None,
    "lower case": lambda t: found.lower() if (found := word_of(t)) and len(found) > 1 else None,
    "base in brackets": lambda t: re.sub(r"^(\d+)_", r"(\1)_", t) if re.fullmatch(r"\d+_\{?\d+\}?", t) else None,
    "base in braces": lambda t: re.sub(r"_(\d+)$", r"_{\1}", t) if re.fullmatch(r"\d+_\d+", t) else None,
    "base without braces": lambda t: re.sub(r"_\{(\d+)\}$", r"_\1", t) if re.fullmatch(r"\d+_\{\d+\}", t) else None,
}  # fmt: skip
