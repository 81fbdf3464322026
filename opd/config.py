"""The recipe: frozen dataclasses beside their owners, read from YAML and dotted overrides in one function.

Nothing here imports torch, so that listing and validating recipes stays quick.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from opd.alignment.config import AlignmentConfig
from opd.errors import UserError
from opd.eval.config import EvalConfig
from opd.objective.config import ObjectiveConfig, OptimizerConfig
from opd.recipes import Anew, find_recipe, is_sweep, overlay, read_recipe
from opd.registry import CONTROLLERS, MASKS, PROMPT_SOURCES, TERM_MAKERS
from opd.reward.config import RewardConfig
from opd.spelling import nearest
from opd.students.config import SamplerConfig, SamplingConfig, StudentConfig
from opd.teachers.config import START, FrozenConfig, TeacherConfig, frozen_models
from opd.validation import check

PLAIN = {  # what OmegaConf says, and what it means to a user
    r"Value '\$VALUE' of type '\$VALUE_TYPE'": "a value",
    r".*\bis not a .*\blist, or tuple\b.*": "expected a list",
    r"Incompatible value 'None' .*|field '.*' is not Optional": "give a value in place of null",
    r"Cannot convert '(\w+)' to string: .*": r"expected text, found a \1; quote it if it is text",
    r"TupleConfig length (\d+) does not match type hint length (\d+)": r"expected \2 values, found \1",
    r"Interpolation key '(.*)' not found": r"nothing in the recipe is called ${\1}; of text write \\${ for ${",
    "DictConfig": "mapping",
    "ListConfig": "list",
}


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
    """Teachers by name, which is the domain of their prompts; a single one called `default` takes all. None, where no term
    asks one."""
    prompts: dict[str, Any] = field(default_factory=dict)
    """The prompt source: `type`, and what that source takes."""
    alignment: AlignmentConfig = field(default_factory=AlignmentConfig)
    rollout: dict[str, Any] = field(default_factory=dict)
    """Rollout controllers by name; a rollout stops when one of them says so."""
    lookahead: int = 0
    """1 lets the next step's rollouts start before this step's update, so that sampling and scoring elsewhere overlap with
    it; they are then one update behind."""
    terms: dict[str, Any] = field(default_factory=dict)
    """Term makers by name; their terms are added up."""
    masks: dict[str, Any] = field(default_factory=dict)
    """Masks by name: tokens that teach less, or not at all, in every term."""
    reward: RewardConfig | None = None
    """What rollouts are worth, for terms that compare the rollouts of a prompt."""
    batch: BatchConfig = field(default_factory=BatchConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    trackers: TrackersConfig = field(default_factory=TrackersConfig)

    @property
    def frozen(self) -> dict[str, FrozenConfig]:
        """Every frozen model of the run by name: the teachers, weak references where a term compares with them, and the
        student's start where a term asks it."""
        makers = {name: TERM_MAKERS.load(name, "terms") for name in self.terms}
        models = frozen_models(self.teachers, weak=any(maker.needs_weak_reference for maker in makers.values()))
        if any(maker.needs_start(self.terms[name]) for name, maker in makers.items()):
            student, precision = self.student, self.objective.precision
            models[START] = FrozenConfig(student.model, student.revision, dtype=precision, attention=student.attention)
        return models

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
    if "dataset" in raw and not raw.keys() & {"teachers", "prompts"}:
        raise UserError(
            f"recipe: {recipe} is a recipe of opd sft: run opd sft {recipe} --out DIR (--dry-run checks and prints it)"
        )
    if is_sweep(raw):
        raise UserError(f"recipe: {recipe} is a sweep: run opd sweep {recipe} (opd validate, or --dry-run, checks its runs)")
    return build_config(overlay(raw, parse_overrides(overrides)))


def parse_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """Dotted `key.sub=value` words as a mapping; of a section that is null first and then set, only the latter stays.

    Raises `UserError`.
    """
    for override in overrides:
        _check_override(override)
    try:
        above = OmegaConf.to_container(OmegaConf.from_dotlist(list(overrides)))
    except (OmegaConfBaseException, YAMLError) as error:
        raise UserError(f"overrides: {' '.join(str(error).split())}") from None
    assert isinstance(above, dict)
    for key in (override.removesuffix("=null") for override in overrides if override.endswith("=null")):
        *sections, last = key.split(".")
        section: Any = reduce(lambda outer, name: outer.get(name) if isinstance(outer, dict) else None, sections, above)
        if isinstance(section, dict) and isinstance(section.get(last), dict):
            section[last] = Anew(section[last])
    return {str(name): value for name, value in above.items()}


