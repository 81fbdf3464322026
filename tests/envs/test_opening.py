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

    def __init__(self, config):
        if config.width < 1:
            raise UserError(f"prompts.options.width is {config.width}: it must be at least 1")
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
