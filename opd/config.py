"""The recipe: frozen dataclasses beside their owners, read from YAML and dotted overrides in one function.

Nothing here imports torch, so that listing and validating recipes stays quick.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from opd.data import DatasetConfig, check_path
from opd.errors import UserError
from opd.eval.config import EvalConfig
from opd.locate import check_location
from opd.objective.config import ObjectiveConfig, OptimizerConfig
from opd.recipes import find_recipe, read_recipe
from opd.registry import PROMPT_SOURCES, TERM_MAKERS
from opd.spelling import nearest
from opd.students.config import SamplerConfig, SamplingConfig, StudentConfig
from opd.teachers.config import TeacherConfig


@dataclass(frozen=True)
class BatchConfig:
    """What one step consists of."""

    prompts: int = 64
    """Prompts a step."""
    rollouts_per_prompt: int = 1
    """Rollouts of each prompt; each has a sampling seed of its own."""


@dataclass(frozen=True)
class CheckpointConfig:
    """When a checkpoint is written. The last step always writes one."""

    every: int = 50
    """Steps between checkpoints; 0 keeps only the last step's."""
    keep: int = 2
    """Older checkpoints are deleted beyond this number."""


@dataclass(frozen=True)
class TrackersConfig:
    """Where metrics go beside `metrics.jsonl`."""

    tensorboard: bool = False
    """Write TensorBoard event files (extra `tensorboard`)."""
    wandb: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of `wandb.init`, such as `project`; empty leaves it off (extra `wandb`)."""
    rollouts_every: int = 10
    """Steps between samples of rollouts on disk and in the trackers; 0 writes none."""
    num_rollouts: int = 4
    """Rollouts in a sample."""


@dataclass(frozen=True)
class RunConfig:
    """A whole recipe."""

    steps: int = 100
    """Steps: sample, score, update."""
    seed: int = 0
    """Fixes prompts, sampling noise and dropout."""
    student: StudentConfig = field(default_factory=StudentConfig)
    sampler: SamplerConfig = field(default_factory=SamplerConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    teachers: dict[str, TeacherConfig] = field(default_factory=dict)
    """Teachers by name. A prompt's domain routes it; a single one serves all."""
    prompts: dict[str, Any] = field(default_factory=dict)
    """The prompt source: `type`, and what that source takes."""
    terms: dict[str, Any] = field(default_factory=dict)
    """Term makers by name; their terms are added up."""
    batch: BatchConfig = field(default_factory=BatchConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    trackers: TrackersConfig = field(default_factory=TrackersConfig)

    @property
    def loss_temperature(self) -> float:
        """The temperature of student's and teacher's log-probs in the loss."""
        return self.sampling.temperature if self.objective.temperature is None else self.objective.temperature


def load_config(recipe: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The recipe called `recipe` (a shipped name or a path) with dotted `key.sub=value` overrides, checked.

    Raises `UserError` naming the key for an unknown key (with the nearest name), a value of the wrong type, a missing
    value, or a combination that cannot work.
    """
    raw = read_recipe(find_recipe(recipe))
    for override in overrides:
        key, equals, _ = override.partition("=")
        if not equals or not key:
            raise UserError(f"override {override!r}: write it as key.sub=value")
    return build_config(_merge(raw, OmegaConf.from_dotlist(list(overrides))))


def build_config(raw: Mapping[str, Any]) -> RunConfig:
    """A checked `RunConfig` from a plain mapping. Raises `UserError` as `load_config` does."""
    config = _typed(RunConfig, raw, "")
    prompts = {key: value for key, value in config.prompts.items() if key != "type"}
    source = PROMPT_SOURCES.load(config.prompts.get("type", "dataset"), "prompts.type")
    config = dataclasses.replace(
        config,
        prompts={"type": config.prompts.get("type", "dataset"), "config": _typed(source.Config, prompts, "prompts")},
        terms=_plugins(TERM_MAKERS, config.terms, "terms"),
    )
    check(config)
    return config


def to_mapping(config: RunConfig) -> dict[str, Any]:
    """The plain mapping that `build_config` turns into `config` again."""
    raw = dataclasses.asdict(config)
    raw["prompts"] = {"type": raw["prompts"]["type"], **raw["prompts"]["config"]}
    return raw


def to_yaml(config: RunConfig) -> str:
    """`config` as YAML with every value filled in."""
    return OmegaConf.to_yaml(OmegaConf.create(to_mapping(config)))


def check(config: RunConfig) -> None:
    """Refuses what cannot work, with the reason. Raises `UserError`."""
    for key, value in {
        "steps": config.steps,
        "batch.prompts": config.batch.prompts,
        "batch.rollouts_per_prompt": config.batch.rollouts_per_prompt,
        "sampling.max_new_tokens": config.sampling.max_new_tokens,
        "sampler.max_rows": config.sampler.max_rows,
        "sampler.chunk_tokens": config.sampler.chunk_tokens,
        "objective.updates_per_batch": config.objective.updates_per_batch,
        "objective.micro_batch_tokens": config.objective.micro_batch_tokens,
        "objective.max_logits_mib": config.objective.max_logits_mib,
        "checkpoint.keep": config.checkpoint.keep,
        "eval.samples": config.eval.samples,
    }.items():
        if value < 1:
            raise UserError(f"{key} is {value}: it must be at least 1")
    if not 0.0 < config.sampling.top_p <= 1.0:
        raise UserError(f"sampling.top_p is {config.sampling.top_p}: it must be above 0 and at most 1")
    if config.sampling.temperature < 0.0 or config.sampling.top_k < 0:
        raise UserError("sampling.temperature and sampling.top_k must not be negative")
    if config.loss_temperature <= 0.0:
        raise UserError(
            f"objective.temperature is {config.loss_temperature}: the loss needs one above 0; set it when sampling is greedy"
        )
    if config.objective.updates_per_batch > config.batch.prompts * config.batch.rollouts_per_prompt:
        raise UserError("objective.updates_per_batch is larger than the number of rollouts in a batch")
    if config.eval.samples > 1 and config.eval.temperature == 0.0:
        raise UserError("eval.samples above 1 repeats the same greedy completion: set eval.temperature")
    if not config.teachers:
        raise UserError("teachers: name at least one, as in teachers.default.model=FOLDER")
    if not config.terms:
        raise UserError(f"terms: name at least one of {', '.join(TERM_MAKERS.names())}")
    for name, term in config.terms.items():
        TERM_MAKERS.load(name, "terms").check(term, config)


def check_files(config: RunConfig) -> None:
    """Refuses models and files that do not exist, without loading any. Raises `UserError` naming the field."""
    check_location(config.student.model, "student.model")
    for name, teacher in config.teachers.items():
        check_location(teacher.model, f"teachers.{name}.model")
    for key, source in {"prompts": config.prompts["config"], "eval.prompts": config.eval.prompts}.items():
        if isinstance(source, DatasetConfig):
            check_path(source.path, key)


def _plugins(registry: Any, sections: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Each named section as the Config of its plug-in; a section set to null is left out."""
    chosen = {name: section for name, section in sections.items() if section is not None}
    return {name: _typed(registry.load(name, key).Config, section, f"{key}.{name}") for name, section in chosen.items()}


def _merge(raw: Mapping[str, Any], extra: Any) -> dict[str, Any]:
    merged = OmegaConf.to_container(OmegaConf.merge(OmegaConf.create(dict(raw)), extra))
    assert isinstance(merged, dict)
    return {str(key): value for key, value in merged.items()}


def _typed(kind: type, raw: Any, key: str) -> Any:
    """`raw` as a `kind`, every error naming the dotted key below `key`."""
    _refuse_unknown(kind, raw, key)
    dot = f"{key}." if key else ""
    try:
        merged = OmegaConf.merge(OmegaConf.structured(kind), OmegaConf.create(raw))
        missing = sorted(OmegaConf.missing_keys(merged))
        if missing:
            raise UserError(f"{dot}{missing[0]} is missing: set it in the recipe or as {dot}{missing[0]}=VALUE")
        return OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"{dot}{error.full_key or ''}: {reason}".replace(".:", ":")) from None


def _refuse_unknown(kind: type, raw: Any, key: str) -> None:
    if not isinstance(raw, Mapping):
        raise UserError(f"{key or 'the recipe'}: expected a mapping of names to values, found {raw!r}")
    hints = get_type_hints(kind)
    for name, value in raw.items():
        path = f"{key}.{name}" if key else str(name)
        if name not in hints:
            raise UserError(f"unknown key {path!r}{nearest(str(name), hints)}")
        for part in (hints[name], *get_args(hints[name])):
            if dataclasses.is_dataclass(part) and isinstance(value, Mapping):
                if get_origin(hints[name]) is dict:
                    for entry, section in value.items():
                        _refuse_unknown(part, section, f"{path}.{entry}")  # type: ignore[arg-type]
                else:
                    _refuse_unknown(part, value, path)  # type: ignore[arg-type]
