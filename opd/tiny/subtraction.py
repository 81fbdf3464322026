"""The second task of the tiny family: take the smaller of two three-digit numbers from the greater, borrowing.

The problem `585-347` has the worked solution, from the last digit to the first, digit - digit - what was borrowed from it,

    15-7-0=8,8-4-1=3,5-3-0=2
    #### 238

where the first digit has ten added to it if it must borrow from the next. Both tasks have problems of the same length. Three
disjoint splits are set aside; supervised training draws from all other problems.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from opd.tiny import arithmetic
from opd.tiny.arithmetic import ANSWER_MARK
from opd.tiny.members import Data

SPLIT_SIZES = {"heldout": 500, "validation": 500, "prompts": 20_000}


class Difference(NamedTuple):
    """Two numbers from 0 to 999, the second not above the first."""

    a: int
    b: int

    @property
    def text(self) -> str:
        """Always seven characters: both numbers have leading zeros."""
        return f"{self.a:03d}-{self.b:03d}"

    @property
    def answer(self) -> str:
        return str(self.a - self.b)

    @property
    def solution(self) -> str:
        """The worked solution, without the token that ends the turn."""
        steps = []
        borrowed = 0
        for x, y in zip(reversed(f"{self.a:03d}"), reversed(f"{self.b:03d}")):
            borrows = int(x) - int(y) - borrowed < 0
            upper = int(x) + 10 * borrows
            steps.append(f"{upper}-{y}-{borrowed}={upper - int(y) - borrowed}")
            borrowed = int(borrows)
        return f"{','.join(steps)}\n{ANSWER_MARK} {self.answer}"


def drawn(rng: random.Random) -> Iterator[Difference]:
    """Problems without end, with replacement: any two numbers, put in order."""
    while True:
        pair = divmod(rng.randrange(arithmetic.NUM_PAIRS), 1000)
        yield Difference(max(pair), min(pair))


@cache
def splits() -> dict[str, list[Difference]]:
    """The problems set aside, by split; always the same."""
    found: dict[Difference, None] = {}
    problems = drawn(random.Random("subtraction splits"))
    while len(found) < sum(SPLIT_SIZES.values()):
        found[next(problems)] = None
    rest = iter(found)
    return {name: [next(rest) for _ in range(size)] for name, size in SPLIT_SIZES.items()}


def supervised_problems(seed: str) -> Iterator[Difference]:
    """Problems for supervised training, drawn without end and with replacement from outside `splits`."""
    set_aside = set().union(*splits().values())
    return (problem for problem in drawn(random.Random(seed)) if problem not in set_aside)


def write_rows(path: Path, data: Data) -> None:
    """Write a split as JSON lines `{"id", "problem"}`, with `"answer"` too where the member has answers.

    A split whose name begins with `pair` has the problems of both tasks, by turns, and their names as `"domain"`.
    """
    task, _, split = data.split.partition("-")
    both = zip(arithmetic.splits()[split], splits()[split])
    rows: list[tuple[str | None, arithmetic.Problem | Difference]]
    if task == "pair":
        rows = [row for plus, minus in both for row in (("addition", plus), ("subtraction", minus))]
    else:
        rows = [(None, problem) for problem in splits()[split]]
    with path.open("w", encoding="utf-8") as file:
        for i, (domain, problem) in enumerate(rows):
            row = {"id": f"{data.split}-{i}", "problem": problem.text}
            row |= {"answer": problem.answer} if data.with_answers else {}
            row |= {"domain": domain} if domain else {}
            file.write(json.dumps(row) + "\n")
