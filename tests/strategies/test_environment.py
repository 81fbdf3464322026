"""The tasks of a step as a pure function of it."""

import subprocess
import sys
import types
from collections import Counter
from dataclasses import dataclass

import pytest

from opd.config import build_config, to_mapping
from opd.envs.config import EnvironmentConfig
from opd.envs.environment import Task
from opd.registry import ENVIRONMENTS
from opd.strategies.environment import EnvironmentPrompts


@dataclass(frozen=True)
class DoorsConfig:
    count: int = 5


class Doors:
    Config = DoorsConfig
    single_turn, restores = False, True
    tools, max_turns = (), 4

    def __init__(self, config):
        self.config = config

    def tasks(self):
        return [Task(f"door-{i}", {"door": i}, i) for i in range(self.config.count)]

    def reset(self, data, seed):
        return [{"role": "user", "content": f"door {data['door']}"}]

    def step(self, reply):
        raise NotImplementedError("nobody plays here")

    outcome = state_hash = step


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    module = types.ModuleType("a_third_partys_environment")
    module.Doors = Doors  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(ENVIRONMENTS.builtin, "doors", f"{module.__name__}:Doors")


def make(seed: int = 0) -> EnvironmentPrompts:
    return EnvironmentPrompts(EnvironmentConfig("doors"), seed)


def ids(source: EnvironmentPrompts, step: int, attempt: int = 0) -> list[str]:
    return [prompt.id for prompt in source.at(step, attempt, 2)]


def test_every_task_comes_once_an_epoch():
    source = make()
    assert sorted(prompt.id for prompt in source.known()) == [f"door-{i}" for i in range(5)]
    drawn = Counter(name for step in range(10) for name in ids(source, step))
    assert set(drawn.values()) == {4}


def test_a_step_depends_on_nothing_before_it():
    source = make()
    whole = [ids(source, step) for step in range(9)]
    assert [ids(make(), step) for step in reversed(range(9))] == whole[::-1]
    assert [ids(make(1), step) for step in range(9)] != whole
    assert [ids(source, step, 1) for step in range(9)] != whole


def test_a_recipe_names_it():
    raw = {
        "student": {"model": "tiny:student"},
        "teachers": {"default": {"model": "tiny:teacher"}},
        "prompts": {"type": "environment", "name": "doors", "options": {"count": 3}, "context": "rerender"},
        "terms": {"reverse_kl": {}},
    }
    config = build_config(raw)
    assert config.prompts["config"] == EnvironmentConfig("doors", {"count": 3}, "rerender")
    assert build_config(to_mapping(config)) == config


def test_reading_tasks_needs_no_torch():
    code = (
        "import sys; from opd.envs.config import EnvironmentConfig; "
        "from opd.strategies.environment import EnvironmentPrompts; "
        "made = EnvironmentPrompts(EnvironmentConfig('calculator', {'tasks': 3}), 0); assert len(made.at(0, 0, 3)) == 3; "
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
