"""Rollouts and terms as padded micro-batches."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from opd.objective.batching import empty_batch, micro_batches, num_trainable, select_rows
from opd.records import Hidden, Rollout, Term, TopK

CPU = torch.device("cpu")
BUDGETS = [1, 40, 10**6]


def term(rollout: Rollout, mask=None, **changes) -> Term:
    n = rollout.num_tokens
    inputs = {"reward": np.arange(n, dtype=np.float32) + 100 * rollout.slot, "self_coef": 1.0, "advantage_clip": None}
    return replace(Term("policy_gradient", rollout.trainable if mask is None else mask, inputs), **changes)


def pack(taught, budget=10**6, normalizer="token_mean"):
    return micro_batches(taught, budget, normalizer, *num_trainable(taught), CPU)


def by_token(batches, read) -> dict[float, float]:
    """What `read` gives of each row, by the row's reward (which is unique)."""
    pairs = [(batch.terms[0].inputs["reward"], read(batch)) for batch in batches]
    return {float(r): float(v) for rewards, values in pairs for r, v in zip(rewards, values)}


@pytest.fixture
def taught(random_rollout):
    lengths = [[(3, 5)], [(9, 1), (14, 6)], [(20, 12)], [(4, 3)]]
    rollouts = [random_rollout(seed, *turns) for seed, turns in enumerate(lengths)]
    return [(rollout, [term(rollout)]) for rollout in rollouts]


@pytest.mark.parametrize("budget", BUDGETS)
def test_each_row_is_the_position_before_its_token(taught, budget):
    rows = 0
    for batch in pack(taught, budget):
        assert torch.equal(batch.input_ids.flatten()[batch.rows + 1], batch.token_ids)
        rows += len(batch.rows)
    assert rows == sum(rollout.num_tokens for rollout, _ in taught)


@pytest.mark.parametrize("budget", BUDGETS)
def test_inputs_stay_with_their_tokens(taught, budget):
    batches = pack(taught, budget)
    tokens = by_token(batches, lambda batch: batch.token_ids)
    logps = by_token(batches, lambda batch: batch.sampler_logps)
    for rollout, _ in taught:
        sampled = np.concatenate([turn.sampled_ids for turn in rollout.turns])
        sampler = np.concatenate([turn.sampler_logps for turn in rollout.turns])
        for i in range(rollout.num_tokens):
            assert tokens[100 * rollout.slot + i] == sampled[i]
            assert logps[100 * rollout.slot + i] == sampler[i]


def test_micro_batches_keep_to_the_budget(taught):
    for budget in BUDGETS:
        for batch in pack(taught, budget):
            assert batch.input_ids.numel() <= budget or len(batch.input_ids) == 1
    assert len(pack(taught, 1)) == 5  # one for each turn
    assert len(pack(taught, 10**6)) == 1


@pytest.mark.parametrize("budget", BUDGETS)
def test_normalisers(taught, budget):
    scale = by_token(pack(taught, budget), lambda batch: batch.terms[0].scale)
    assert list(scale.values()) == pytest.approx([1 / 27] * 27)
    scale = by_token(pack(taught, budget, "sequence_mean"), lambda batch: batch.terms[0].scale)
    for rollout, _ in taught:
        own = [scale[100 * rollout.slot + i] for i in range(rollout.num_tokens)]
        assert own == pytest.approx([1 / (4 * rollout.num_tokens)] * rollout.num_tokens)


def test_a_sequence_counts_its_trainable_tokens_alone(taught, random_rollout):
    reused = random_rollout(5, (3, 6), num_reused=4)
    scale = by_token(pack([*taught, (reused, [term(reused)])], 40, "sequence_mean"), lambda b: b.terms[0].scale)
    assert [scale[500 + i] for i in (4, 5)] == pytest.approx([1 / (5 * 2)] * 2)
    assert sum(scale.values()) == pytest.approx(1.0)


def test_weights_do_not_count_in_the_normaliser_and_masks_do(random_rollout):
    rollout = random_rollout(0, (3, 4))
    mask, weight = np.array([True, True, False, True]), np.array([1.0, 0.5, 1.0, 0.0], np.float32)
    taught = [(rollout, [term(rollout, mask, weight=weight, coef=2.0)])]
    assert num_trainable(taught) == (3, 1)
    scale = by_token(pack(taught), lambda batch: batch.terms[0].scale)
    assert scale == {0.0: pytest.approx(2 / 3), 1.0: pytest.approx(1 / 3)}  # rows of scale 0 are left out


