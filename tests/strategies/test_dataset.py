"""The prompts of a step as a pure function of it."""

import json
from collections import Counter

import pytest

from opd.data import DatasetConfig
from opd.strategies.dataset import DatasetPrompts

SIZE = 10


@pytest.fixture
def make(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"id": i, "prompt": f"problem {i}"}) + "\n" for i in range(SIZE)))
    return lambda seed=0: DatasetPrompts(DatasetConfig(path=str(path)), seed)


def ids(source: DatasetPrompts, steps, count: int, attempt: int = 0) -> list[str]:
    return [prompt.id for step in steps for prompt in source.at(step, attempt, count)]


@pytest.mark.parametrize("count", [1, 3, 4, 10, 25])
def test_every_row_comes_once_an_epoch(make, count):
    drawn = ids(make(), range(30), count)
    for epoch in range(len(drawn) // SIZE):
        assert sorted(drawn[epoch * SIZE : (epoch + 1) * SIZE], key=int) == [str(i) for i in range(SIZE)]


def test_a_step_depends_on_nothing_before_it(make):
    whole = [ids(make(), [step], 4) for step in range(20)]
    resumed = make()
    assert [ids(resumed, [step], 4) for step in reversed(range(20))] == whole[::-1]


def test_epochs_seeds_and_attempts_differ(make):
    epochs = [tuple(ids(make(), [step], SIZE)) for step in range(5)]
    seeds = [tuple(ids(make(seed), [0], SIZE)) for seed in range(5)]
    attempts = [tuple(ids(make(), [0], SIZE, attempt)) for attempt in range(5)]
    for orders in (epochs, seeds, attempts):
        assert len(set(orders)) == 5
    assert epochs[0] == seeds[0] == attempts[0]


def test_the_first_rows_vary_over_seeds(make):
    first = Counter(ids(make(seed), [0], 1)[0] for seed in range(200))
    assert len(first) == SIZE
    assert max(first.values()) < 45
