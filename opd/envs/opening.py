"""Opening an environment: from its name and options to the object that plays an episode."""

import json
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from opd.envs.environment import Environment
from opd.episodes import EnvironmentTask
from opd.registry import ENVIRONMENTS

if TYPE_CHECKING:
    from opd.config import RunConfig


def open_environment(task: EnvironmentTask, key: str = "prompts") -> Environment:
    """The environment of `task`, not yet reset. `key` is the recipe's section, for messages.

    Raises `UserError` for an unknown environment, and for options that it does not have or cannot work with.
    """
    kind = ENVIRONMENTS.load(task.environment, f"{key}.name")
    return kind(_config(kind.Config, json.dumps(task.options, sort_keys=True, default=str), f"{key}.options"))


def plays_turns(run: "RunConfig") -> bool:
    """Whether a recipe's prompts open episodes of several turns."""
    prompts = run.prompts
    if prompts["type"] != "environment":
        return False
    return not ENVIRONMENTS.load(prompts["config"].name, "prompts.name").single_turn


@lru_cache(maxsize=64)
def _config(kind: type, options: str, field: str) -> Any:
    """Read once, since each rollout opens an environment of its own."""
    from opd.config import parse_section  # the recipe's dataclasses hold an environment's, so that it imports this first

    return parse_section(kind, json.loads(options), field)
