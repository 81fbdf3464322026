"""Methods together in one run: STRIDE, CompassOPD, endpoint masking, negative self-distillation, group rewards."""

import json

import numpy as np
import pytest

from opd.config import build_config
from opd.errors import UserError

ALL = {"rollouts_every": 1, "num_rollouts": 8}
ENDPOINT = {"endpoint": {"by": "token", "fraction": 0.4}}
SHORT = {"steps": 3, "eval": {}, "trackers": ALL}
WEAK = {"default": {"model": "a/teacher", "weak_reference": {"model": "a/weak"}}}
NEVER = {"stop_below": -1e9, "keep_above": None}


@pytest.fixture
def verifier(tmp_path):
    """A verifier to which an answer of more than four characters is right."""
    path = tmp_path / "verifier.py"
    path.write_text("def long(response, answer, row):\n    return len(response) > 4\n")
    return f"{path}:long"


def rollouts(run, step):
    return [json.loads(line) for line in (run / "rollouts" / f"step-{step}.jsonl").read_text().splitlines()]


def test_stride_with_endpoint(echo, episode_recipe, train):
    """Turns are masked one by one, but never the one at which a rollout was stopped."""
    rows = {}
    for name, below in (("stopped at once", -1e-6), ("never stopped", -1e9)):
        sections = {"rollout": {"stride": {"stop_below": below, "keep_above": None}}, "masks": ENDPOINT}
        rows[name] = train(episode_recipe(**SHORT, **sections), name)
    assert all(row["stopped_rate"] == 1 and row["masked_share"] == 0 for row in rows["stopped at once"])
    assert all(0.1 < row["masked_share"] <= 0.4 for row in rows["never stopped"])


def test_reused_turns_have_no_middle_of_their_own(echo, episode_recipe, train):
    """Only what is trained is masked: the share is of the new turns, though restarts reuse others."""
    masks = {"endpoint": {"by": "token", "fraction": 0.5}}
    rows = train(episode_recipe(**{**SHORT, "steps": 5}, rollout={"stride": NEVER}, masks=masks), "restarts")
    assert sum(row["reused_tokens"] for row in rows) > 0
    assert all(0.2 < row["masked_share"] <= 0.5 for row in rows)


def test_compass_with_stride_and_endpoint(aligned_recipe, train, tmp_path):
    """The mask and the alignment's mask both hold, and stops go by the teacher's log-probs of aligned text."""
    sections = {"terms": {"compass": {}}, "sampler": {"chunk_tokens": 3}}
    plain = train(aligned_recipe(**SHORT, **sections), "plain")
    both = train(aligned_recipe(**SHORT, **sections, masks=ENDPOINT, rollout={"stride": NEVER}), "both")
    assert all(row["masked_share"] > 0 for row in both)
    assert both[0]["sampled_tokens"] == plain[0]["sampled_tokens"]
    assert both[0]["trained_tokens"] == plain[0]["trained_tokens"]  # masked tokens count in the normaliser
    assert both[0]["loss"] != plain[0]["loss"]
    stopped = train(aligned_recipe(**SHORT, **sections, rollout={"stride": {"stop_below": -4.0}}), "stopped")
    assert all(row["stopped_rate"] > 0 for row in stopped)
    assert stopped[0]["sampled_tokens"] < plain[0]["sampled_tokens"]


@pytest.mark.parametrize("form", ["full", "sampled"])
def test_reverse_kl_with_group_reward_and_its_gate(raw_recipe, train, verifier, form):
    """The losses of both terms are added; with a coefficient of 0 the group's term leaves the teacher's alone."""
    terms = {"reverse_kl": {"form": form}}
    reward = {"outcome": verifier}
    plain = train(raw_recipe(**SHORT, terms=terms), "plain")
    group = train(raw_recipe(**SHORT, terms={"group_reward": {}}, reward=reward, teachers={}), "group")
    silent = train(raw_recipe(**SHORT, terms={**terms, "group_reward": {"coef": 0.0}}, reward=reward), "silent")
    both = train(raw_recipe(**SHORT, terms={**terms, "group_reward": {}}, reward=reward), "both")
    assert [row["loss"] for row in silent] == pytest.approx([row["loss"] for row in plain], rel=1e-5)
    assert abs(group[0]["loss"]) > 1e-3  # rewards are for length, so advantages do not cancel over tokens
    assert both[0]["loss"] == pytest.approx(plain[0]["loss"] + group[0]["loss"], rel=1e-5, abs=1e-6)
    for name in ("sampled_tokens", "trained_tokens"):
        assert both[0][name] == plain[0][name] == group[0][name]
    assert 0 < np.mean([row["live_groups"] for row in both]) <= 1
    assert all(row["phantom_groups"] == 0 for row in both)
    assert all(0 <= row["success_rate"] <= 1 for row in both)


def test_negative_with_endpoint_and_a_teacher(raw_recipe, train):
    """The mask lies over the penalty as well; a teacher's term beside it keeps its figures."""
    negative = {"condition": {"source": "fixed", "text": "bad", "template": "{condition} {problem}"}}
    terms = {"reverse_kl": {}, "negative": negative}
    plain = train(raw_recipe(**SHORT, terms={"reverse_kl": {}}), "plain")
    both = train(raw_recipe(**SHORT, terms=terms, masks=ENDPOINT), "both")
    assert all(row["masked_share"] > 0 and row["gate_share"] > 0 for row in both)
    assert both[0]["sampled_tokens"] == plain[0]["sampled_tokens"]


def test_group_reward_of_episodes_with_endpoint(echo, episode_recipe, train):
    """Outcomes are those of the environment; the mask comes after the advantages."""
    sections = {"terms": {"group_reward": {"gate": "none"}}, "teachers": {}}
    plain = train(episode_recipe(**SHORT, **sections), "plain")
    both = train(episode_recipe(**SHORT, **sections, masks=ENDPOINT), "both")
    assert both[0]["masked_share"] > 0
    for name in ("success_rate", "score", "live_groups", "trained_tokens"):
        assert both[0][name] == plain[0][name]
    assert both[0]["loss"] != plain[0]["loss"]


IMPOSSIBLE = {
    "negative on episodes": ({"terms": {"negative": {}}, "teachers": {}}, "terms.negative: a condition is about one answer"),
    "a stop without a teacher": (
        {"terms": {"group_reward": {}}, "rollout": {"stride": {}}, "teachers": {}},
        "teachers: rollout.stride asks one",
    ),
    "refills and stops": (
        {"terms": {"reverse_kl": {}, "group_reward": {"dead": "drop_and_refill"}}, "rollout": {"stride": {}}},
        "terms.group_reward.dead=drop_and_refill: rollout.stride may stop rollouts",
    ),
    "a mask and a mean advantage": (
        {"terms": {"compass": {"baseline": "mean"}}, "teachers": WEAK, "masks": ENDPOINT},
        "terms.compass.baseline: the mean is taken over the tokens that masks.endpoint leaves",
    ),
    "self-distillation on episodes": ({"terms": {"self_distillation": {}}, "teachers": {}}, "terms.self_distillation"),
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_what_cannot_work_together_is_refused_with_the_reason(echo, episode_recipe, name):
    sections, message = IMPOSSIBLE[name]
    with pytest.raises(UserError) as refusal:
        build_config(episode_recipe(**sections))
    assert str(refusal.value).startswith(message)