def test_a_token_under_several_masks_counts_once(random_rollout):
    rollout = random_rollout(0, (3, 4))
    masks = [np.array(mask, bool) for mask in ([1, 1, 0, 0], [0, 1, 1, 0])]
    taught = [(rollout, [term(rollout, mask) for mask in masks])]
    assert num_trainable(taught) == (3, 1)
    (batch,) = pack(taught)
    assert len(batch.rows) == 3


def test_reused_tokens_are_context(random_rollout):
    rollout = random_rollout(0, (3, 5), num_reused=2)
    (batch,) = pack([(rollout, [term(rollout)])])
    assert batch.input_ids.shape == (1, 8)
    assert batch.token_ids.tolist() == rollout.turns[0].sampled_ids[2:].tolist()


SIZES = [(3, 2), (2, 4), (4, 0)]


def test_turns_that_continue_one_another_are_one_sequence(random_episode):
    rollout: Rollout = random_episode(0, 5, *SIZES)
    (batch,) = pack([(rollout, [term(rollout)])], 1)
    last = rollout.turns[-1]
    assert batch.input_ids.tolist() == [[*last.context_ids, *last.sampled_ids]]
    assert torch.equal(batch.input_ids[0, batch.rows + 1], batch.token_ids)
    assert batch.token_ids.tolist() == [token for turn in rollout.turns for token in turn.sampled_ids]
    assert batch.terms[0].inputs["reward"].tolist() == list(range(9))
    assert batch.sampler_logps.tolist() == np.concatenate([turn.sampler_logps for turn in rollout.turns]).tolist()
    assert batch.terms[0].scale.tolist() == pytest.approx([1 / 9] * 9)  # what was observed counts for nothing


@pytest.mark.parametrize("reused", [0, 1])
def test_a_conversation_rendered_anew_has_a_sequence_a_turn(random_episode, reused):
    rollout: Rollout = random_episode(0, 5, *SIZES, rerender=True, reused=reused)
    batches = pack([(rollout, [term(rollout)])], 1)
    assert [batch.input_ids.numel() for batch in batches] == sorted(
        (len(turn.context_ids) + len(turn.sampled_ids) for turn in rollout.turns[reused:]), reverse=True
    )
    rewards = sorted(reward for batch in batches for reward in batch.terms[0].inputs["reward"].tolist())
    assert rewards == list(range(3 * reused, 9))


@pytest.mark.parametrize("normalizer", ["token_mean", "sequence_mean"])
def test_reused_turns_are_context_whatever_a_mask_says(random_episode, normalizer):
    rollout: Rollout = random_episode(0, 5, *SIZES, reused=2)
    for mask in (rollout.trainable, np.ones(9, bool)):
        taught = [(rollout, [term(rollout, mask)])]
        assert num_trainable(taught) == (4, 1)
        (batch,) = pack(taught, normalizer=normalizer)
        assert batch.input_ids.shape == (1, 5 + 3 + 2 + 2 + 4 + 4)
        assert batch.rows.tolist() == [15, 16, 17, 18]
        assert batch.terms[0].scale.tolist() == pytest.approx([1 / 4] * 4)
    nothing: Rollout = random_episode(0, 5, *SIZES, reused=3)
    assert num_trainable([(nothing, [term(nothing, np.ones(9, bool))])]) == (0, 0)
    assert pack([(nothing, [term(nothing, np.ones(9, bool))])]) == []


def test_a_passage_without_a_token_that_counts_is_left_out(random_episode):
    rollout: Rollout = random_episode(0, 5, *SIZES, rerender=True)
    mask = np.array([0, 0, 0, 1, 0, 0, 0, 0, 0], bool)
    states = tuple(torch.full((size, 4), float(size)) for size in (3, 2, 4))
    masked = term(rollout, mask, inputs={"target": Hidden(states, "t")})
    (batch,) = pack([(rollout, [masked])])
    assert len(batch.input_ids) == 1
    assert batch.terms[0].inputs["target"].states[0].tolist() == [[2.0] * 4]


def test_a_unit_is_cut_where_its_beginning_is_reused(random_rollout):
    rollout: Rollout = random_rollout(0, (3, 5), num_reused=2)
    plain = term(rollout)
    units = replace(plain, inputs={**plain.inputs, "unit_starts": np.array([1, 0, 0, 1, 0], bool)})
    (batch,) = pack([(rollout, [units])])
    assert batch.unit_starts is not None
    assert batch.unit_starts.tolist() == [True, True, False]


def test_nothing_to_train(taught, random_rollout):
    masked = random_rollout(8, (5, 30))
    empty, partly = random_rollout(9, (5, 0)), random_rollout(7, (5, 0), (6, 2))
    nothing = [(masked, [term(masked, np.zeros(30, bool))]), (empty, [term(empty)]), (masked, [])]
    assert num_trainable(nothing) == (0, 0)
    assert pack(nothing) == []
    assert num_trainable(taught + nothing) == num_trainable(taught)
    for ours, theirs in zip(pack(taught + nothing, 40), pack(taught, 40), strict=True):
        assert torch.equal(ours.input_ids, theirs.input_ids)
    (batch,) = pack([(partly, [term(partly)])])
    assert batch.token_ids.tolist() == partly.turns[1].sampled_ids.tolist()


