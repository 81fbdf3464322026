"""Correct answers changed so that their value differs: cases for `benchmarks.grading`.

Each rule makes another text of a correct answer, or None where it does not apply, or might leave the value as it is.
"""

import re
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction

from benchmarks.grading_text import (
    DUALS,
    INFINITE,
    LETTER,
    LITERAL,
    NAME,
    SCIENTIFIC,
    Rule,
    equation_sides,
    has_thousands,
    interval_parts,
    is_expression,
    list_items,
    plain_number,
    split,
    summands,
    word_of,
)


def _bumped(which: int) -> Rule:
    """The first (0) or last (-1) number that is no thousands group, changed by one in its last digit."""

    def rule(text: str) -> str | None:
        found = list(LITERAL.finditer(text))
        if not found:
            return None
        if has_thousands(text):
            found = found[-1:]
        elif "\\mbox" in text:  # not the exponent of a unit
            found = found[:1]
        match = found[which]
        digits = match.group()
        places = len(digits.partition(".")[2])
        step = -1 if digits.endswith("9") else 1  # keeps the width of thousands groups
        changed = str(Decimal(digits) + Decimal(step).scaleb(-places)) if places else str(int(digits) + step)
        changed = changed.zfill(len(digits)) if not places else changed
        rewritten = text[: match.start()] + changed + text[match.end() :]
        return None if "where" in text or re.search(r"/0(?![\d.])|\{0\}$", rewritten) else rewritten

    return rule


def _negated(text: str) -> str | None:
    if plain_number(text) == 0 or text.startswith("+"):
        return None
    if text.startswith("-") and len(summands(text)) == 1:
        return text[1:].strip()
    sides = equation_sides(text)
    if sides and NAME.fullmatch(sides[0]):
        return f"{sides[0]} = -({sides[1]})"
    simple = is_expression(text) or SCIENTIFIC.fullmatch(text)
    return (f"-{text}" if len(summands(text)) == 1 else f"-({text})") if simple else None


def _endpoint(side: int) -> Rule:
    def rule(text: str) -> str | None:
        if (parts := interval_parts(text)) is None or parts[1 + side].endswith(INFINITE):
            return None
        place = text.index(parts[0]) if side == 0 else len(text) - 1
        return text[:place] + DUALS[text[place]] + text[place + 1 :]

    return rule


def _tuple(text: str) -> tuple[list[str], str] | None:
    """The components of the first tuple of an answer, and what follows it."""
    match = re.match(r"(?:\\quad)?(?:\\left)?\(((?:[^()]|\\left\([^()]*\\right\))*?)(?:\\right)?\)(?=$|\s*,)", text)
    components = split(match[1]) if match else []
    return (components, text[match.end() :]) if match and len(components) > 1 else None


def _swapped(text: str) -> str | None:
    found = _tuple(text)
    if not found or found[0][0] == found[0][1]:
        return None
    first, second, *others = found[0]
    swapped = f"({', '.join([second, first, *others])})"
    inside = found[1].replace(" ", "")
    return None if swapped.replace(" ", "") in inside else swapped + found[1]


def _shortened(text: str) -> str | None:
    found = _tuple(text)
    return f"({', '.join(found[0][:-1])}){found[1]}" if found and len(found[0]) > 2 else None


def _dropped(text: str) -> str | None:
    items = list_items(text)
    return ", ".join(items[:-1]) if items and items[-1] not in items[:-1] else None


def _extra(text: str) -> str | None:
    items = list_items(text)
    return ", ".join([*items, "(7123, 7)" if items[0].startswith("(") else "7123"]) if items else None


def _other_operator(text: str) -> str | None:
    if not is_expression(text) or len(terms := summands(text)) < 2:
        return None
    last = terms[-1]
    flipped = ("-" if last[0] == "+" else "+") + last[1:] if last[0] in "+-" else None
    return f"{' '.join(terms[:-1])} {flipped}" if flipped and last[1:].strip() != "0" else None


