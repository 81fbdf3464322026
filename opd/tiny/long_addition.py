"""The long task of the tiny family: add two numbers of six digits, a step for each column and its carry.

A solution is twice as long as one of `opd.tiny.arithmetic`, and has steps that can be told apart: from the last digit
to the first, digit + digit + carry = two digits, each step ended by a blank line as in real reasoning traces,

    7+5+0=12

    4+8+1=13

    ...

    #### 592532

All steps have the same length, so that two of the six are exactly a third of the reasoning, and so have all answers. Three
disjoint splits of the pairs are set aside; supervised training draws from all others.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from opd.tiny.arithmetic import ANSWER_MARK
from opd.tiny.members import Data

DIGITS = 6
DELIMITER = "\n\n"
SPLIT_SIZES = {"long-heldout": 500, "long-validation": 256, "long-prompts": 5_000}


class LongProblem(NamedTuple):
    """Two numbers of `DIGITS` digits that begin with 1 to 4, so that their sum has as many."""

    a: int
    b: int

    @property
    def text(self) -> str:
        return f"{self.a}+{self.b}"

    @property
    def answer(self) -> str:
        return str(self.a + self.b)

    @property
    def steps(self) -> list[str]:
        """One a column, from the last to the first."""
        steps = []
        carry = 0
        for x, y in zip(reversed(str(self.a)), reversed(str(self.b))):
            total = int(x) + int(y) + carry
            steps.append(f"{x}+{y}+{carry}={total:02d}")
            carry = total // 10
        return steps

    @property
    def solution(self) -> str:
        """The worked solution, without the token that ends the turn."""
        return DELIMITER.join([*self.steps, f"{ANSWER_MARK} {self.answer}"])


def drawn(rng: random.Random) -> Iterator[LongProblem]:
    """Problems without end, with replacement."""
    while True:
        yield LongProblem(*(rng.randrange(10 ** (DIGITS - 1), 5 * 10 ** (DIGITS - 1)) for _ in range(2)))


@cache
def splits() -> dict[str, list[LongProblem]]:
    """The problems set aside, by split; always the same."""
    found: dict[LongProblem, None] = {}
    problems = drawn(random.Random("long splits"))
    while len(found) < sum(SPLIT_SIZES.values()):
        found[next(problems)] = None
    rest = iter(found)
    return {name: [next(rest) for _ in range(size)] for name, size in SPLIT_SIZES.items()}


def supervised_problems(seed: str) -> Iterator[LongProblem]:
    """Problems for supervised training, drawn without end and with replacement from outside `splits`."""
    set_aside = set().union(*splits().values())
    return (problem for problem in drawn(random.Random(seed)) if problem not in set_aside)


def write_rows(path: Path, data: Data) -> None:
    """Write a split as JSON lines `{"id", "problem"}`, and `"answer"` and the worked `"solution"` where the member has
    answers."""
    with path.open("w", encoding="utf-8") as file:
        for i, problem in enumerate(splits()[data.split]):
            row = {"id": f"{data.split}-{i}", "problem": problem.text}
            if data.with_answers:
                row |= {"answer": problem.answer, "solution": problem.solution}
            file.write(json.dumps(row) + "\n")
