"""The table of the family's members. A new member is a line or two here; the settings are also its cache key."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Literal

VERSION = 1
"""Raise it when the code that builds members changes what they contain; every member is then built anew."""


@dataclass(frozen=True)
class Supervised:
    """Supervised training from random weights on worked solutions: AdamW, loss on the student's own tokens only."""

    max_steps: int
    schedule: Literal["linear", "constant"]
    """Learning rate after the warm-up: falling to zero at `max_steps`, or held."""
    min_accuracy: float
    """Accuracy on the validation problems as the task measures it, from 0 to 1; a model that ends below it is not kept."""
    stop_early: bool = False
    """Stop as soon as `min_accuracy` is reached: this makes a student that is right only some of the time."""
    check_every_steps: int = 5
    learning_rate: float = 2e-3
    warmup: float = 0.05
    """Share of `max_steps` over which the learning rate rises."""
    batch_size: int = 64


@dataclass(frozen=True)
class Mixture:
    """Feed-forward layers of experts: a router picks some of them for each token, and one more is shared by all."""

    num_experts: int = 8
    num_active: int = 4
    expert_size: int = 96
    """Inner dimension of each expert, the shared one too."""


@dataclass(frozen=True)
class Model:
    """A Llama model, or with experts a Qwen2-MoE one; attention heads of 32 dimensions, tied embeddings."""

    num_layers: int
    hidden_size: int
    training: Supervised
    tokenizer: str = "characters"
    """A name that `opd.tiny.tokenizer.build_tokenizer` knows."""
    task: Literal["brief", "calculator", "habit", "long", "addition-author", "subtraction-author", "pair"] | None = None
    """What it learns: None is the addition of `opd.tiny.arithmetic`, `brief` the same with answers that leave the working
    out (`opd.tiny.brief`), `calculator` the episodes of `opd.envs.calculator`, `habit` the addition with the bad habit of
    `opd.tiny.habit`, `long` the addition of `opd.tiny.long_addition`; the others are of `opd.tiny.authoring`: to solve and
    write the problems of one task, or to solve those of both."""
    experts: Mixture | None = None
    rope_theta: float | None = None
    """Base of the rotary position embedding; None is that of the architecture. A small one tells near positions apart."""
    sharpness: float | None = None
    """What logits are multiplied with after training. A model that was stopped early samples stray bytes, since hundreds
    of unlikely tokens add up; a factor above 1 makes its text well formed and leaves its greedy answers alone. A teacher
    whose greedy answers are all right is made so when sampled, too."""


@dataclass(frozen=True)
class Data:
    """A JSONL file of the problems of one split of `opd.tiny.arithmetic` or, where the split's name begins with `long`, of
    `opd.tiny.long_addition`, with `subtraction` of `opd.tiny.subtraction`, and with `pair` of both short tasks; the same for
    every seed."""

    split: Literal[
        "prompts",
        "heldout",
        "heldout-carry",
        "heldout-no-carry",
        "long-prompts",
        "long-heldout",
        "subtraction-prompts",
        "subtraction-heldout",
        "pair-heldout",
    ]
    with_answers: bool
    unsolvable_every: int | None = None
    """Every so many-th problem has an answer that nobody gives, so that all responses to it fail."""

    @property
    def file_name(self) -> str:
        return f"{self.split}.jsonl"


@dataclass(frozen=True)
class Pool:
    """A JSONL file of prompts that a member wrote: the pool of DF-OPD. Its seed is the teacher's."""

    teacher: str
    """The member that writes them; they are about its task, which is their domain."""
    num_prompts: int = 512

    @property
    def domain(self) -> str:
        return self.teacher.removesuffix("-author")

    @property
    def file_name(self) -> str:
        return f"{self.domain}-pool.jsonl"


