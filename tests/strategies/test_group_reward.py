"""Advantages of rollouts against each other (arXiv 2402.03300), and the gate that reads raw outcomes (arXiv 2609.13866)."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opd.config import build_config
from opd.errors import UserError
from opd.records import Finish, Prompt, Rollout, Turn
from opd.strategies.group_reward import GroupReward, GroupRewardConfig, fails_alike, group_advantages, is_live
from opd.teachers.pool import Tally, TeacherPool

RAW = {
    "student": {"model": "tiny:student"},
    "prompts": {"path": "tiny:half-solvable-prompts"},
    "batch": {"prompts": 4, "rollouts_per_prompt": 4},
    "reward": {"outcome": "answer", "length_cost": 0.01},
    "terms": {"group_reward": {}},
}
FAILED = [(0.0, -0.31), (0.0, -0.02), (0.0, -0.1), (0.0, -0.3)]  # all wrong, and of different lengths
MIXED = [(1.0, 0.7), (0.0, -0.3), (0.0, -0.05), (1.0, 0.95)]


def group_of(*pairs, finish: Finish = "eos", first_slot=0):
    """A rollout for each (outcome, score)."""

    def one(slot, outcome, score):
        size = 2 + slot % 3
        turn = Turn(np.array([1], np.int32), np.zeros(size, np.int32), np.zeros(size, np.float32), finish)
        return Rollout(Prompt(id="p"), slot, (turn,), outcome=outcome, score=score)

    return [one(slot, *pair) for slot, pair in enumerate(pairs, start=first_slot)]


def collected(group, **fields):
    """(the term of each rollout, what was noted)."""
    config = build_config({**RAW, "terms": {"group_reward": fields}})
    maker, tally = GroupReward(config.terms["group_reward"], config), Tally(TeacherPool({}))
    tally.groups |= {rollout.slot: group for rollout in group}

    async def all_of_them():
        return [await maker.collect(rollout, tally) for rollout in group]

    terms = [term for (term,) in asyncio.run(all_of_them())]
    return terms, {name: float(np.mean([value for value, _ in pairs])) for name, pairs in tally.noted.items()}


def advantages(group, **fields):
    """[g], each the same at all tokens of its rollout."""
    terms, _ = collected(group, **fields)
    for rollout, term in zip(group, terms):
        assert term.inputs["reward"].shape == (rollout.num_tokens,)
        assert len(set(term.inputs["reward"].tolist())) == 1
    return [float(term.inputs["reward"][0]) for term in terms]


def test_the_published_advantages():
    """By hand, in float64: the sample standard deviation, as TRL and verl take it."""
    scores = np.array([score for _, score in MIXED])
    deviation = np.sqrt(((scores - scores.mean()) ** 2).sum() / 3)
    expected = (scores - scores.mean()) / (deviation + 1e-6)
    np.testing.assert_allclose(advantages(group_of(*MIXED)), expected, rtol=1e-6)
    np.testing.assert_allclose(advantages(group_of(*MIXED), normalize="none"), scores - scores.mean(), rtol=1e-6)
    assert group_advantages(group_of(*MIXED), "std", 1e-6) == pytest.approx(expected, rel=1e-12)


def test_without_a_shaped_score_the_outcome_is_it():
    group = group_of((1.0, None), (0.0, None), (0.0, None), (0.0, None))
    assert advantages(group) == pytest.approx([1.5, -0.5, -0.5, -0.5], rel=1e-5)


@pytest.mark.parametrize("normalize", ["std", "none"])
def test_failures_of_different_lengths_teach_under_the_score_alone(normalize):
    group = group_of(*FAILED)
    assert advantages(group, gate="outcome", normalize=normalize) == [0.0] * 4
    for gate in ("score", "none"):
        found = advantages(group, gate=gate, normalize=normalize)
        assert found[1] > 0 > found[0]
        _, noted = collected(group, gate=gate, normalize=normalize)
        assert noted == {"live_groups": 1.0, "phantom_groups": 1.0, "score": pytest.approx(-0.1825)}
    assert collected(group)[1]["phantom_groups"] == collected(group)[1]["live_groups"] == 0.0


def test_the_division_makes_small_differences_full_sized():
    tiny = [(0.0, 1e-3 * score) for _, score in FAILED]
    assert advantages(group_of(*tiny), gate="score") == pytest.approx(advantages(group_of(*FAILED), gate="score"), rel=0.02)


def test_the_gate_reads_outcomes_and_never_scores():
    right_alike = group_of((1.0, 0.9), (1.0, 0.2))
    same_scores = group_of((1.0, 0.5), (0.0, 0.5))
    assert [is_live(right_alike, gate) for gate in ("outcome", "score", "none")] == [False, True, True]
    assert [is_live(same_scores, gate) for gate in ("outcome", "score", "none")] == [True, False, True]
    assert advantages(same_scores) == [0.0, 0.0]
    assert not fails_alike(right_alike)
    assert collected(right_alike, gate="score")[1]["phantom_groups"] == 0.0


@settings(max_examples=25)
@given(scores=st.lists(st.floats(-10, 10), min_size=2, max_size=6), outcome=st.sampled_from([0.0, 0.25, 1.0]))
def test_no_scores_bring_a_dead_group_to_life(scores, outcome):
    group = group_of(*((outcome, score) for score in scores))
    assert not is_live(group, "outcome")
    assert advantages(group) == [0.0] * len(scores)


@given(pairs=st.lists(st.tuples(st.sampled_from([0.0, 0.5, 1.0]), st.floats(-10, 10)), min_size=2, max_size=8))
def test_advantages_are_centred_and_in_the_order_of_the_scores(pairs):
    group = group_of(*pairs)
    found = group_advantages(group, "std", 1e-6)
    assert abs(found.sum()) < 1e-6
    assert (np.abs(found) <= np.sqrt(len(pairs))).all()
    scores = np.array([score for _, score in pairs])
    assert (np.sign(np.subtract.outer(scores, scores)) * np.subtract.outer(found, found) >= -1e-9).all()


def test_equal_scores_have_no_advantage_to_the_last_bit():
    for gate in ("score", "none"):
        assert advantages(group_of(*[(1.0, 0.1)] * 3, *[(0.0, 0.1)] * 4), gate=gate) == [0.0] * 7


def test_what_nobody_judged_is_left_out_and_stays_in_the_normaliser():
    group = [*group_of(*MIXED), *group_of((None, None), first_slot=4), *group_of((1.0, 5.0), finish="stopped", first_slot=5)]
    found = advantages(group)
    assert found[:4] == advantages(group_of(*MIXED))
    assert found[4:] == [0.0, 0.0]
    terms, noted = collected(group)
    assert all(term.mask.all() for term in terms)
    assert noted["score"] == pytest.approx(np.mean([score for _, score in MIXED]))


@pytest.mark.parametrize("pairs", [[(1.0, 0.4), (None, None)], [(None, None)] * 2])
def test_one_judged_rollout_has_nothing_to_be_compared_with(pairs):
    for gate in ("outcome", "score", "none"):
        assert advantages(group_of(*pairs), gate=gate) == [0.0, 0.0]
    assert not is_live(group_of(*pairs), "outcome")
    assert not is_live(group_of(*pairs), "score")


def test_the_term():
    group = [replace(one, turns=(replace(one.turns[0], num_reused=1),)) for one in group_of(*MIXED)]
    (term, *_), _ = collected(group, coef=0.5, ratio_clip_high=0.28)
    assert (term.kind, term.coef, term.weight) == ("policy_gradient", 0.5, None)
    assert term.mask.tolist() == group[0].trainable.tolist() == [False, True]
    assert term.inputs["reward"].dtype == np.float32
    scalars = {name: value for name, value in term.inputs.items() if name != "reward"}
    assert scalars == {
        "self_coef": 0.0,
        "advantage_clip": None,
        "ratio_clip": 0.2,
        "ratio_clip_high": 0.28,
        "importance_cap": None,
        "figure": "group_advantage",
    }


def test_dead_groups_are_refilled_so_often():
    config = build_config({**RAW, "terms": {"group_reward": {"dead": "drop_and_refill", "max_refills": 2}}})
    maker = GroupReward(config.terms["group_reward"], config)
    dead, live = group_of(*FAILED), group_of(*MIXED)
    assert [maker.keeps(dead, attempt) for attempt in range(4)] == [False, False, True, True]
    assert all(maker.keeps(live, attempt) for attempt in range(4))
    plain = build_config(RAW)
    assert GroupReward(plain.terms["group_reward"], plain).keeps(dead, 0)


def test_defaults():
    config = build_config(RAW)
    assert config.terms["group_reward"] == GroupRewardConfig(
        normalize="std", eps=1e-6, gate="outcome", dead="zero_advantage"
    )
    assert config.frozen == {}
    assert GroupReward.compares_groups
    assert not GroupReward.needs_teacher


REFILL = {"terms": {"group_reward": {"dead": "drop_and_refill"}}}
TEACHER = {"teachers": {"default": {"model": "tiny:teacher"}}}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"batch": {"rollouts_per_prompt": 1}}, "batch.rollouts_per_prompt is 1: terms.group_reward compares"),
        (
            {"reward": None},
            "terms.group_reward: nothing says what a rollout is worth; set reward.outcome to answer, majority",
        ),
        ({"objective": {"temperature": 0.5}}, "terms.group_reward: sampled tokens need objective.temperature to be"),
        ({"terms": {"group_reward": {"eps": 0.0}}}, "terms.group_reward.eps is 0.0: it must be above 0"),
        (
            {"terms": {"group_reward": {"ratio_clip": 0}}},
            "terms.group_reward.ratio_clip is 0.0: it must be positive, or null",
        ),
        ({"terms": {"group_reward": {"ratio_clip_high": -1}}}, "terms.group_reward.ratio_clip_high is -1.0: it must"),
        (
            {"terms": {"group_reward": {"ratio_clip": None, "ratio_clip_high": 0.2}}},
            "terms.group_reward.ratio_clip_high: has no effect without ratio_clip; leave it out, or set it to null",
        ),
        (
            {"terms": {"group_reward": {"normalize": "none", "eps": 1e-4}}},
            "terms.group_reward.eps: has no effect with normalize: none; leave it out, or set it to 1e-06",
        ),
        ({"terms": {"group_reward": {"max_refills": 2}}}, "terms.group_reward.max_refills: has no effect with dead: zero"),
        ({"terms": {"group_reward": {"gate": "scores"}}}, "terms.group_reward.gate: Invalid value 'scores'"),
        (
            {"terms": {"group_reward": {"dead": "drop_and_refill", "gate": "none"}}},
            "terms.group_reward.dead=drop_and_refill: with gate none no group is dead",
        ),
        (
            {"terms": {"group_reward": {"dead": "drop_and_refill", "max_refills": 0}}},
            "terms.group_reward.max_refills is 0: it must be at least 1",
        ),
        ({**REFILL, "lookahead": 1}, "terms.group_reward.dead=drop_and_refill: with lookahead 1 a checkpoint holds"),
        (
            {**REFILL, **TEACHER, "rollout": {"early_stop": {}}},
            "terms.group_reward.dead=drop_and_refill: rollout.early_stop may stop rollouts",
        ),
        (
            {**REFILL, "rollout": {"prefix": {"tokens": 4}}},
            "terms.group_reward.dead=drop_and_refill: rollout.prefix may stop",
        ),
    ],
)
def test_refusals(changes, said):
    with pytest.raises(UserError) as error:
        build_config({**RAW, **changes})
    assert str(error.value).startswith(said)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "changes",
    [
        {**REFILL, "reward": {"outcome": "majority"}},
        {"lookahead": 1},
        {**TEACHER, "rollout": {"early_stop": {}}},
        {**TEACHER, "terms": {"group_reward": {}, "reverse_kl": {}}},
        {**REFILL, "prompts": {"type": "environment", "name": "calculator"}, "reward": None, "rollout": {"horizon": {}}},
    ],
)
def test_combinations_that_work(changes):
    assert "group_reward" in build_config({**RAW, **changes}).terms
