"""math-verify, for the answers that are not understood otherwise. It is slow, may never return, and raises in threads."""

import logging
import re
from functools import cache, lru_cache
from typing import Any


def algebraically_equal(extracted: str, answer: str) -> bool:
    """Whether an extracted answer equals a correct one by math-verify's rules. It may never return."""
    parse, verify = _math_verify()
    parsed = parse(extracted)
    return bool(parsed) and verify(parse(answer), parsed)


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
