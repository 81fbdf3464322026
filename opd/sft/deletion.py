"""Supervised traces without some of their steps: what is deleted is not there for later tokens to see.

E-SFT (Hwang et al., arXiv 2609.07103): a teacher's reasoning is split by blank lines, its first n and last n steps stay, and
so does the final answer. n is one number for all of the data, chosen so that about a fifth of the tokens go. The middle of
the student's own rollouts is masked instead, and stays in the context: see `opd.strategies.endpoint`.
"""

import random
from dataclasses import dataclass
from typing import Literal

from omegaconf import MISSING

from opd.errors import UserError
from opd.traces import Thinking, answer_lines, step_ends


@dataclass(frozen=True)
class DeletionConfig:
    """Steps of the answers' reasoning that are deleted; the final answer stays. Reasoning is `reasoning_content` where an
    answer has it, else what stands between `<think>` and `</think>`, else everything before the last line with `\\boxed{`,
    or with `####` where none has that."""

    steps: int = MISSING
    """n: answers of at most 2n steps stay as they are, of longer ones 2n steps are kept. Published: 100 for s1K-1.1, 200 for
    OpenThoughts3; `opd sft --dry-run` says what share of your data goes."""
    keep: Literal["endpoints", "head", "tail", "random"] = "endpoints"
    """Which steps stay: the first n and the last n; or, as controls, the first 2n, the last 2n, or 2n drawn by chance, in
    their order."""
    delimiter: str = "\n\n"
    """What ends a step."""
    seed: int = 0
    """Fixes what `random` draws, together with the row's id."""

    def check(self, field: str) -> None:
        """Raises `UserError` naming `field`, as `dataset.delete_steps`."""
        if self.steps < 1:
            raise UserError(f"{field}.steps is {self.steps}: it must be at least 1")
        if not self.delimiter:
            raise UserError(f"{field}.delimiter is empty: name the text that ends a step")


def shortened(text: str, config: DeletionConfig, name: str, *, whole: bool = False) -> str:
    """`text` without the steps that `config` deletes. `name` is the row's id. `whole`: all of it is reasoning."""
    data, delimiter = text.encode(), config.delimiter.encode()
    first, last = (0, len(data)) if whole else _reasoning(data)
    ends = [first + end for end in step_ends(data[first:last], delimiter)]
    steps = [data[start:end] for start, end in zip([first, *ends], ends)]
    kept = _kept(len(steps), config, name)
    if len(kept) == len(steps):
        return text
    *before, end = (steps[i] for i in kept)
    body = _body(end, delimiter) + steps[-1][len(_body(steps[-1], delimiter)) :]  # what follows is as far from it as before
    return (data[:first] + b"".join(before) + body + data[last:]).decode()


def _kept(num_steps: int, config: DeletionConfig, name: str) -> list[int]:
    n = config.steps
    if num_steps <= 2 * n:
        return list(range(num_steps))
    if config.keep == "endpoints":
        return [*range(n), *range(num_steps - n, num_steps)]
    if config.keep == "random":
        return sorted(random.Random(f"{config.seed} {name}").sample(range(num_steps), 2 * n))
    return list(range(2 * n)) if config.keep == "head" else list(range(num_steps - 2 * n, num_steps))


def _reasoning(data: bytes) -> tuple[int, int]:
    """[start, end) in bytes."""
    thinking = Thinking.of(data)
    if thinking is not None:
        return thinking.start, thinking.end
    answers = answer_lines(data)
    return 0, answers[0][0] if answers else len(data)


def _body(step: bytes, delimiter: bytes) -> bytes:
    """The step without what ends it."""
    return step.rstrip().removesuffix(delimiter.rstrip()).rstrip()
