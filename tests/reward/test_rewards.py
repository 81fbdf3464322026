"""What rollouts of one prompt are worth: outcomes by answers, votes, functions and environments, and scores beside them."""

import asyncio
import time
from dataclasses import replace

import numpy as np
import pytest
from tokenizers.pre_tokenizers import ByteLevel

from opd.contexts import Contexts
from opd.episodes import EnvironmentTask
from opd.errors import UserError
from opd.records import Finish, Prompt, Rollout, Turn
from opd.reward.config import RewardConfig
from opd.reward.rewards import Rewards, majority

PROMPT = Prompt(id="p", messages=({"role": "user", "content": "2+3"},), answer="5", meta={"level": 3})


@pytest.fixture(scope="module")
def tokenizer(byte_tokenizer):
    return byte_tokenizer("", "".join(sorted(ByteLevel.alphabet())))


@pytest.fixture
def rollouts(tokenizer):
    """`rollouts(*texts, finish="eos", prompt=PROMPT)`: a rollout a text, in slots from 8; with `eos` they end with it."""

    def build(*texts, finish: Finish = "eos", prompt=PROMPT, **fields):
        group = []
        for slot, text in enumerate(texts, start=8):
            ids = tokenizer(text).input_ids + [tokenizer.eos_token_id] * (finish == "eos")
            turn = Turn(np.array([1], np.int32), np.array(ids, np.int32), np.zeros(len(ids), np.float32), finish)
            group.append(Rollout(prompt, slot, (turn,), **fields))
        return group

    return build


@pytest.fixture
def judged(tokenizer):
    """`judged(group, noted=None, **settings)`: the group with outcomes and scores; what is noted is added to `noted`."""

    def judge(group, noted=None, **settings):
        noted = [] if noted is None else noted
        rewards = Rewards(RewardConfig(**settings), Contexts(tokenizer, 512, 256))
        try:
            return asyncio.run(rewards.judged(group, lambda name, value: noted.append((name, value))))
        finally:
            rewards.close()

    return judge


def outcomes(group):
    return [rollout.outcome for rollout in group]


def scores(group):
    return [rollout.score for rollout in group]


@pytest.fixture
def function(tmp_path):
    """`function(body)`: the spec of a user's own function with this body."""

    def write(body):
        path = tmp_path / "own.py"
        path.write_text(f"import os, time\n\ndef judge(response, answer, row):\n    {body}\n")
        return f"{path}:judge"

    return write


def test_answers_are_compared_with_the_prompts(rollouts, judged):
    found = judged(rollouts("#### 5", r"so \boxed{5.0}", "#### 6", "it is 5", ""))
    assert outcomes(found) == scores(found) == [1.0, 1.0, 0.0, 0.0, 0.0]
    assert [rollout.slot for rollout in found] == [8, 9, 10, 11, 12]


def test_truncated_answers_are_graded_as_any_other(rollouts, judged):
    assert outcomes(judged(rollouts("#### 5", "it is", finish="length"))) == [1.0, 0.0]


def test_any_of_several_answers_will_do(rollouts, judged):
    prompt = replace(PROMPT, answer=("4", "5"))
    assert outcomes(judged(rollouts("#### 4", "#### 5", "#### 6", prompt=prompt))) == [1.0, 1.0, 0.0]


def test_length_costs_score_and_never_outcome(rollouts, judged):
    found = judged(rollouts("#### 5", "#### 6", "6"), length_cost=0.01)
    assert outcomes(found) == [1.0, 0.0, 0.0]
    assert scores(found) == pytest.approx([1 - 0.07, -0.07, -0.02])  # with the token that ends the answer


def test_the_majority_decides_without_labels(rollouts, judged):
    prompt = replace(PROMPT, answer=None)
    group = rollouts("#### 7", r"\boxed{5}", "#### 5.0", "5 it is", "#### 7 apples?", prompt=prompt)
    assert outcomes(judged(group, outcome="majority")) == [0.0, 1.0, 1.0, 0.0, 0.0]
    assert outcomes(judged(group[3:4], outcome="majority")) == [0.0]  # nobody has an answer


@pytest.mark.parametrize(
    ("classes", "expected"),
    [
        ([0, 1, 1, None], [0, 1, 1, 0]),
        ([0, 1, 1, 0], [1, 0, 0, 1]),  # the class that appears first
        ([None, 0, 1, 2], [0, 1, 0, 0]),
        ([None, None], [0, 0]),
        ([], []),
    ],
)
def test_majority(classes, expected):
    assert majority(classes) == expected


def test_a_stopped_rollout_has_no_outcome_and_no_vote(rollouts, judged):
    stopped = [replace(one, slot=one.slot + 4, outcome=1.0) for one in rollouts("#### 6", "#### 6", finish="stopped")]
    group = [*rollouts("#### 5", "#### 6"), *stopped]
    found = judged(group, outcome="majority", length_cost=0.1)
    assert outcomes(found) == [1.0, 0.0, None, None]
    assert scores(found)[2:] == [None, None]
    assert outcomes(judged(stopped)) == [None, None]


