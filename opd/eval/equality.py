"""When two written answers are the same: by normalised text and by number, else by math-verify's algebra."""

import logging
import re
from decimal import Decimal
from functools import cache, lru_cache
from typing import Any

_REWRITES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in [
        (r"\\?\$|\\\(|\\\)|\\\[(?!\w)|(?<!\\)\\\]", ""),
        (r"\\[dt]frac(?![a-zA-Z])", r"\\frac"),
        (r"\\(?:left|right)(?![a-zA-Z])", ""),
        (r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox)\s*\{([^{}]*)\}", r"\1"),
        (r"(?<!\\)\\[,;:! ]|~", " "),
        (r"(?<=\d)\{,\}\s*(?=\d{3})", ","),
        (r"(?<!\d)\s+|\s+(?!\d)", ""),  # "1 1/2" is not "11/2"
        (r"(?<!\.)\.$", ""),
        (r"^\(([A-Za-z])\)$", r"\1"),  # a multiple-choice letter
    ]
]
_THOUSANDS = re.compile(r"[+-]?\d{1,3}(?:,\d{3})+(?:\.\d*)?")
_NUMBER = re.compile(
    r"(?P<mantissa>[+-]?(?:\d+\.?\d*|\.\d+))"
    r"(?:[eE](?P<e>[+-]?\d{1,4})|\\(?:times|cdot)10\^(?:\{(?P<braced>[+-]?\d{1,4})\}|(?P<digit>\d)))?"
)


def normalise(answer: str) -> str:
    """The answer without what does not change its meaning: delimiters, spacing, `\\\\text`, `\\\\left`, separators.

    Example: `normalise("$\\\\dfrac{1}{2}$.") == "\\\\frac{1}{2}"`
    """
    for pattern, replacement in _REWRITES:
        answer = pattern.sub(replacement, answer)
    return answer.replace(",", "") if _THOUSANDS.fullmatch(answer) else answer


def same_value(extracted: str, answer: str) -> bool | None:
    """Whether two answers are the same, if that can be told from their text alone; None if it takes algebra."""
    first, second = normalise(extracted), normalise(answer)
    if first == second:
        return True
    numbers = _number(first), _number(second)
    if None not in numbers:
        return numbers[0] == numbers[1]
    if first.isalpha() and second.isalpha() and min(len(first), len(second)) > 3:
        return first.casefold() == second.casefold()  # words: algebra would take anagrams for equal products
    return None


def _number(text: str) -> Decimal | None:
    match = _NUMBER.fullmatch(text)
    if match is None:
        return None
    return Decimal(f"{match['mantissa']}e{match['e'] or match['braced'] or match['digit'] or 0}")


def equivalent(pair: tuple[str, tuple[str, ...]]) -> bool:
    """Whether an extracted answer equals any of the correct answers by math-verify's rules. It may never return."""
    extracted, answers = pair
    parse, verify = _math_verify()
    parsed = parse(extracted)
    return bool(parsed) and any(verify(parse(answer), parsed) for answer in answers)


@cache
def _math_verify() -> tuple[Any, Any]:
    """Its `parse` of one LaTeX expression and its `verify`, both without its own signal-based time limits."""
    import math_verify  # here, since it takes half a second and most answers never need it

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that the time limits are off
    # Only the box: its plain-expression reader would fish numbers out of prose.
    config = [math_verify.LatexExtractionConfig(boxed_match_priority=0)]

    @lru_cache(maxsize=4096)  # a prompt's correct answer is compared with many samples
    def parse(answer: str) -> list[Any]:
        return math_verify.parse(f"\\boxed{{{_as_latex(answer)}}}", config, parsing_timeout=None)  # type: ignore

    def verify(gold: list[Any], parsed: list[Any]) -> bool:
        return math_verify.verify(gold, parsed, timeout_seconds=None)

    return parse, verify


def _as_latex(answer: str) -> str:
    """Programming notation as LaTeX: `1.2e-8` would be read as a product with Euler's number."""
    answer = re.sub(r"(?<![a-zA-Z\\\d.])(\d+\.?\d*)[eE]([+-]?\d{1,4})(?![\w.])", r"\1 \\times 10^{\2}", answer)
    return answer.replace("**", "^")
