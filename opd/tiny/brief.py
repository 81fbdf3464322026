"""The addition of `opd.tiny.arithmetic` by a student that often leaves the working out, as training batches.

In a share of the cases, which follows from nothing in the problem, it writes the answer at once, `#### 932`, and is then
mostly wrong: the sum is too much for one step of so small a model. So its answers differ in length, and the short ones
fail: what a reward that counts tokens needs to be measured by.

Shapes: B examples, P prompt tokens, R response tokens.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import islice

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from opd.tiny.arithmetic import Problem, splits, supervised_problems
from opd.tiny.solutions import encode_prompts
from opd.tiny.tokenizer import END
from opd.tiny.training import Batch, response_probabilities

SHARE = 0.4
"""Of the problems, those that are answered at once."""
NUM_VALIDATION = 200


def batches(tokenizer: PreTrainedTokenizerFast, size: int, seed: str) -> Iterator[Batch]:
    """Endless batches of `size` problems with their worked solutions, or their answers alone."""
    problems, rng = supervised_problems(seed), random.Random(f"{seed} brief")
    while True:
        batch = list(islice(problems, size))
        yield taught(tokenizer, batch, [rng.random() < SHARE for _ in batch])


def taught(tokenizer: PreTrainedTokenizerFast, problems: Sequence[Problem], brief: Sequence[bool]) -> Batch:
    """The problems with their worked solutions, or where `brief` is true their answers alone."""
    solutions = [(one.brief_solution if alone else one.solution) + END for one, alone in zip(problems, brief)]
    responses = tokenizer(solutions, padding=True, padding_side="right", return_tensors="pt").input_ids
    return Batch(encode_prompts(tokenizer, list(problems)), responses, responses)


def validation_accuracy(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> float:
    """Accuracy at temperature 1 on validation problems, with nothing left to chance: how probable the worked solution
    and the right answer alone are together."""
    problems = splits()["validation"][:NUM_VALIDATION]
    worked, brief = (right_probabilities(model, tokenizer, problems, brief=alone) for alone in (False, True))
    return float((worked + brief).mean())


def right_probabilities(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, problems: Sequence[Problem], *, brief: bool
) -> Tensor:
    """[B]: the probability of each problem's worked solution, or of its answer alone."""
    return response_probabilities(model, taught(tokenizer, problems, [brief] * len(problems)))
