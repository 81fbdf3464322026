"""Opening an environment: from its name and options to the object that plays an episode.

What an environment of the user's own does wrong is one `UserError` that names it.
"""

import json
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from opd.envs.environment import Environment
from opd.episodes import EnvironmentTask
from opd.errors import UserError
from opd.registry import ENVIRONMENTS

if TYPE_CHECKING:
    from opd.config import RunConfig

MEMBERS = ("single_turn", "restores", "tasks", "reset", "step", "outcome", "state_hash")  # of the class


def open_environment(task: EnvironmentTask, key: str = "prompts") -> Environment:
    """The environment of `task`, not yet reset. `key` is the recipe's section or the command line's option, for messages.

    Raises `UserError` for an unknown environment, for options that it does not have or cannot work with, and for one that is
    not what `opd.envs.environment` says.
    """
    field = name_field(key)
    kind, whose = environment_class(task.environment, field), f"{field}: environment {task.environment!r}"
    with blamed(whose, key):
        environment = kind(_config(kind.Config, json.dumps(task.options, sort_keys=True, default=str)))
    tools, most = getattr(environment, "tools", None), getattr(environment, "max_turns", None)
    if not isinstance(tools, list | tuple) or not all(isinstance(tool, Mapping) for tool in tools):
        raise UserError(f"{whose}: its tools are {tools!r:.80}; they must be a list of JSON schemas, or () for none")
    if type(most) is not int or most < 1:
        raise UserError(f"{whose}: its max_turns is {most!r}; it must be a whole number, at least 1")
    return environment


def environment_class(name: str, field: str = "prompts.name") -> type[Environment]:
    """Raises `UserError` naming `field` for an unknown environment, and for one that lacks a member."""
    kind = ENVIRONMENTS.load(name, field)
    lacking = [member for member in MEMBERS if not hasattr(kind, member)]
    if lacking:
        raise UserError(f"{field}: environment {name!r} has no {', '.join(lacking)}; see docs/stride.md for what it needs")
    return kind


def name_field(key: str) -> str:
    """What names the environment: a field of the section `key`, or the option of the command line itself."""
    return key if key.startswith("--") else f"{key}.name"


@contextmanager
def blamed(whose: str, key: str = "prompts") -> Iterator[None]:
    """Turns what an environment raises, `SystemExit` too, into a `UserError` that begins with `whose` and names the line.

    A `UserError` of its own speaks of `prompts.options`, and is raised with the section `key` in its place.
    """
    try:
        yield
    except UserError as error:
        if key.startswith("--"):  # options have no section there
            raise UserError(f"{key}: {str(error).replace('prompts.options.', '')}") from error
        raise UserError(str(error).replace("prompts.options", f"{key}.options")) from error
    except (Exception, SystemExit) as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        what = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise UserError(f"{whose} failed: {what} ({frame.filename}, line {frame.lineno})") from error


def plain_messages(said: Any, whose: str) -> list[dict[str, Any]]:
    """An environment's messages as they come back from a checkpoint. Raises `UserError` for what are none."""
    if not isinstance(said, list | tuple) or not all(isinstance(message, Mapping) for message in said):
        raise UserError(f"{whose}: its messages must be a list of mappings with role and content, not {said!r:.80}")
    try:
        text = json.dumps([dict(message) for message in said], ensure_ascii=False, allow_nan=False)
        text.encode()  # half a surrogate pair is no text
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(f"{whose}: its messages are no plain JSON: {error}") from None
    plain = json.loads(text)
    for message in plain:
        if not all(isinstance(message.get(name), str) for name in ("role", "content")):
            raise UserError(f"{whose}: a message needs a role and a content, both text; found {message!r:.80}")
    return plain


def plays_turns(run: "RunConfig") -> bool:
    """Whether a recipe's prompts open episodes of several turns."""
    prompts = run.prompts
    return prompts["type"] == "environment" and not environment_class(prompts["config"].name).single_turn


@lru_cache(maxsize=64)
def _config(kind: type, options: str) -> Any:
    """Read once, since each rollout opens an environment of its own."""
    from opd.config import parse_section  # the recipe's dataclasses hold an environment's, so that it imports this first

    return parse_section(kind, json.loads(options), "prompts.options")
