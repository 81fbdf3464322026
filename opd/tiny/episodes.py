"""Worked episodes of `opd.envs.calculator` as training batches, and how probable it is that a model makes no mistake.

Shapes: B episodes, P prompt tokens, R tokens from the first reply to the last, the observations between them included.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from opd.envs.calculator import TOOL as TOOL_NAME
from opd.envs.calculator import Calculator, CalculatorConfig, drawn
from opd.envs.environment import Message
from opd.episodes import Reply, ToolCall
from opd.tiny.tokenizer import ASSISTANT, CALL, END, PAD_ID, TOOL
from opd.tiny.training import Batch, response_probabilities

LENGTH = 10
"""Operations in an episode."""
NUM_VALIDATION = 256


class Piece(NamedTuple):
    """A stretch of an episode: a turn of the student's, or what stands between two of them."""

    text: str
    trained: bool


def worked(environment: Calculator) -> Iterator[Piece]:
    """Plays the episode that `environment` was reset to, without a mistake."""
    for expression in environment.calls:
        observation = environment.step(Reply("", (ToolCall(TOOL_NAME, {"expression": expression}),)))
        yield Piece(CALL + expression + END, trained=True)
        yield Piece(observed(observation.messages), trained=False)
    yield Piece(environment.value + END, trained=True)


def observed(messages: Sequence[Message]) -> str:
    """What the chat template writes between two turns of the student's."""
    return "".join(TOOL + message["content"] + END for message in messages) + ASSISTANT


def batches(tokenizer: PreTrainedTokenizerFast, size: int, seed: str) -> Iterator[Batch]:
    """Endless batches of `size` worked episodes; observations are not trained."""
    rng = random.Random(seed)
    environment = Calculator(CalculatorConfig(length=LENGTH))
    while True:
        openings, responses, targets = [], [], []
        for _ in range(size):
            openings.append(environment.reset(drawn(rng, LENGTH), seed=0))
            pieces = list(worked(environment))
            ids = tokenizer([piece.text for piece in pieces]).input_ids
            responses.append([i for part in ids for i in part])
            targets.append([i if piece.trained else PAD_ID for piece, part in zip(pieces, ids) for i in part])
        prompts = tokenizer.apply_chat_template(openings, add_generation_prompt=True, return_tensors="pt").input_ids  # type: ignore
        yield Batch(prompts, torch.tensor(responses), torch.tensor(targets))


def validation_accuracy(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> float:
    """Accuracy at temperature 1 on validation episodes, all mistakes counted and nothing left to chance."""
    return flawless_probability(model, next(batches(tokenizer, NUM_VALIDATION, seed="validation")))


def flawless_probability(model: PreTrainedModel, batch: Batch) -> float:
    """The probability, averaged over the worked episodes, that sampling at temperature 1 gives exactly their replies.

    More episodes than these succeed: after a mistake, every tenth answer is still right.
    """
    return float(response_probabilities(model, batch).mean())
