"""The recipe of `opd sft`. Imports no torch."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from omegaconf import OmegaConf

from opd.config import CheckpointConfig, parse_overrides, parse_section
from opd.data import Columns, DatasetConfig, check_path
from opd.errors import UserError
from opd.locate import check_location
from opd.objective.config import OptimizerConfig
from opd.recipes import find_recipe, overlay, read_recipe
from opd.sft.deletion import DeletionConfig
from opd.students.config import StudentConfig
from opd.validation import check_optimizer


@dataclass(frozen=True)
class AnswerColumns(Columns):
    """Which columns hold what: prompt and completion, or whole conversations."""

    completion: str = "completion"
    """The answer to learn: text, or a list of one assistant message."""
    messages: str = "messages"
    """Where there is no completion: a conversation, whose last message is the answer to learn."""


@dataclass(frozen=True)
class AnswersConfig(DatasetConfig):
    """Prompts with answers, as `opd prompts answer` writes them: TRL's prompt-completion and messages formats."""

    columns: AnswerColumns = field(default_factory=AnswerColumns)
    delete_steps: DeletionConfig | None = None
    """Steps of the answers' reasoning that are deleted before anything is learnt; null keeps all."""


@dataclass(frozen=True)
class SftConfig:
    """A recipe of supervised fine-tuning."""

    student: StudentConfig = field(default_factory=StudentConfig)
    dataset: AnswersConfig = field(default_factory=AnswersConfig)
    epochs: float = 1.0
    """Passes over the data."""
    steps: int | None = None
    """Updates, instead of epochs."""
    batch: int = 32
    """Examples of one update."""
    max_tokens: int = 4096
    """Longest example, prompt and answer; longer ones are left out and counted, never cut."""
    packing: bool = True
    """Examples share forward passes, without padding and without seeing each other; off, each has a pass of its own."""
    micro_batch_tokens: int = 16384
    """With packing: tokens of one forward pass, or one longer example. Results do not depend on it."""
    max_logits_mib: int = 256
    """Size of one chunk of logits, in MiB."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Forward and backward in this type; `bfloat16` is autocast around the master weights of student.dtype."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    seed: int = 0
    """Fixes the order of the examples and dropout."""
    report_to: tuple[Literal["tensorboard", "wandb"], ...] = ()
    """Trackers beside `metrics.jsonl`, as transformers' `report_to`."""

    def num_steps(self, num_examples: int) -> int:
        """Updates of the whole run."""
        return self.steps or math.ceil(self.epochs * math.ceil(num_examples / self.batch))


def load_sft_config(recipe: str | Path, overrides: Sequence[str] = ()) -> SftConfig:
    """The recipe `recipe` (a shipped name or a path) with dotted overrides, checked. Raises `UserError` naming the key."""
    raw = read_recipe(find_recipe(recipe))
    if raw.keys() & {"teachers", "prompts"}:
        raise UserError(f"recipe: {recipe} is a recipe of opd train; those of opd sft are listed by opd ls sft")
    return build_sft_config(overlay(raw, parse_overrides(overrides)))


def build_sft_config(raw: Mapping[str, Any]) -> SftConfig:
    """A checked `SftConfig` from a plain mapping. Raises `UserError`."""
    config = parse_section(SftConfig, raw, "")
    atleast_one = ("batch", "max_tokens", "micro_batch_tokens", "max_logits_mib", "checkpoint.keep", "steps")
    for key in atleast_one:
        section, _, name = key.rpartition(".")
        value = getattr(getattr(config, section) if section else config, name)
        if value is not None and value < 1:
            raise UserError(f"{key} is {value}: it must be at least 1")
    if not 0 < config.epochs < math.inf:
        raise UserError(f"epochs is {config.epochs}: it must be above 0")
    if config.checkpoint.every < 0:
        raise UserError(f"checkpoint.every is {config.checkpoint.every}: it must be 0 or more")
    if not 0 <= config.seed < 2**32:
        raise UserError(f"seed is {config.seed}: it must be at least 0 and below 2**32")
    if (lora := config.student.lora) is not None and lora.r < 1:
        raise UserError(f"student.lora.r is {lora.r}: it must be at least 1")
    if lora is not None and not 0 <= lora.dropout < 1:
        raise UserError(f"student.lora.dropout is {lora.dropout}: it must be at least 0 and below 1")
    if config.dataset.delete_steps is not None:
        config.dataset.delete_steps.check("dataset.delete_steps")
    check_optimizer(config.optimizer)
    if config.optimizer.lr == 0:
        raise UserError("optimizer.lr is 0: it must be above 0")
    return config


def check_files(config: SftConfig) -> None:
    """That the student, the data and the trackers are there. Raises `UserError`."""
    check_location(config.student.model, "student.model")
    check_path(config.dataset.path, "dataset")
    for tracker in config.report_to:
        try:
            version(tracker)
        except PackageNotFoundError:
            raise UserError(
                f"report_to: {tracker} is not installed; install it with: pip install 'opd[{tracker}]'"
            ) from None


def to_mapping(config: SftConfig) -> dict[str, Any]:
    """The plain mapping that `build_sft_config` turns into `config` again."""
    return dataclasses.asdict(config)


def to_yaml(config: SftConfig) -> str:
    """`config` as YAML with every value filled in."""
    return OmegaConf.to_yaml(OmegaConf.create(to_mapping(config)))
