"""An environment's tasks as prompts."""

import re
import sys
import types
from dataclasses import dataclass
from typing import Any

import pytest

from opd.config import parse_section
from opd.envs.config import EnvironmentConfig, load_tasks
from opd.envs.environment import Task
from opd.episodes import EnvironmentTask
from opd.errors import UserError
from opd.registry import ENVIRONMENTS

TOOL = {"type": "function", "function": {"name": "knock"}}


class Whole:
    """The rest of what an environment needs."""

    step = outcome = state_hash = None


@dataclass(frozen=True)
class DoorsConfig:
    count: int = 3


class Doors(Whole):
    """Each task is a door's number; the seed is what the user says of it."""

    Config = DoorsConfig
    single_turn, restores = False, True
    tools = (TOOL,)
    max_turns = 4
    made: Any = None  # tasks instead of its own

    def __init__(self, config):
        self.config = config

    opens: Any = None  # what an episode begins with instead

    def tasks(self):
        if isinstance(self.made, Exception):
            raise self.made
        return self.made or [Task(f"door-{i}", {"door": i}, 10 + i) for i in range(self.config.count)]

    def reset(self, data, seed):
        if isinstance(self.opens, BaseException):
            raise self.opens
        if self.opens is not None:
            return self.opens
        opening = [{"role": "user", "content": f"door {data['door']}"}, {"role": "user", "content": f"key {seed}"}]
        return [{"role": "system", "content": "house"}, *opening]


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    module = types.ModuleType("a_third_partys_environment")
    module.Doors = Doors  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(ENVIRONMENTS.builtin, "doors", f"{module.__name__}:Doors")


def test_a_task_is_a_prompt():
    config = EnvironmentConfig("doors", {"count": 2}, context="rerender", max_turns=3, chat_template_kwargs={"x": 1})
    first, second = load_tasks(config, "prompts")
    assert (first.id, second.id) == ("door-0", "door-1")
    assert [message["content"] for message in second.messages] == ["house", "door 1", "key 11"]
    assert re.fullmatch(r"door 1\nkey 11\n\[[0-9a-f]{8}\]", second.problem)
    assert second.tools == (TOOL,)
    assert second.answer is None
    assert second.chat_template_kwargs == {"x": 1}
    assert second.task == EnvironmentTask("doors", {"door": 1}, 11, {"count": 2}, "rerender", 3)


def test_system_message_and_limit():
    prompts = load_tasks(EnvironmentConfig("doors", system="Be kind.", limit=2), "prompts")
    assert len(prompts) == 2
    assert prompts[0].messages[0] == {"role": "system", "content": "Be kind."}
    assert prompts[0].messages[1] == {"role": "system", "content": "house"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "dors"}, r"^prompts\.name: no environment is called 'dors'; did you mean 'doors'\?"),
        ({"options": {"cuont": 2}}, r"^unknown key 'prompts\.options\.cuont'; did you mean 'count'\?"),
        ({"options": {"count": 0}}, r"^prompts\.options: with these, environment 'doors' has no tasks"),
        ({"max_turns": 0}, r"^prompts\.max_turns is 0: it must be at least 1"),
        ({"limit": -1}, r"^prompts\.limit is -1: it must be at least 1"),
    ],
)
def test_mistakes(settings, message):
    with pytest.raises(UserError, match=message):
        load_tasks(EnvironmentConfig(**{"name": "doors", **settings}), "prompts")


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        ([Task("a", {"door": 1}, None)], r"^prompts\.name: task a has no seed; 'doors' must give each task one"),
        ([Task("a", {"door": 1}, 0), Task("a", {"door": 2}, 1)], r"^prompts\.name: two tasks of 'doors' are called 'a'"),
        ([Task("a", {"door": (1,)}, 0)], r"^prompts\.name: task a of 'doors' holds data that are no plain JSON values"),
        ([Task("a", {"door": object()}, 0)], r"no plain JSON values"),
        ([Task("a", {"door": float("nan")}, 0)], r"no plain JSON values"),
        ([Task("a", [1], 0)], r"no plain JSON values"),  # type: ignore[arg-type]
        ([Task("a", {}, 0.5)], "has no seed; 'doors' must give each task one, a whole number"),  # type: ignore[arg-type]
        (7, r"^prompts\.name: environment 'doors': tasks\(\) must return `Task`s, each with a text as id; found 7$"),
        (["a"], "must return `Task`s, each with a text as id; found 'a'$"),
        ([Task(1, {}, 0)], "must return `Task`s, each with a text as id; found Task"),  # type: ignore[arg-type]
        (KeyError("x"), r"^prompts\.name: environment 'doors' in tasks\(\) failed: KeyError: 'x' \(.*, line \d+\)$"),
        (UserError("prompts.options.count is odd"), r"^prompts\.options\.count is odd$"),
    ],
)
def test_tasks_that_cannot_be_used(monkeypatch, tasks, message):
    monkeypatch.setattr(Doors, "made", tasks)
    with pytest.raises(UserError, match=message):
        load_tasks(EnvironmentConfig("doors"), "prompts")


def test_a_section_of_a_recipe():
    config = parse_section(EnvironmentConfig, {"name": "doors", "options": {"count": 2}}, "prompts")
    assert config == EnvironmentConfig("doors", {"count": 2})
    with pytest.raises(UserError, match=r"^prompts\.context: "):
        parse_section(EnvironmentConfig, {"name": "doors", "context": "append"}, "prompts")
    with pytest.raises(UserError, match=r"^prompts\.name is missing"):
        parse_section(EnvironmentConfig, {}, "prompts")


@pytest.mark.parametrize(
    ("opens", "message"),
    [
        (KeyError("x"), r"in task door-0 in reset\(\) failed: KeyError: 'x' \("),
        (SystemExit(1), r"in task door-0 in reset\(\) failed: SystemExit: 1 \("),
        (7, "in task door-0: its messages must be a list of mappings with role and content, not 7$"),
        ("go", "must be a list of mappings with role and content, not 'go'$"),
        ({"role": "user", "content": "go"}, "must be a list of mappings"),
        ([{"role": "user"}], "a message needs a role and a content, both text; found {'role': 'user'}$"),
        ([{"content": "go"}], "a message needs a role and a content"),
        ([{"role": "user", "content": ["go"]}], "a message needs a role and a content"),
        ([{"role": "user", "content": "\ud800"}], "no plain JSON"),
        ([], r"reset\(\) returned no message"),
    ],
)
def test_openings_that_cannot_be_used(monkeypatch, opens, message):
    monkeypatch.setattr(Doors, "opens", opens)
    with pytest.raises(UserError, match=rf"^eval\.environment\.name: environment 'doors' .*{message}"):
        load_tasks(EnvironmentConfig("doors"), "eval.environment")
