"""The mean advantage of a step as the baseline of its policy gradient."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from opd.objective.baseline import with_baselines
from opd.objective.batching import empty_batch, micro_batches, num_trainable
from opd.records import Rollout, Term

CPU = torch.device("cpu")
LENGTHS = [[(3, 5)], [(9, 1), (14, 6)], [(20, 12)], [(4, 3)]]


def term(rollout: Rollout, **inputs) -> Term:
    rewards = np.random.default_rng(rollout.slot).normal(size=rollout.num_tokens).astype(np.float32)
    plain = {"self_coef": 0.7, "advantage_clip": None, "ratio_clip": None, "importance_cap": None, "baseline": "mean"}
    return Term("policy_gradient", rollout.trainable, {"reward": rewards, **plain, **inputs})


def batches(taught, budget=40):
    return micro_batches(taught, budget, "token_mean", *num_trainable(taught), CPU)


@pytest.mark.parametrize("clip", [None, 0.5])
def test_the_mean_over_all_micro_batches(random_rollout, clip):
    rollouts = [random_rollout(seed, *turns, num_reused=1) for seed, turns in enumerate(LENGTHS)]
    terms = [term(rollout, advantage_clip=clip) for rollout in rollouts]
    packed = with_baselines([*batches([(r, [t]) for r, t in zip(rollouts, terms)]), empty_batch(CPU)])
    assert len(packed) > 2
    advantage = [
        (one.inputs["reward"] - 0.7 * np.concatenate([turn.sampler_logps for turn in rollout.turns]))[one.mask]
        for rollout, one in zip(rollouts, terms)
    ]
    limit = clip or np.inf
    exact = np.concatenate(advantage).astype(np.float64).clip(-limit, limit).mean()
    found = [batch.terms[0].inputs["baseline"] for batch in packed[:-1]]
    assert found == pytest.approx([exact] * len(found), rel=1e-6)


def test_each_term_has_its_own_and_the_reference_counts(random_rollout):
    rollout = random_rollout(0, (3, 8))
    plain = Term("policy_gradient", rollout.trainable, {**term(rollout).inputs, "baseline": 0.0})
    one, other = term(rollout, reference_coef=0.5), term(rollout, reward=np.full(8, 3.0, np.float32), self_coef=0.0)
    (batch,) = batches([(rollout, [one, plain, other])])
    (found,) = with_baselines([replace(batch, reference_logps=torch.full((8,), -2.0))])
    exact = (one.inputs["reward"] - 0.7 * rollout.turns[0].sampler_logps).mean() - 1.0
    assert [t.inputs["baseline"] for t in found.terms] == pytest.approx([exact, 0.0, 3.0], rel=1e-6)
