"""math-verify by itself, as its documentation calls it: what `benchmarks.grading` compares with."""

import logging
from collections.abc import Callable
from functools import lru_cache


def math_verify_alone() -> Callable[[tuple[str, str]], bool]:
    """The work of a worker process: (correct answer, response) -> is it right?"""
    import math_verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)
    parse = lru_cache(lambda text: math_verify.parse(text, parsing_timeout=None))  # type: ignore[arg-type]

    def work(pair: tuple[str, str]) -> bool:
        answer, response = pair
        gold = parse(answer if "$" in answer.replace("\\$", "") else f"${answer}$")
        return math_verify.verify(gold, parse(response), timeout_seconds=None)  # type: ignore[arg-type]

    return work