MEMBERS: dict[str, Model | Data | Pool] = {
    "teacher": Model(3, 128, Supervised(max_steps=600, schedule="linear", min_accuracy=0.95, batch_size=32)),
    "student": Model(
        2,
        96,
        Supervised(max_steps=2000, schedule="constant", min_accuracy=0.25, stop_early=True, learning_rate=5e-4),
    ),
    "weak": Model(
        3,
        128,
        Supervised(
            max_steps=600, schedule="constant", min_accuracy=0.35, stop_early=True, learning_rate=1e-3, batch_size=32
        ),
    ),
    "moe-teacher": Model(
        3,
        128,
        Supervised(max_steps=600, schedule="linear", min_accuracy=0.95, batch_size=32),
        experts=Mixture(),
    ),
    "other-student": Model(
        2,
        96,
        Supervised(max_steps=2000, schedule="constant", min_accuracy=0.25, stop_early=True, learning_rate=5e-4),
        tokenizer="operators",
        sharpness=1.5,
    ),
    "calculator-teacher": Model(
        3,
        128,
        Supervised(max_steps=500, schedule="linear", min_accuracy=0.97, learning_rate=1e-3, batch_size=16),
        tokenizer="calculator",
        task="calculator",
        rope_theta=100.0,
        sharpness=1.5,
    ),
    "calculator-student": Model(
        3,
        64,
        Supervised(
            max_steps=1000,
            schedule="constant",
            min_accuracy=0.01,
            stop_early=True,
            check_every_steps=10,
            learning_rate=1e-3,
            batch_size=16,
        ),
        tokenizer="calculator",
        task="calculator",
        rope_theta=100.0,
    ),
    "hasty-student": Model(
        3,
        128,
        Supervised(max_steps=1000, schedule="linear", min_accuracy=0.9, batch_size=32),
        task="habit",
        sharpness=1.25,
    ),
    "long-teacher": Model(
        3,
        128,
        Supervised(max_steps=1400, schedule="linear", min_accuracy=0.95, batch_size=16),
        task="long",
        rope_theta=100.0,
        sharpness=1.5,
    ),
    "long-student": Model(
        2,
        96,
        Supervised(
            max_steps=2000,
            schedule="constant",
            min_accuracy=0.25,
            stop_early=True,
            check_every_steps=10,
            batch_size=16,
        ),
        task="long",
        rope_theta=100.0,
    ),
    "brief-student": Model(
        2,
        96,
        Supervised(
            max_steps=2000,
            schedule="constant",
            min_accuracy=0.26,
            stop_early=True,
            check_every_steps=10,
            learning_rate=1e-3,
            batch_size=32,
        ),
        task="brief",
    ),
    "addition-author": Model(
        3,
        128,
        Supervised(max_steps=800, schedule="linear", min_accuracy=0.95, batch_size=32),
        task="addition-author",
        sharpness=1.5,
    ),
    "subtraction-author": Model(
        3,
        128,
        Supervised(max_steps=1000, schedule="linear", min_accuracy=0.95, batch_size=32),
        task="subtraction-author",
        sharpness=2.0,
    ),
    "pair-student": Model(
        2,
        96,
        Supervised(
            max_steps=2000,
            schedule="constant",
            min_accuracy=0.25,
            stop_early=True,
            check_every_steps=20,
            learning_rate=5e-4,
        ),
        task="pair",
    ),
    "prompts": Data("prompts", with_answers=False),
    "heldout": Data("heldout", with_answers=True),
    "heldout-carry": Data("heldout-carry", with_answers=True),
    "heldout-no-carry": Data("heldout-no-carry", with_answers=True),
    "long-prompts": Data("long-prompts", with_answers=True),
    "long-heldout": Data("long-heldout", with_answers=True),
    "subtraction-prompts": Data("subtraction-prompts", with_answers=False),
    "subtraction-heldout": Data("subtraction-heldout", with_answers=True),
    "pair-heldout": Data("pair-heldout", with_answers=True),
    "addition-pool": Pool("addition-author"),
    "subtraction-pool": Pool("subtraction-author"),
    "half-solvable-prompts": Data("prompts", with_answers=True, unsolvable_every=2),
}


def digest(name: str, seed: int = 0) -> str:
    """Cache key of a member: 16 hexadecimal digits that change with any of its settings, its seed or `VERSION`."""
    # What a member does not have is left out, so that a new field leaves the keys of the other members alone.
    member = {field: value for field, value in asdict(MEMBERS[name]).items() if value is not None}
    settings = {"version": VERSION, "name": name, "seed": seed, "member": member}
    if isinstance(pool := MEMBERS[name], Pool):
        settings["teacher"] = digest(pool.teacher, seed)
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]
