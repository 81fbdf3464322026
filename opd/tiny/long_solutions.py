"""Worked solutions of `opd.tiny.long_addition` as training batches, and how probable a model's right solution is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from transformers import PreTrainedModel, PreTrainedTokenizerFast

from opd.tiny.long_addition import LongProblem, splits, supervised_problems
from opd.tiny.tokenizer import END
from opd.tiny.training import Batch, response_probabilities


def batches(tokenizer: PreTrainedTokenizerFast, size: int, seed: str) -> Iterator[Batch]:
    """Endless batches of `size` problems and their worked solutions, all of whose tokens are trained."""
    problems = supervised_problems(seed)
    while True:
        yield worked(tokenizer, list(islice(problems, size)))


def worked(tokenizer: PreTrainedTokenizerFast, problems: Sequence[LongProblem]) -> Batch:
    """The problems in the chat template, all of the same length, and their worked solutions."""
    chats = [[{"role": "user", "content": problem.text}] for problem in problems]
    prompts = tokenizer.apply_chat_template(chats, add_generation_prompt=True, return_tensors="pt").input_ids  # type: ignore
    solutions = [problem.solution + END for problem in problems]
    responses = tokenizer(solutions, padding=True, padding_side="right", return_tensors="pt").input_ids
    return Batch(prompts, responses, responses)


def validation_accuracy(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> float:
    """The probability, averaged over the validation problems, that sampling at temperature 1 gives the worked solution.

    Hardly a response with a mistake in it ends with the right answer.
    """
    return float(response_probabilities(model, worked(tokenizer, splits()["long-validation"])).mean())
