"""Plug-ins by name. One strategy is one file, one `Config` dataclass, one class, and one line here.

A class is imported when a recipe names it, so that listing recipes stays cheap. Third parties register through the entry
point groups `opd.prompt_sources`, `opd.environments`, `opd.rollout_controllers`,
`opd.term_makers` and `opd.masks`, with the same meaning as a line here.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, is_dataclass
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from opd.errors import UserError
from opd.spelling import nearest


@dataclass(frozen=True)
class Registry:
    """Names of one kind of plug-in. `what` is how error messages call it, `group` its entry point group, `base` the class of
    `opd.plugins` that it derives from, where there is one."""

    what: str
    group: str
    builtin: dict[str, str]
    base: str | None = None

    def names(self) -> list[str]:
        return sorted({*self.builtin, *(e.name for e in entry_points(group=self.group))})

    def load(self, name: str, field: str) -> Any:
        """The plug-in class called `name`. Raises `UserError` naming `field` when there is none, or it cannot be used."""
        if name in self.builtin:
            module, _, attribute = self.builtin[name].partition(":")
            return getattr(import_module(module), attribute)
        for entry in entry_points(group=self.group, name=name):
            try:
                kind = entry.load()
            except (Exception, SystemExit) as error:
                what = " ".join(f"{type(error).__name__}: {error}".split())
                raise UserError(f"{field}: {self.what} {name!r} ({entry.value}) cannot be imported: {what}") from error
            if not isinstance(kind, type) or not is_dataclass(getattr(kind, "Config", None)):
                raise UserError(f"{field}: {self.what} {name!r} ({entry.value}) must be a class with a dataclass `Config`")
            if self.base is not None and not issubclass(kind, getattr(import_module("opd.plugins"), self.base)):
                raise UserError(f"{field}: {self.what} {name!r} ({entry.value}) must derive from opd.plugins.{self.base}")
            return kind
        raise UserError(f"{field}: no {self.what} is called {name!r}{nearest(name, self.names())}")

    def each(self) -> Iterator[tuple[str, Any]]:
        """(name, class) of all, but for those of third parties that cannot be used: stderr gets a note about them."""
        for name in self.names():
            try:
                yield name, self.load(name, self.group)
            except UserError as error:
                print(f"note: {error}; it is left out", file=sys.stderr)


PROMPT_SOURCES = Registry(
    "prompt source",
    "opd.prompt_sources",
    {
        "authored": "opd.strategies.authored:AuthoredPrompts",
        "dataset": "opd.strategies.dataset:DatasetPrompts",
        "environment": "opd.strategies.environment:EnvironmentPrompts",
    },
    "PromptSource",
)
ENVIRONMENTS = Registry(
    "environment",
    "opd.environments",
    {
        "calculator": "opd.envs.calculator:Calculator",
        "reasoning_gym": "opd.envs.reasoning_gym:ReasoningGym",
        "returns_desk": "opd.envs.returns_desk.desk:ReturnsDesk",
    },
)
CONTROLLERS = Registry(
    "rollout controller",
    "opd.rollout_controllers",
    {
        "curriculum": "opd.strategies.curriculum:Curriculum",
        "early_stop": "opd.strategies.early_stop:EarlyStop",
        "horizon": "opd.strategies.horizon:Horizon",
        "prefix": "opd.strategies.prefix:Prefix",
        "stride": "opd.strategies.stride:Stride",
    },
    "RolloutController",
)
TERM_MAKERS = Registry(
    "term maker",
    "opd.term_makers",
    {
        "compass": "opd.strategies.compass:Compass",
        "group_reward": "opd.strategies.group_reward:GroupReward",
        "negative": "opd.strategies.negative:Negative",
        "overlap": "opd.strategies.overlap:Overlap",
        "reverse_kl": "opd.strategies.reverse_kl:ReverseKL",
        "self_distillation": "opd.strategies.self_distillation:SelfDistillation",
        "shared_topk": "opd.strategies.shared_topk:SharedTopK",
    },
    "TermMaker",
)
MASKS = Registry("mask", "opd.masks", {"endpoint": "opd.strategies.endpoint:Endpoint"}, "Mask")