def _other_letter(text: str) -> str | None:
    if not is_expression(text):
        return None
    letters = [match for match in LETTER.finditer(text) if match.group() not in "eidc"]
    if not letters or "exp" in text or "np" in text or "dot" in text:
        return None
    letter = letters[-1].group()
    return re.sub(rf"(?<![a-zA-Z\\]){letter}(?![a-zA-Z])", "z", text)


def _other_word(text: str) -> str | None:
    if not (found := word_of(text)):
        return None
    return f"\\text{{{'D' if found == 'B' else 'B'}}}" if len(found) == 1 else f"\\text{{{found[::-1]}}}"


def _number(rule: Callable[[str, Fraction], str | None]) -> Rule:
    return lambda text: rule(text, value) if (value := plain_number(text)) else None  # 0 times anything is 0


def _other_unit(text: str) -> str | None:
    if re.search(r"\^\{?\\circ\}?$", text) and "," not in text:
        return re.sub(r"\^\{?\\circ\}?$", r"\\text{ radians}", text)
    changed = re.sub(r"(?<=[\d}])(\s*\\(?:text|mbox)\s?\{\s*)\w+(\s*\}(?:\^2)?)$", r"\1miles\2", text)
    return changed if changed != text else None


def _absolute(text: str) -> str | None:
    """The only occurrence of a letter between bars, where it is no argument of an even function or power."""
    letters = [match for match in LETTER.finditer(text) if match.group() not in "eidcnk"]
    if not is_expression(text) or re.search(r"cos|exp|np|dot|[)}|]\s*\^|\|", text):
        return None
    once = [m for m in letters if sum(n.group() == m.group() for n in letters) == 1]
    alone = [
        m
        for m in once
        if not re.match(r"\s*[\^_('{]", text[m.end() :]) and not text[: m.start()].endswith(("_", "^", "{", "("))
    ]
    return f"{text[: alone[0].start()]}|{alone[0].group()}|{text[alone[0].end() :]}" if alone else None


PERTURBATIONS: dict[str, Rule] = {
    "first number": _bumped(0),
    "last number": _bumped(-1),
    "sign": _negated,
    "lower endpoint": _endpoint(0),
    "upper endpoint": _endpoint(1),
    "swapped": _swapped,
    "component dropped": _shortened,
    "element dropped": _dropped,
    "element added": _extra,
    "operator": _other_operator,
    "factor": lambda t: f"3 \\cdot \\left({t}\\right)" if is_expression(t) and plain_number(t) != 0 else None,
    "plus one": lambda t: f"{t} + 1" if is_expression(t) else None,
    "letter": _other_letter,
    "word": _other_word,
    "decimal shift": lambda t: f"{m[1]}e{int(m[2]) + 1}" if (m := SCIENTIFIC.fullmatch(t)) else None,
    "union piece": lambda t: t.split("\\cup")[0].strip() if "\\cup" in t else None,
    "another base": lambda t: re.sub(r"_\{?\d+\}?$", "_7", t) if re.fullmatch(r"\d+_\{?\d+\}?", t) else None,
    "based": _number(lambda t, v: f"{t}_8" if t.isdigit() and v > 7 else None),
    "percent": _number(lambda t, v: f"{t}\\%" if abs(v) <= 1 else None),
    "scale": _number(lambda t, _: f"{t} \\text{{ million}}"),
    "another unit": _other_unit,
    "times a letter": _number(lambda t, _: f"{t} \\cdot a"),
    "letter behind": lambda t: f"\\left({t}\\right) q" if is_expression(t) and plain_number(t) != 0 else None,
    "letter below": _number(lambda t, _: f"{t}/T"),
    "number words": _number(lambda t, _: f"{t} tenths"),
    "negation": _number(lambda t, _: f"{t} below zero"),
    "spaced": _number(lambda t, _: f"{t[:-1]} {t[-1]}" if t.isdigit() and len(t) > 1 else None),
    "absolute value": _absolute,
    "text instead": lambda t: "I do not know",
}  # fmt: skip
