"""From a recipe's teachers to the pool: those behind a server are reached first, those in process loaded once a base."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from opd.clock import Clock
from opd.models import model_limits, read_text_config
from opd.teachers.client.served import ServedTeacher
from opd.teachers.config import START, FrozenConfig, field_of
from opd.teachers.experts import check_configured
from opd.teachers.hf import HFModel, HFTeacher, View
from opd.teachers.pool import Teacher
from opd.tokenization import eos_ids, load_tokenizer


@dataclass(frozen=True)
class TeacherFacts:
    """What must be known of a teacher before its first score, wherever it is."""

    field: str  # the recipe's field that errors name
    tokenizer: PreTrainedTokenizerBase
    eos_ids: tuple[int, ...]
    max_context: int
    num_rows: int  # of its output head
    weights: str = ""  # equal for models with the same weights at work


def connect(teachers: Mapping[str, FrozenConfig]) -> dict[str, ServedTeacher]:
    """The teachers that have a `url`. Raises `UserError` for one that does not answer or is not what it should be."""
    return {name: ServedTeacher.connect(name, config) for name, config in teachers.items() if config.urls}


def facts_of(name: str, config: FrozenConfig, served: Mapping[str, ServedTeacher]) -> TeacherFacts:
    """Reads tokenizer and configuration, from the server where there is one. Raises `UserError`."""
    if name in served:
        info = served[name].info
        ends = tuple(sorted(info["eos_ids"]))
        digest, field = served[name].digest or "", f"teachers.{name}.url"
        return TeacherFacts(field, served[name].tokenizer(), ends, info["max_context"], info["rows"], digest)
    assert config.model is not None
    field = field_of(name)
    tokenizer = load_tokenizer(config.model, field, config.revision)
    ends = eos_ids(config.model, field, tokenizer, config.revision)
    if config.active_experts is not None:
        known = read_text_config(config.model, field, config.revision)
        check_configured(known, config.active_experts, f"teachers.{name}.active_experts")
    weights = json.dumps([config.model, config.revision, config.adapter, config.quantization, config.active_experts])
    return TeacherFacts(field, tokenizer, ends, *model_limits(config.model, field, config.revision), weights)


def open_teachers(
    teachers: Mapping[str, FrozenConfig],
    served: Mapping[str, ServedTeacher],
    vocabs: Mapping[str, int],
    device: torch.device,
    chunk_bytes: int,
    busy: Callable[[], bool],
    clock: Clock,
    adapted: nn.Module | None = None,
) -> dict[str, Teacher]:
    """All frozen models by name, each asked about the first `vocabs` of its ids. `adapted` is a student with adapters,
    beneath which its frozen start is. Raises `UserError` for a model that cannot be loaded."""
    opened: dict[str, Teacher] = dict(served)
    for name, other in served.items():
        other.ask_about(vocabs[name])
    local = {name: config for name, config in teachers.items() if name not in served}
    bases: dict[str, dict[str, FrozenConfig]] = {}
    for name, config in local.items():
        alone = name == START and adapted is not None
        bases.setdefault(START if alone else base_key(config), {})[name] = config
    for group in bases.values():
        first, config = next(iter(group.items()))
        assert config.model is not None
        model = HFModel(
            field_of(first),
            config.model,
            revision=config.revision,
            dtype=config.dtype,
            attention=config.attention,
            quantization=config.quantization,
            adapters={name: one.adapter for name, one in group.items() if one.adapter is not None},
            adapted=adapted if first == START else None,
            device=device,
            chunk_bytes=chunk_bytes,
            max_batch_tokens=min(one.max_batch_tokens for one in group.values()),
            busy=busy,
            clock=clock,
        )
        for name, one in group.items():
            adapter = name if one.adapter is not None else None
            view = View(vocabs[name], one.logp_floor, adapter=adapter, active_experts=one.active_experts)
            opened[name] = HFTeacher(name, model, view)
    return {name: opened[name] for name in teachers}


def base_key(config: FrozenConfig) -> str:
    """Equal for teachers that can share one loaded model."""
    return json.dumps([config.model, config.revision, config.dtype, config.attention, config.quantization], sort_keys=True)