def test_targets_are_cut_to_their_turns(random_rollout):
    rollout = random_rollout(0, (3, 2), (20, 3))
    n = rollout.num_tokens
    target = TopK(np.arange(2 * n).reshape(n, 2), -np.ones((n, 2), np.float32), np.arange(n, dtype=np.float32))
    states = tuple(torch.full((size, 4), float(size)) for size in (2, 3))
    terms = [
        term(rollout),
        term(rollout, inputs={"target": target}),
        term(rollout, inputs={"target": Hidden(states, "t")}),
    ]
    second, first = pack([(rollout, terms)], 1)  # the longest first
    assert second.terms[1].inputs["target"].tail.tolist() == [2, 3, 4]
    assert second.terms[1].inputs["target"].ids.tolist() == [[4, 5], [6, 7], [8, 9]]
    assert second.terms[2].inputs["target"].states[0].tolist() == [[3.0] * 4] * 3
    assert first.terms[2].inputs["target"].states[0].tolist() == [[2.0] * 4] * 2
    (both,) = pack([(rollout, terms)])
    assert both.terms[1].inputs["target"].tail.tolist() == [2, 3, 4, 0, 1]
    part = select_rows(both, slice(1, 4))
    assert part.terms[2].inputs["target"].states[0][:, 0].tolist() == [3, 3, 2]
    assert part.terms[1].inputs["target"].ids.tolist() == [[6, 7], [8, 9], [0, 1]]
    assert part.terms[0].inputs["self_coef"] == 1.0


@pytest.mark.parametrize(
    "other",
    [
        {"kind": "policy_gradient", "inputs": {"reward": np.ones(3, np.float32), "by": 2.0}},
        {"kind": "divergence", "inputs": {"reward": np.ones(3, np.float32), "by": 1.0}},
        {"kind": "policy_gradient", "inputs": {"by": 1.0, "target": Hidden((torch.ones(3, 4),), "one")}},
        {"kind": "policy_gradient", "inputs": {"by": 1.0, "target": Hidden((torch.ones(3, 4),), "two")}},
    ],
    ids=["another scalar", "another kind", "a head", "another head"],
)
def test_rollouts_with_other_terms_get_micro_batches_of_their_own(random_rollout, other):
    one, two, three = random_rollout(0, (3, 3)), random_rollout(1, (4, 3)), random_rollout(2, (5, 3))
    plain = {"reward": np.ones(3, np.float32), "by": 1.0}
    taught = [(one, [term(one, inputs=plain)]), (two, [term(two, **other)]), (three, [term(three, inputs=plain)])]
    sizes = sorted(len(batch.input_ids) for batch in pack(taught))
    assert sizes == [1, 2]
    assert sum(float(batch.terms[0].scale.sum()) for batch in pack(taught)) == pytest.approx(1.0)
    further = [(one, [term(one, inputs=plain)]), (three, [term(three, inputs=plain)] * 2)]
    assert sorted(len(batch.terms) for batch in pack(further)) == [1, 2]


def test_a_batch_without_rows():
    batch = empty_batch(CPU)
    assert batch.input_ids.shape == (1, 1)
    assert len(batch.rows) == 0


def test_of_a_unit_all_rows_stay_or_none(random_rollout):
    rollout = random_rollout(0, (3, 6), (4, 3))
    mask = np.array([0, 0, 1, 0, 0, 0, 1, 0, 0], bool)
    starts = np.array([1, 0, 1, 0, 1, 1, 1, 1, 0], bool)
    units = term(rollout, mask)
    units = replace(units, inputs={**units.inputs, "unit_starts": starts})
    (batch,) = pack([(rollout, [units])])
    assert batch.terms[0].inputs["reward"].tolist() == [2.0, 3.0, 6.0]  # 3 is not trained, but counts in its unit's mean
    assert (batch.terms[0].scale > 0).tolist() == [True, False, True]
    other = term(rollout, np.array([0, 1, 0, 0, 0, 0, 0, 0, 0], bool))  # a term without units wants one row of one
    (batch,) = pack([(rollout, [units, other])])
    assert batch.terms[0].inputs["reward"].tolist() == [0.0, 1.0, 2.0, 3.0, 6.0]
    assert batch.unit_starts is not None
    assert batch.unit_starts.tolist() == [True, False, True, False, True]
