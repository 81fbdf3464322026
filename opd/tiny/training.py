"""Supervised training of a tiny model on worked solutions, and the greedy accuracy that measures it.

Shapes: B examples, P prompt tokens, R response tokens. All prompts have the same length, so prompts need no padding.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import Progress
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerFast

from opd.tiny.arithmetic import Problem, extract_answer, splits, supervised_problems
from opd.tiny.members import Supervised
from opd.tiny.tokenizer import END, END_ID, PAD_ID

MAX_RESPONSE_TOKENS = 40
"""The longest worked solution with its end mark has 35."""


@dataclass(frozen=True)
class Outcome:
    num_steps: int
    validation_accuracy: float
    """Share of the validation problems answered rightly by greedy decoding."""


def train(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, settings: Supervised, name: str, console: Console
) -> Outcome:
    """Train `model` in place. `name` seeds the order of the examples and labels the progress bar."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, weight_decay=0.0, fused=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_factor(step, settings))
    batches = encoded_batches(tokenizer, settings.batch_size, seed=name)
    validation = splits()["validation"]
    with Progress(console=console) as progress:
        bar = progress.add_task(f"tiny:{name}", total=settings.max_steps)
        for num_steps in range(1, settings.max_steps + 1):
            loss = response_loss(model, *next(batches))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            progress.advance(bar)
            if settings.stop_early and num_steps % settings.check_every_steps == 0:
                accuracy = greedy_accuracy(model, tokenizer, validation)
                if accuracy >= settings.min_accuracy:
                    return Outcome(num_steps, accuracy)
    accuracy = greedy_accuracy(model, tokenizer, validation)
    if accuracy < settings.min_accuracy:
        raise RuntimeError(
            f"tiny:{name} reached a greedy accuracy of {accuracy:.3f} in {settings.max_steps} steps and must reach "
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


def response_loss(model: PreTrainedModel, prompt_BP: Tensor, response_BR: Tensor) -> Tensor:
    """Mean cross-entropy in nats per response token, the end mark included and padding left out."""
    # Responses are padded on the right, where causal attention needs no mask.
    input_ids = torch.cat([prompt_BP, response_BR[:, :-1]], dim=1)
    hidden_BRD = model.model(input_ids, use_cache=False).last_hidden_state[:, prompt_BP.shape[1] - 1 :]
    logits_BRV = model.lm_head(hidden_BRD)
    return F.cross_entropy(logits_BRV.flatten(0, 1), response_BR.flatten(), ignore_index=PAD_ID)


def encoded_batches(tokenizer: PreTrainedTokenizerFast, size: int, seed: str) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless batches of prompt ids [B, P] and response ids [B, R] with the end mark, padded on the right."""
    problems = supervised_problems(seed)
    while True:
        batch = list(islice(problems, size))
        solutions = [problem.solution + END for problem in batch]
        responses = tokenizer(solutions, padding=True, padding_side="right", return_tensors="pt")
        yield encode_prompts(tokenizer, batch), responses.input_ids


def encode_prompts(tokenizer: PreTrainedTokenizerFast, problems: list[Problem]) -> Tensor:
    """Token ids [B, P] of the problems in the chat template."""
    chats = [[{"role": "user", "content": problem.text}] for problem in problems]
    return tokenizer.apply_chat_template(chats, add_generation_prompt=True, return_tensors="pt").input_ids  # type: ignore


def greedy_accuracy(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, problems: list[Problem]) -> float:
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