def test_a_function_of_ones_own_judges_with_the_prompts_record(rollouts, judged, function):
    own = function("return row['level'] / 4 if answer in response else row['messages'][0]['content'] == '2-3'")
    found = judged(rollouts("5", "6"), outcome=own)
    assert outcomes(found) == scores(found) == [0.75, 0.0]
    unanswered = rollouts("a", "b", prompt=replace(PROMPT, answer=None))
    assert outcomes(judged(unanswered, outcome=function("return answer is None"))) == [1.0, 1.0]


def test_a_score_of_ones_own_knows_the_outcome(rollouts, judged, function):
    own = function("return 10 * row['outcome'] - row['num_tokens'] + (row['id'] == 'p') / 2")
    found = judged(rollouts("#### 5", "#### 66"), score=own, length_cost=1.0)
    assert outcomes(found) == [1.0, 0.0]
    assert scores(found) == [10 - 7 + 0.5 - 7, -8 + 0.5 - 8]


def test_a_function_that_takes_too_long_or_dies_counts_as_wrong_and_is_counted(rollouts, judged, function):
    own, noted = (
        function("time.sleep(60 if response == 'b' else 0); exit_ = response == 'c' and os._exit(1); return 1.0"),
        [],
    )
    group = rollouts("a", "b", "c", "d")
    assert outcomes(judged(group, noted, outcome=own, time_limit_s=0.5)) == [1.0, 0.0, 0.0, 1.0]
    assert noted == [("reward/outcome_timeouts", late) for late in (0, 1, 1, 0)]
    noted.clear()
    assert scores(judged(group, noted, score=own, outcome="majority", time_limit_s=0.5)) == [1.0, 0.0, 0.0, 1.0]
    assert noted == [("reward/score_timeouts", late) for late in (0, 1, 1, 0)]


def test_calls_that_do_not_end_are_said_once_and_a_step_of_nothing_else_ends_the_run(tokenizer, function):
    own = function("return 1.0")
    rewards = Rewards(RewardConfig(outcome=own, score=own, time_limit_s=2.0), Contexts(tokenizer, 512, 256))
    assert rewards.review(1, {"reward/outcome_timeouts": 0.0, "reward/score_timeouts": 0.0}) is None
    warning = rewards.review(2, {"reward/outcome_timeouts": 0.25})
    assert warning == (
        f"WARNING: reward.outcome: {own} took longer than reward.time_limit_s=2 or ended its process in 25.0% of the calls "
        "of step 2; these count as 0: mend it, or raise reward.time_limit_s"
    )
    assert rewards.review(3, {"reward/outcome_timeouts": 0.25}) is None
    with pytest.raises(
        UserError, match=rf"^reward\.score: {own} took .*=2 or .* in 100\.0% of the calls of step 4; mend it"
    ):
        rewards.review(4, {"reward/outcome_timeouts": 0.25, "reward/score_timeouts": 1.0})
    rewards.close()


def test_others_go_on_while_a_function_runs(rollouts, tokenizer, function):
    rewards = Rewards(RewardConfig(outcome=function("time.sleep(0.2); return 1")), Contexts(tokenizer, 512, 256))
    ticks = []

    async def tick():
        while True:
            ticks.append(time.perf_counter())
            await asyncio.sleep(0.01)

    async def both():
        ticking = asyncio.create_task(tick())
        found = await rewards.judged(rollouts("a"), lambda *_: None)
        ticking.cancel()
        return found

    assert outcomes(asyncio.run(both())) == [1.0]
    rewards.close()
    assert len(ticks) >= 10


def test_an_environment_says_what_came_of_an_episode(rollouts, judged):
    prompt = replace(PROMPT, answer=None, task=EnvironmentTask("echo", {}, 0))
    played = zip(rollouts("a", "bb", "c", prompt=prompt), (1.0, 0.25, None))
    group = [replace(one, outcome=outcome) for one, outcome in played]
    found = judged(group, length_cost=0.5)
    assert outcomes(found) == [1.0, 0.25, None]
    assert scores(found) == [1.0 - 1.0, 0.25 - 1.5, None]


def test_what_was_judged_before_a_checkpoint_stays(rollouts, judged):
    first = judged(rollouts("#### 5", "#### 6"), length_cost=0.25)
    again = judged(first, length_cost=0.0)
    assert [one is other for one, other in zip(first, again)] == [True, True]


@pytest.mark.parametrize(
    ("body", "settings", "message"),
    [
        ("return 1.5", {}, r"reward\.outcome: .*own\.py:judge returned 1\.5 for prompt p; an outcome is from 0 to 1"),
        (
            "return 'yes'",
            {},
            r"^reward\.outcome: .*own\.py:judge failed on prompt p: TypeError: it returned 'yes'; return a b",
        ),
        (
            "return [][0]",
            {},
            r"^reward\.outcome: .*failed on prompt p: IndexError: list .* \(own\.py, line 4: return \[\]\[0\]\)$",
        ),
    ],
)
def test_functions_that_fail_are_named(rollouts, judged, function, body, settings, message):
    with pytest.raises(UserError, match=message) as error:
        judged(rollouts("a"), outcome=function(body), **settings)
    assert "\n" not in str(error.value)


def test_a_prompt_without_an_answer_is_named(rollouts, judged):
    with pytest.raises(UserError, match=r"^prompts\.columns\.answer: prompt p has no answer for reward\.outcome=answer"):
        judged(rollouts("#### 5", prompt=replace(PROMPT, answer=None)))
