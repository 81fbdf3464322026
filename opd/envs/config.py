"""Which environment a recipe names, and its tasks as prompts."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from omegaconf import MISSING

from opd.envs.environment import Environment, Task
from opd.envs.opening import blamed, name_field, open_environment, plain_messages
from opd.episodes import EnvironmentTask
from opd.errors import UserError
from opd.records import DEFAULT_DOMAIN, Prompt


@dataclass(frozen=True)
class EnvironmentConfig:
    """Tasks of an environment."""

    name: str = MISSING
    """The environment: `calculator`, `returns_desk`, `reasoning_gym`, or one of the entry point group `opd.environments`."""
    options: dict[str, Any] = field(default_factory=dict)
    """What the environment takes."""
    context: Literal["append_only", "rerender"] = "append_only"
    """What the student sees from its second turn on. `append_only`: to the last id what it saw and sampled before, and the
    observation behind it. `rerender`: the whole conversation through the chat template, which may leave earlier reasoning
    out; each turn is then trained as a sequence of its own."""
    max_turns: int | None = None
    """The most turns of the student in an episode; empty takes the environment's own number."""
    system: str | None = None
    """A system message before the environment's own messages."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of the chat template, such as `enable_thinking: false`."""
    domain: str = DEFAULT_DOMAIN
    """The name of the teacher that scores these episodes, where there are several."""
    limit: int | None = None
    """Only the first so many tasks."""


def load_tasks(config: EnvironmentConfig, key: str) -> list[Prompt]:
    """A prompt for each task; its id is the task's. `key` is the recipe's section, for messages.

    Raises `UserError` for an unknown environment or option, for one that fails, and for tasks that are missing, share an id,
    have no seed or are no plain JSON.
    """
    environment, whose = check_environment(config, key), f"{name_field(key)}: environment {config.name!r}"
    with blamed(f"{whose} in tasks()", key):
        found = environment.tasks()
        tasks = list(found if isinstance(found, Iterable) else [found])[: config.limit]
    for task in tasks:
        if not isinstance(task, Task) or not isinstance(task.id, str):
            raise UserError(f"{whose}: tasks() must return `Task`s, each with a text as id; found {task!r:.80}")
    if not tasks:
        options = key if key.startswith("--") else f"{key}.options"
        raise UserError(f"{options}: with these, environment {config.name!r} has no tasks")
    twice = [name for name, count in Counter(task.id for task in tasks).items() if count > 1]
    if twice:
        field = name_field(key)
        raise UserError(f"{field}: two tasks of {config.name!r} are called {twice[0]!r}; each needs an id of its own")
    return [_prompt(environment, task, config, key) for task in tasks]


def check_environment(config: EnvironmentConfig, key: str) -> Environment:
    """The environment, not yet reset. Raises `UserError` for an unknown one, unknown options, or numbers out of range."""
    for name in ("max_turns", "limit"):
        value = getattr(config, name)
        if value is not None and value < 1:
            raise UserError(f"{key}.{name} is {value}: it must be at least 1")
    return open_environment(EnvironmentTask(config.name, {}, 0, config.options), key)


def _prompt(environment: Environment, task: Task, config: EnvironmentConfig, key: str) -> Prompt:
    field, whose = name_field(key), f"{name_field(key)}: environment {config.name!r} in task {task.id}"
    if type(task.seed) is not int:
        raise UserError(
            f"{field}: task {task.id} has no seed; {config.name!r} must give each task one, a whole number, so that an "
            "episode can be begun again as it was"
        )
    if not isinstance(task.data, Mapping) or not _is_json(task.data):
        raise UserError(f"{field}: task {task.id} of {config.name!r} holds data that are no plain JSON values")
    with blamed(f"{whose} in reset()", key):
        said = environment.reset(task.data, task.seed)
    opening = tuple(plain_messages(said, whose))
    system: tuple[Mapping[str, Any], ...] = ({"role": "system", "content": config.system},) if config.system else ()
    if not opening and not system:
        raise UserError(f"{whose}: reset() returned no message, so that the student would see nothing")
    return Prompt(
        id=task.id,
        messages=(*system, *opening),
        problem=_identity(task, opening, environment.single_turn),
        domain=config.domain,
        tools=tuple(environment.tools),
        chat_template_kwargs=config.chat_template_kwargs,
        task=EnvironmentTask(
            config.name, task.data, task.seed, config.options, config.context, config.max_turns, environment.single_turn
        ),
    )


def _identity(task: Task, opening: Sequence[Mapping[str, Any]], single_turn: bool) -> str:
    """The opening words, and of episodes a digest of the task: two databases may begin with the same wish."""
    words = "\n".join(message["content"] for message in opening if message["role"] == "user")
    if single_turn:
        return words
    digest = hashlib.sha256(json.dumps(task.data, sort_keys=True).encode()).hexdigest()[:8]
    return f"{words}\n[{digest}]"


def _is_json(data: Mapping[str, Any]) -> bool:
    try:
        return json.loads(json.dumps(data, allow_nan=False)) == data
    except (TypeError, ValueError):
        return False
