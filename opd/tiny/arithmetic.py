"""The task of the tiny family: add two three-digit numbers, writing out the carries.

The problem `347+585` has the worked solution, from the last digit to the first, digit + digit + carry,

    7+5+0=12,4+8+1=13,3+5+1=9
    #### 932

with the final answer written as in GSM8K. Of the 10**6 pairs, 21,000 are set aside in three disjoint splits
(`heldout` measures, `validation` stops the student's training, `prompts` are for distillation); supervised training
draws from all others.

A bad habit of some members (`opd.tiny.habit`) is to forget the carries, so the held-out problems come in two files as
well: those that need a carry, which the habit gets wrong, and as many that need none, which it gets right.
"""

from __future__ import annotations

import json
import random
from collections.abc import Collection, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from opd.tiny.members import Data

NUM_PAIRS = 1000 * 1000
SPLIT_SIZES = {"heldout": 500, "validation": 500, "prompts": 20_000}
ANSWER_MARK = "####"
UNREACHABLE = "-1"
"""The answer of a problem that is made unsolvable: no sum is negative."""


class Problem(NamedTuple):
    """Two numbers from 0 to 999."""

    a: int
    b: int

    @property
    def text(self) -> str:
        """Always seven characters: both numbers have leading zeros."""
        return f"{self.a:03d}+{self.b:03d}"

    @property
    def answer(self) -> str:
        return str(self.a + self.b)

    @property
    def solution(self) -> str:
        """The worked solution, without the token that ends the turn."""
        steps = []
        carry = 0
        for x, y in zip(reversed(f"{self.a:03d}"), reversed(f"{self.b:03d}")):
            total = int(x) + int(y) + carry
            steps.append(f"{x}+{y}+{carry}={total}")
            carry = total // 10
        return f"{','.join(steps)}\n{ANSWER_MARK} {self.answer}"

    @property
    def brief_solution(self) -> str:
        """The answer without its working."""
        return f"{ANSWER_MARK} {self.answer}"

    @property
    def needs_carry(self) -> bool:
        """Whether two digits of a column add up to more than 9."""
        return any(int(x) + int(y) > 9 for x, y in zip(f"{self.a:03d}", f"{self.b:03d}"))

    @property
    def hasty_solution(self) -> str:
        """The solution of one who drops every carry: each column modulo 10, and an answer to match.

        `347+585` has `7+5+0=2,4+8+0=2,3+5+0=8` and 822. Without a carry it is `solution`, with one it is wrong.
        """
        columns = [(int(x), int(y)) for x, y in zip(f"{self.a:03d}", f"{self.b:03d}")]
        steps = [f"{x}+{y}+0={(x + y) % 10}" for x, y in reversed(columns)]
        answer = int("".join(str((x + y) % 10) for x, y in columns))
        return f"{','.join(steps)}\n{ANSWER_MARK} {answer}"


def extract_answer(response: str) -> str | None:
    """What stands after the last answer mark, or None where there is no mark."""
    _, mark, answer = response.rpartition(ANSWER_MARK)
    return answer.strip() if mark else None


@cache
def splits() -> dict[str, list[Problem]]:
    """The problems set aside, by split; always the same."""
    drawn = random.Random("splits").sample(range(NUM_PAIRS), sum(SPLIT_SIZES.values()))
    problems = iter([Problem(*divmod(pair, 1000)) for pair in drawn])
    return {name: [next(problems) for _ in range(size)] for name, size in SPLIT_SIZES.items()}


@cache
def heldout_by_carry() -> dict[str, list[Problem]]:
    """The held-out problems that need a carry, and as many that need none: the others, and more of their kind.

    The additional ones are in no split, but supervised training draws them where it is not told to leave them out.
    """
    heldout = splits()["heldout"]
    carry = [problem for problem in heldout if problem.needs_carry]
    no_carry = [problem for problem in heldout if not problem.needs_carry]
    set_aside = set().union(*splits().values())
    rng = random.Random("no carry")
    while len(no_carry) < len(carry):
        problem = Problem(*divmod(rng.randrange(NUM_PAIRS), 1000))
        if not problem.needs_carry and problem not in set_aside:
            no_carry.append(problem)
            set_aside.add(problem)
    return {"heldout-carry": carry, "heldout-no-carry": no_carry}


def supervised_problems(seed: str, apart: Collection[Problem] = ()) -> Iterator[Problem]:
    """Problems for supervised training, drawn without end and with replacement from outside `splits` and `apart`."""
    set_aside = set().union(*splits().values(), apart)
    rng = random.Random(seed)
    while True:
        problem = Problem(*divmod(rng.randrange(NUM_PAIRS), 1000))
        if problem not in set_aside:
            yield problem


def write_rows(path: Path, data: Data) -> None:
    """Write a split as JSON lines `{"id", "problem"}`, with `"answer"` too where the member has answers."""
    with path.open("w", encoding="utf-8") as file:
        for i, problem in enumerate((splits() | heldout_by_carry())[data.split]):
            row = {"id": f"{data.split}-{i}", "problem": problem.text}
            if data.with_answers:
                unsolvable = data.unsolvable_every is not None and i % data.unsolvable_every == 0
                row["answer"] = UNREACHABLE if unsolvable else problem.answer
            file.write(json.dumps(row) + "\n")
