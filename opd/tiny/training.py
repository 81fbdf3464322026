"""Supervised training of a tiny model.

Shapes: B examples, P prompt tokens, R response tokens. All prompts have the same length, so prompts need no padding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import Progress
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from opd.tiny.members import Model, Supervised
from opd.tiny.tokenizer import PAD_ID


class Batch(NamedTuple):
    """Examples of equal prompt length; responses are padded on the right."""

    prompt_BP: Tensor
    response_BR: Tensor
    targets_BR: Tensor
    """The response's ids where they are trained, PAD_ID elsewhere."""


@dataclass(frozen=True)
class Lessons:
    """What a model learns, and how that is measured."""

    batches: Callable[[PreTrainedTokenizerFast, int, str], Iterator[Batch]]
    """Endless, from the tokenizer, the batch size and a seed."""
    accuracy: Callable[[PreTrainedModel, PreTrainedTokenizerFast], float]
    """On the validation problems, from 0 to 1."""


@dataclass(frozen=True)
class Outcome:
    num_steps: int
    validation_accuracy: float
    """Share of the validation problems answered rightly, as `Lessons.accuracy` measures it."""


def train(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    member: Model,
    lessons: Lessons,
    name: str,
    console: Console,
) -> Outcome:
    """Train `model` in place. `name` seeds the order of the examples and labels the progress bar."""
    settings = member.training
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, weight_decay=0.0, fused=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_factor(step, settings))
    batches = lessons.batches(tokenizer, settings.batch_size, name)
    with Progress(console=console) as progress:
        bar = progress.add_task(f"tiny:{name}", total=settings.max_steps)
        for num_steps in range(1, settings.max_steps + 1):
            loss = response_loss(model, next(batches))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            progress.advance(bar)
            if settings.stop_early and num_steps % settings.check_every_steps == 0:
                accuracy = lessons.accuracy(model, tokenizer)
                if accuracy >= settings.min_accuracy:
                    sharpen(model, member.sharpness)
                    return Outcome(num_steps, accuracy)
    sharpen(model, member.sharpness)
    accuracy = lessons.accuracy(model, tokenizer)
    if accuracy < settings.min_accuracy:
        raise RuntimeError(
            f"tiny:{name} reached an accuracy of {accuracy:.3f} in {settings.max_steps} steps and must reach "
            f"{settings.min_accuracy}: try another seed, as in tiny:NAME@SEED"
        )
    return Outcome(settings.max_steps, accuracy)


def learning_rate_factor(step: int, settings: Supervised) -> float:
    """What the learning rate is multiplied with at `step`, counted from 0."""
    warmup_steps = max(1, round(settings.warmup * settings.max_steps))
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if settings.schedule == "constant":
        return 1.0
    return max(0.0, (settings.max_steps - step) / (settings.max_steps - warmup_steps))


def response_loss(model: PreTrainedModel, batch: Batch) -> Tensor:
    """Mean cross-entropy in nats per trained token; end marks are trained, padding is not."""
    logits_BRV = response_logits(model, batch)
    return F.cross_entropy(logits_BRV.flatten(0, 1), batch.targets_BR.flatten(), ignore_index=PAD_ID)


def response_logits(model: PreTrainedModel, batch: Batch) -> Tensor:
    """Logits [B, R, V] of the response's tokens, each from those before it."""
    # Responses are padded on the right, where causal attention needs no mask.
    input_ids = torch.cat([batch.prompt_BP, batch.response_BR[:, :-1]], dim=1)
    hidden_BRD = model.model(input_ids, use_cache=False).last_hidden_state[:, batch.prompt_BP.shape[1] - 1 :]
    return model.lm_head(hidden_BRD)


@torch.no_grad()
def response_probabilities(model: PreTrainedModel, batch: Batch) -> Tensor:
    """[B]: the probability that sampling at temperature 1 gives exactly the trained tokens of each response."""
    logp_BRV = response_logits(model, batch).log_softmax(-1)
    logp_BR = logp_BRV.gather(-1, batch.response_BR[..., None])[..., 0]
    return (logp_BR * (batch.targets_BR != PAD_ID)).sum(1).exp()


@torch.no_grad()
def sharpen(model: PreTrainedModel, factor: float | None) -> None:
    """Multiplies all logits, through the norm before the head, which has no bias."""
    if factor is not None:
        model.get_decoder().get_parameter("norm.weight").mul_(factor)
