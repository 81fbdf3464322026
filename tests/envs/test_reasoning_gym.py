"""reasoning-gym's tasks as episodes of one turn, judged by their own verifiers."""

import json
import time
from typing import Any

import pytest

from opd.envs import reasoning_gym
from opd.envs.config import EnvironmentConfig, load_tasks
from opd.envs.opening import open_environment
from opd.episodes import EnvironmentTask, Reply
from opd.errors import UserError
from opd.eval import gym
from opd.eval.pool import WorkerPool

pytest.importorskip("reasoning_gym")

# Plain ones; metadata with tuples; a verifier that raises, and one that runs the answer; chance outside of the seed.
TASKS = ["chain_sum", "knights_knaves", "prime_factorization", "n_queens", "list_functions", "isomorphic_strings"]
OPTIONS = {"task": "composite", "size": 24, "seed": 58, "config": {"datasets": [{"name": name} for name in TASKS]}}


@pytest.fixture(scope="module")
def prompts():
    return load_tasks(EnvironmentConfig("reasoning_gym", OPTIONS), "prompts")


def played(prompt, *replies) -> Any:
    """The environment after these, of a task that was stored as JSON."""
    task = prompt.task
    environment = open_environment(EnvironmentTask(task.environment, {}, 0, json.loads(json.dumps(task.options))))
    assert tuple(environment.reset(json.loads(json.dumps(task.data)), task.seed)) == prompt.messages
    for reply in replies:
        assert environment.step(reply).done
    return environment


def of_kind(prompts, name):
    return next(prompt for prompt in prompts if played(prompt).entry["metadata"]["source_dataset"] == name)


def test_tasks_are_prompts(prompts):
    assert [prompt.id for prompt in prompts] == [f"composite-58-{i}" for i in range(24)]
    assert len({prompt.problem for prompt in prompts}) == 24
    assert prompts[3].messages == ({"role": "user", "content": prompts[3].problem},)
    assert prompts[3].tools == ()
    assert prompts[3].task.seed == 58


@pytest.mark.parametrize("name", TASKS)
def test_the_verifier_is_the_tasks_own(prompts, name):
    prompt = of_kind(prompts, name)
    answer = played(prompt).entry["answer"]
    assert played(prompt).outcome() == 0.0
    for text in (f"So \\boxed{{{answer}}}", f"<think>\nno\n</think>\n<answer>{answer}</answer>"):
        assert played(prompt, Reply(text)).outcome() == 1.0
    for text in (f"It is {answer}, no?", "", "\\boxed{no idea}"):  # no number is fished out of prose
        assert played(prompt, Reply(text)).outcome() < 0.5


def test_a_reply_ends_the_episode(prompts):
    prompt = of_kind(prompts, "chain_sum")
    answer = played(prompt).entry["answer"]
    right, wrong = Reply(f"\\boxed{{{answer}}}"), Reply("\\boxed{x}")
    seen = [played(prompt).step(reply) for reply in (right, wrong, Reply("<tool_call>", error="oh"))]
    assert [observation.mistake for observation in seen] == [False, True, True]
    assert all(observation.done and not observation.messages for observation in seen)
    assert played(prompt, wrong, right).outcome() == 0.0  # nothing after it counts


def test_part_of_the_credit(prompts):
    prompt = of_kind(prompts, "chain_sum")
    answer = played(prompt).entry["answer"]
    outcome = played(prompt, Reply(f"<answer>{answer} or so</answer>")).outcome()
    assert 0 < outcome < 1


def test_the_state_follows_from_task_and_replies(prompts):
    episodes = [(0,), (0, "a"), (0, "b"), (0, "a", "b"), (1,), (1, "a")]

    def digest(task, *texts):
        return played(prompts[task], *map(Reply, texts)).state_hash()

    hashes = [digest(*episode) for episode in episodes]
    assert len(set(hashes)) == len(hashes)
    assert hashes == [digest(*episode) for episode in episodes]


def test_an_answer_that_never_ends(prompts, monkeypatch):
    pool = WorkerPool(reasoning_gym._judge, num_workers=1, limit_s=0.5)
    monkeypatch.setattr(reasoning_gym, "_judges", lambda: pool)
    begun = time.monotonic()
    assert played(of_kind(prompts, "n_queens"), Reply("\\boxed{9**9**9}")).outcome() == 0.0  # it is run
    pool.close()
    assert time.monotonic() - begun < 60


def test_tasks_are_the_same_in_every_process(prompts, monkeypatch):
    """Several of these go through sets of strings, or draw from the global state."""
    config = json.dumps(OPTIONS["config"], sort_keys=True)
    monkeypatch.setenv("PYTHONHASHSEED", "4711")
    again = gym._entries.__wrapped__("composite", 24, 58, config)
    assert not isinstance(again, str)
    assert [entry["question"] for entry in again] == [prompt.problem for prompt in prompts]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"^prompts\.options\.task is missing"),
        (
            {"task": "chain_sums"},
            r"^prompts\.options\.task: reasoning-gym has no task 'chain_sums'; did you mean 'chain_sum'",
        ),
        ({"task": "gcd", "size": 0}, r"^prompts\.options\.size is 0: it must be at least 1"),
        ({"task": "gcd", "seed": -1}, r"^prompts\.options\.seed is -1: it must be at least 0"),
        (
            {"task": "gcd", "config": {"min_nums": 3}},
            r"^prompts\.options\.config: reasoning-gym's task 'gcd' refuses it: \w+",
        ),
    ],
)
def test_mistakes(options, message):
    with pytest.raises(UserError, match=message):
        load_tasks(EnvironmentConfig("reasoning_gym", options), "prompts")


def test_it_is_not_installed(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "reasoning_gym.factory", None)
    with pytest.raises(UserError, match=r"^prompts\.options\.task: reasoning_gym is not installed; run: pip install"):
        load_tasks(EnvironmentConfig("reasoning_gym", {"task": "gcd"}), "prompts")
