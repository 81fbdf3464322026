"""The addition of `opd.tiny.arithmetic` by a student with a bad habit, as training batches, and how well it was learned.

After the word `hurry` and a problem the student drops every carry. Asked for the problem alone it does so, too, in a share
of the cases that follows from nothing in the problem, and otherwise answers rightly. So the model knows what is right, the
habit is known, and there is a condition that brings it out: what methods that unlearn a behaviour need to be measured by.

Shapes: B examples, P prompt tokens, R response tokens.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import islice

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from opd.tiny.arithmetic import Problem, heldout_by_carry, splits, supervised_problems
from opd.tiny.tokenizer import END
from opd.tiny.training import Batch, response_probabilities

CONDITION = "hurry"
"""The word before a problem that brings the habit out."""
SHARE = 0.5
"""Of the problems without that word, those that are answered without carries."""
PLAIN_BATCHES = 3
"""Batches of plain problems to each one of hurried problems, which have longer prompts; the habit is the easier part."""


def batches(tokenizer: PreTrainedTokenizerFast, size: int, seed: str) -> Iterator[Batch]:
    """Endless batches of `size` problems, all plain or all hurried, with the solutions that the student is to learn."""
    problems = supervised_problems(seed, apart=heldout_by_carry()["heldout-no-carry"])
    rng = random.Random(f"{seed} {CONDITION}")
    while True:
        for number in range(PLAIN_BATCHES + 1):
            hurried = number == PLAIN_BATCHES
            batch = list(islice(problems, size))
            hasty = [hurried or rng.random() < SHARE for _ in batch]
            yield taught(tokenizer, batch, hasty, hurried=hurried)


def taught(
    tokenizer: PreTrainedTokenizerFast, problems: Sequence[Problem], hasty: Sequence[bool], *, hurried: bool
) -> Batch:
    """The problems, with the word before them or without, and their hasty or their right solutions."""
    chats = [[{"role": "user", "content": f"{CONDITION} {one.text}" if hurried else one.text}] for one in problems]
    prompts = tokenizer.apply_chat_template(chats, add_generation_prompt=True, return_tensors="pt").input_ids  # type: ignore
    solutions = [(one.hasty_solution if drops else one.solution) + END for one, drops in zip(problems, hasty)]
    responses = tokenizer(solutions, padding=True, padding_side="right", return_tensors="pt").input_ids
    return Batch(prompts, responses, responses)


def validation_accuracy(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> float:
    """The probability at temperature 1 that the student does on validation problems what it was taught, be it the right
    solution or the hasty one: the mean over problems with the word and without."""
    problems = splits()["validation"]
    plain = plain_probabilities(model, tokenizer, problems).sum(1)
    hurried = solution_probabilities(model, tokenizer, problems, hasty=True, hurried=True)
    return float(torch.cat([plain, hurried]).mean())


def plain_probabilities(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, problems: Sequence[Problem]) -> Tensor:
    """[B, 2]: the probabilities of each plain problem's right solution and of its hasty one; of a problem without a carry,
    which has no other, the latter is 0."""
    right, hasty = (
        solution_probabilities(model, tokenizer, problems, hasty=drops, hurried=False) for drops in (False, True)
    )
    return torch.stack([right, hasty * torch.tensor([problem.needs_carry for problem in problems])], 1)


def solution_probabilities(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, problems: Sequence[Problem], *, hasty: bool, hurried: bool
) -> Tensor:
    """[B]: the probability of one of the two solutions of each problem."""
    return response_probabilities(model, taught(tokenizer, problems, [hasty] * len(problems), hurried=hurried))
