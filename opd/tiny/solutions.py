"""Worked solutions of `opd.tiny.arithmetic` as training batches, and the greedy accuracy that measures what was learned.

Shapes: B examples, P prompt tokens, R response tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Protocol

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerFast

from opd.tiny.arithmetic import extract_answer, splits, supervised_problems
from opd.tiny.tokenizer import END, END_ID
from opd.tiny.training import Batch

MAX_RESPONSE_TOKENS = 40
"""The longest worked solution with its end mark has 35."""


class Solvable(Protocol):
    """A problem with its answer and the worked solution that is taught."""

    @property
    def text(self) -> str: ...
    @property
    def answer(self) -> str: ...
    @property
    def solution(self) -> str: ...


def batches(tokenizer: PreTrainedTokenizerFast, size: int, seed: str) -> Iterator[Batch]:
    """Endless batches of `size` problems and their worked solutions, all of whose tokens are trained."""
    problems = supervised_problems(seed)
    while True:
        yield worked(tokenizer, list(islice(problems, size)))


def worked(tokenizer: PreTrainedTokenizerFast, problems: Sequence[Solvable]) -> Batch:
    """The problems, whose texts have the same length, and their worked solutions."""
    solutions = [problem.solution + END for problem in problems]
    responses = tokenizer(solutions, padding=True, padding_side="right", return_tensors="pt").input_ids
    return Batch(encode_prompts(tokenizer, problems), responses, responses)


def encode_prompts(tokenizer: PreTrainedTokenizerFast, prompts: Sequence[Solvable | str]) -> Tensor:
    """Token ids [B, P] of problems or other texts, all of the same length, in the chat template."""
    chats = [[{"role": "user", "content": one if isinstance(one, str) else one.text}] for one in prompts]
    return tokenizer.apply_chat_template(chats, add_generation_prompt=True, return_tensors="pt").input_ids  # type: ignore


def validation_accuracy(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> float:
    """Greedy accuracy on the validation problems."""
    return greedy_accuracy(model, tokenizer, splits()["validation"])


def greedy_accuracy(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, problems: Sequence[Solvable]) -> float:
    """Share of the problems, from 0 to 1, whose greedy response ends and gives the right answer."""
    responses = greedy_responses(model, encode_prompts(tokenizer, problems))
    num_right = 0
    for problem, response in zip(problems, responses.tolist()):
        if END_ID in response:
            text = str(tokenizer.decode(response[: response.index(END_ID)]))
            num_right += extract_answer(text) == problem.answer
    return num_right / len(problems)


@torch.no_grad()
def greedy_responses(model: PreTrainedModel, prompt_BP: Tensor) -> Tensor:
    """The likeliest token at each step, [B, R]; what follows a row's end mark is without meaning."""
    tokens_B1 = prompt_BP
    ended_B1 = torch.zeros(len(prompt_BP), 1, dtype=torch.bool)
    cache = DynamicCache()
    response = []
    while len(response) < MAX_RESPONSE_TOKENS and not ended_B1.all():
        # By position, because the cache's keyword has another name in newer releases of transformers.
        logits_B1V = model(tokens_B1, None, None, cache, use_cache=True, logits_to_keep=1).logits
        tokens_B1 = logits_B1V.argmax(-1)
        ended_B1 |= tokens_B1 == END_ID
        response.append(tokens_B1)
    return torch.cat(response, dim=1)
