"""The environment that docs/stride.md shows, as somebody's package."""

import re
from pathlib import Path

import pytest

from opd.envs.config import EnvironmentConfig, load_tasks
from opd.envs.opening import open_environment
from opd.episodes import EnvironmentTask, Reply
from opd.errors import UserError
from opd.registry import ENVIRONMENTS

DOCS = (Path(__file__).parents[2] / "docs" / "stride.md").read_text(encoding="utf-8")


@pytest.fixture(autouse=True)
def _guess(installed):
    (code,) = re.findall(r"```python\n(# guess\.py\n.*?)```", DOCS, re.DOTALL)
    (group, entry) = re.findall(r'\[project\.entry-points\."opd\.(\w+)"\]\n(.*?)\n```', DOCS, re.DOTALL)[0]
    installed("guess", code, **{group: entry.replace('"', "")})


def test_it_plays_as_documented():
    first, second = load_tasks(EnvironmentConfig("guess", {"tasks": 2, "seed": 3}), "prompts")
    assert (first.id, second.id) == ("guess-3-0", "guess-3-1")
    assert not first.single_turn
    assert ENVIRONMENTS.load("guess", "prompts.name").restores
    seen = []
    for guesses in ("23", "23", "32"):
        played = open_environment(EnvironmentTask("guess", {}, 0))
        assert second.task is not None
        assert list(played.reset({"digit": 3}, 1)) == list(second.messages)
        answers = [played.step(Reply(guess)) for guess in guesses]
        seen.append((played.outcome(), played.state_hash(), [one.done for one in answers]))
    assert seen[0] == seen[1]
    assert (seen[0][0], seen[0][2]) == (1.0, [False, True])
    assert (seen[2][0], seen[2][2]) == (0.0, [True, False])
    assert seen[2][1] != seen[0][1]


def test_its_options_are_checked_where_they_stand():
    with pytest.raises(UserError, match=r"^eval\.environment\.options\.tasks is 0: it must be at least 1$"):
        load_tasks(EnvironmentConfig("guess", {"tasks": 0}), "eval.environment")
    with pytest.raises(UserError, match=r"^--suite: unknown key 'taskz'; did you mean 'tasks'\?$"):
        load_tasks(EnvironmentConfig("guess", {"taskz": 0}), "--suite")
