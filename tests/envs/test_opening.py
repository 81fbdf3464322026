"""Environments by name and options."""

import sys
import time
import types
from dataclasses import dataclass
from typing import Any

import pytest

from opd.envs.opening import open_environment
from opd.episodes import EnvironmentTask
from opd.errors import UserError
from opd.registry import ENVIRONMENTS


@dataclass(frozen=True)
class DoorConfig:
    width: int = 1


class Door:
    Config = DoorConfig
    single_turn, restores, tools, max_turns = False, True, (), 3
    tasks = reset = step = outcome = state_hash = None  # never asked here

    def __init__(self, config):
        if config.width < 1:
            raise UserError(f"prompts.options.width is {config.width}: it must be at least 1")
        if config.width == 13:
            raise KeyError(13)
        if config.width == 14:
            raise SystemExit(14)
        self.config = config


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    module = types.ModuleType("a_third_partys_environment")
    module.Door = Door  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(ENVIRONMENTS.builtin, "door", f"{module.__name__}:Door")


def opened(name="door", key="prompts", **options) -> Any:
    return open_environment(EnvironmentTask(name, {}, 0, options), key)


def test_options_are_read_into_its_config():
    assert opened(width=3).config == DoorConfig(3)
    assert opened().config == DoorConfig()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "dor"}, r"^prompts\.name: no environment is called 'dor'; did you mean 'door'\?"),
        ({"name": "dor", "key": "eval"}, r"^eval\.name: "),
        ({"widht": 3}, r"^unknown key 'prompts\.options\.widht'; did you mean 'width'\?"),
        ({"width": "wide"}, r"^prompts\.options\.width: Value 'wide' of type 'str' could not be converted"),
        ({"width": 0}, r"^prompts\.options\.width is 0"),
        ({"width": 0, "key": "eval.environment"}, r"^eval\.environment\.options\.width is 0"),
        ({"width": 0, "key": "--suite"}, r"^--suite: width is 0"),
        ({"widht": 3, "key": "--suite"}, r"^--suite: unknown key 'widht'"),
        ({"width": 13}, r"^prompts\.name: environment 'door' failed: KeyError: 13 \(.*test_opening\.py, line \d+\)$"),
        ({"width": 14}, r"^prompts\.name: environment 'door' failed: SystemExit: 14 \("),
    ],
)
def test_mistakes(settings, message):
    with pytest.raises(UserError, match=message):
        opened(**settings)


def test_it_is_cheap():
    opened()
    begun = time.process_time()
    for _ in range(50):
        opened(width=3)
    assert time.process_time() - begun < 1.0  # 20 ms each, where a rollout takes seconds


def test_every_builtin_environment_has_what_the_protocol_names():
    for name in ENVIRONMENTS.builtin.keys() - {"door"}:
        kind = ENVIRONMENTS.load(name, "prompts.name")
        for member in ("Config", "single_turn", "restores", "tasks", "reset", "step", "outcome", "state_hash"):
            assert hasattr(kind, member), (name, member)


@pytest.mark.parametrize(
    ("member", "value", "message"),
    [
        ("max_turns", 0, "its max_turns is 0; it must be a whole number, at least 1"),
        ("max_turns", 2.5, r"its max_turns is 2\.5; it must be a whole number"),
        ("max_turns", True, "its max_turns is True"),
        ("tools", None, "its tools are None; they must be a list of JSON schemas"),
        ("tools", "ab", "its tools are 'ab'"),
        ("tools", [1], r"its tools are \[1\]"),
    ],
)
def test_members_that_are_nonsense(monkeypatch, member, value, message):
    monkeypatch.setattr(Door, member, value)
    with pytest.raises(UserError, match=rf"^eval\.name: environment 'door': {message}"):
        opened(key="eval")


@pytest.mark.parametrize("member", ["single_turn", "restores", "tasks", "step", "state_hash"])
def test_members_that_are_missing(monkeypatch, member):
    monkeypatch.delattr(Door, member)
    with pytest.raises(UserError, match=rf"^prompts\.name: environment 'door' has no {member}; see docs/stride\.md"):
        opened()


def test_the_cause_stays_with_the_error():
    with pytest.raises(UserError) as raised:
        opened(width=13)
    assert isinstance(raised.value.__cause__, KeyError)