def _check_override(override: str) -> None:
    key, equals, value = override.partition("=")
    if not equals or not key:
        raise UserError(f"override {override!r}: write it as key.sub=value")
    if not value.strip():
        raise UserError(f"{key} has no value: write {key}=VALUE, or {key}=null for none")
    try:
        OmegaConf.from_dotlist([override])
    except YAMLError:
        raise UserError(f"{key}: {value} is not YAML; put text in quotes of its own, as in '{key}=\"TEXT\"'") from None
    except OmegaConfBaseException:
        raise UserError(f"{key}: {value} holds a broken reference; of text write \\${{ for ${{") from None


def build_config(raw: Mapping[str, Any]) -> RunConfig:
    """A checked `RunConfig` from a plain mapping. Raises `UserError` as `load_config` does."""
    config = parse_section(RunConfig, raw, "")
    prompts = {key: value for key, value in config.prompts.items() if key != "type"}
    source = PROMPT_SOURCES.load(str(config.prompts.get("type", "dataset")), "prompts.type")
    config = dataclasses.replace(
        config,
        prompts={
            "type": str(config.prompts.get("type", "dataset")),
            "config": parse_section(source.Config, prompts, "prompts"),
        },
        rollout=_plugins(CONTROLLERS, config.rollout, "rollout"),
        terms=_plugins(TERM_MAKERS, config.terms, "terms"),
        masks=_plugins(MASKS, config.masks, "masks"),
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


def _plugins(registry: Any, sections: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Each named section as the Config of its plug-in; a section set to null is left out."""
    chosen = {name: section for name, section in sections.items() if section is not None}
    return {
        name: parse_section(registry.load(name, key).Config, section, f"{key}.{name}") for name, section in chosen.items()
    }


def parse_section(kind: type, raw: Any, key: str) -> Any:
    """`raw` as a `kind`; a section that is null, or an entry of a mapping by names such as `teachers`, is as if it were not
    there. Every error names the dotted key below `key`."""
    if isinstance(raw, Mapping):
        sections = {one.name for one in dataclasses.fields(kind) if one.default_factory is not dataclasses.MISSING}
        raw = {name: value for name, value in raw.items() if value is not None or name not in sections}
        raw |= {name: _without_nulls(raw[name]) for name in _named_entries(kind) if isinstance(raw.get(name), Mapping)}
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
        for pattern, plain in PLAIN.items():
            reason = re.sub(pattern, plain, reason)
        raise UserError(f"{dot}{error.full_key or _guilty(kind, raw)}: {reason}") from None


def _named_entries(kind: type) -> list[str]:
    """The fields of `kind` that map names to values of one type; what takes anything takes null, too."""
    hints = get_type_hints(kind)
    return [name for name, hint in hints.items() if get_origin(hint) is dict and get_args(hint)[1] is not Any]


def _without_nulls(entries: Mapping[Any, Any]) -> dict[Any, Any]:
    return {name: value for name, value in entries.items() if value is not None}


def _guilty(kind: type, raw: Mapping[str, Any]) -> str:
    """Which of the values is refused, for errors that do not say it."""
    for name, value in raw.items():
        try:
            OmegaConf.merge(OmegaConf.structured(kind), OmegaConf.create({name: value}))
        except OmegaConfBaseException:
            part = get_type_hints(kind)[name]
            deeper = dataclasses.is_dataclass(part) and isinstance(value, Mapping)
            return f"{name}.{_guilty(part, value)}" if deeper else str(name)  # type: ignore[arg-type]
    return ""


def _refuse_unknown(kind: type, raw: Any, key: str) -> None:
    if not isinstance(raw, Mapping):
        raise UserError(f"{key or 'the recipe'}: expected a mapping of names to values, found {raw!r}")
    hints = get_type_hints(kind)
    for name, value in raw.items():
        path = f"{key}.{name}" if key else str(name)
        if name not in hints:
            raise UserError(f"unknown key {path!r}{nearest(str(name), hints)}")
        parts = [part for part in (hints[name], *get_args(hints[name])) if dataclasses.is_dataclass(part)]
        if get_origin(hints[name]) is dict:
            if not isinstance(value, Mapping):
                raise UserError(f"{path}: expected a mapping of names to values, found {value!r}")
            for entry, section in value.items() if parts else ():
                _refuse_unknown(parts[0], section, f"{path}.{entry}")  # type: ignore[arg-type]
        elif parts and value is not None:
            _refuse_unknown(parts[0], value, path)  # type: ignore[arg-type]
