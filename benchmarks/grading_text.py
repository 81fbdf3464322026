"""Reading correct answers by their text alone, for the cases of `benchmarks.grading`: shares no code with the grader."""

import re
from collections.abc import Callable
from fractions import Fraction

Rule = Callable[[str], str | None]

NUMBER = re.compile(r"-?(?:\d+\.?\d*|\.\d+)")
FRACTION = re.compile(r"(-?)\\[dt]?frac\s*(?:\{(\d+)\}|(\d))\s*(?:\{(\d+)\}|(\d+))")
SCIENTIFIC = re.compile(r"([+-]?\d+\.?\d*)e([+-]?\d+)")
LITERAL = re.compile(r"\d+(?:\.\d+)?|\.\d+")
NAME = re.compile(r"(?:[a-zA-Z]|\\alpha)(?:\([a-z]\))?")
LETTER = re.compile(r"(?<![a-zA-Z\\])[a-zA-Z](?![a-zA-Z])")
INFINITE = r"\infty"
DUALS = {"(": "[", "[": "(", ")": "]", "]": ")"}


def bare(answer: str) -> str:
    """Without math delimiters and the final full stop."""
    return re.sub(r"\\!\s*", "", answer).replace("\\$", "@").replace("$", "").replace("@", "\\$").strip().rstrip(".")


def split(text: str, separator: str = ",") -> list[str]:
    """The parts between separators that no bracket encloses. Thousands' separators do not count."""
    depth, parts, start = 0, [], 0
    for place, char in enumerate(text):
        depth += (char in "([{") - (char in ")]}")
        if char == separator and depth == 0:
            parts.append(text[start:place].strip())
            start = place + 1
    return [*parts, text[start:].strip()]


def plain_number(text: str) -> Fraction | None:
    return Fraction(text) if NUMBER.fullmatch(text) else None


def has_thousands(text: str) -> bool:
    return bool(re.fullmatch(r"(?:\\\$)?\d{1,3}(?:,\s*\d{3})+(?:\.\d+)?", text))


def list_items(text: str) -> list[str]:
    """The elements of a bare list; none for a single answer."""
    parts = split(text)
    prose = "where" in text or "\\text" in text or "\\mbox" in text
    return [] if len(parts) < 2 or has_thousands(text) or prose else parts


def is_expression(text: str) -> bool:
    """One formula: no list, tuple, relation, text, unit, base or matrix."""
    odd = re.search(
        r"[,=@%<>;]|\\(?:geq|ge|le|text|mbox|begin|infty|cup|in\b|pm|circ|angle|\$)|\d_|[a-z]{4}|^t\(",
        _without_commands(text),
    )
    return not odd and bool(text)


def _without_commands(text: str) -> str:
    """Without the names of commands that are part of an expression."""
    return re.sub(
        r"\\(?:left|right|frac|sqrt|binom|lfloor|rfloor|lceil|rceil|cos|sin|alpha|omega|theta|lambda|hbar|tau|"
        r"Delta|sigma|zeta|gamma|delta|pi|ln|log|cot|exp|arcsin|cdot|ddot|dot|prime|rho|quad|np)(?![a-z])|np\.arcsin",
        "",
        text,
    )


def summands(text: str) -> list[str]:
    """The summands of an expression, each with its sign."""
    depth, parts, start = 0, [], 0
    for place, char in enumerate(text):
        depth += (char in "([{") - (char in ")]}")
        tail = text[:place].rstrip()
        if char in "+-" and depth == 0 and tail and tail[-1] not in "^_*/(e" and not tail.endswith(("\\cdot", "\\times")):
            parts.append(text[start:place].strip())
            start = place
    return [*parts, text[start:].strip()]


def interval_parts(text: str) -> tuple[str, str, str, str] | None:
    match = re.fullmatch(r"(?:x \\in )?(?:\\left)?([(\[])(.*?),(.*?)(?:\\right)?([)\]])", text)
    if not match or "cup" in text or "," in match[3] or not (INFINITE in text or "[" in text or "]" in text):
        return None
    return match[1], match[2].strip(), match[3].strip(), match[4]


def equation_sides(text: str) -> list[str]:
    sides = text.split("=")
    return [side.strip() for side in sides] if len(sides) == 2 and "," not in text and "\\angle" not in text else []


def word_of(text: str) -> str | None:
    match = re.fullmatch(r"\\text\{\s*\(?(\w+)\)?\s*\}", text)
    return match[1] if match else None


def cases(answer: str, rules: dict[str, Rule]) -> dict[str, str]:
    """What each rule that applies makes of a correct answer, by the rule's name."""
    text = bare(answer)
    made = {name: rule(text) for name, rule in rules.items()}
    return {name: changed for name, changed in made.items() if changed is not None and changed != text}
