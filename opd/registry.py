"""Plug-ins by name. One strategy is one file, one `Config` dataclass, one class, and one line here.

A class is imported when a recipe names it, so that listing recipes stays cheap. Third parties register through the entry
point groups `opd.prompt_sources`, `opd.environments`, `opd.rollout_controllers` and
`opd.term_makers`, with the same meaning as a line here.
"""

from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from opd.errors import UserError
from opd.spelling import nearest


@dataclass(frozen=True)
class Registry:
    """Names of one kind of plug-in. `what` is how error messages call it, `group` its entry point group."""

    what: str
    group: str
    builtin: dict[str, str]

    def names(self) -> list[str]:
        return sorted({*self.builtin, *(e.name for e in entry_points(group=self.group))})

    def load(self, name: str, field: str) -> Any:
        """The plug-in class called `name`. Raises `UserError` naming `field` when there is none."""
        if name in self.builtin:
            module, _, attribute = self.builtin[name].partition(":")
            return getattr(import_module(module), attribute)
        for entry in entry_points(group=self.group, name=name):
            return entry.load()
        raise UserError(f"{field}: no {self.what} is called {name!r}{nearest(name, self.names())}")


PROMPT_SOURCES = Registry(
    "prompt source",
    "opd.prompt_sources",
    {
        "dataset": "opd.strategies.dataset:DatasetPrompts",
        "environment": "opd.strategies.environment:EnvironmentPrompts",
    },
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
)
TERM_MAKERS = Registry(
    "term maker",
    "opd.term_makers",
    {
        "compass": "opd.strategies.compass:Compass",
        "reverse_kl": "opd.strategies.reverse_kl:ReverseKL",
        "shared_topk": "opd.strategies.shared_topk:SharedTopK",
    },
)
