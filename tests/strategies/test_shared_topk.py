"""The top-k reverse KL over tokens of the same bytes, at places where one token stands beside one token."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from opd.config import RunConfig
from opd.errors import UserError
from opd.records import Prompt, TopK
from opd.strategies.shared_topk import SharedTopK, SharedTopKConfig

V_STUDENT, V_TEACHER = 12, 130
TOPK = np.array([[3, 5, 8], [5, 3, 9], [1, 2, 3], [8, 9, 5], [9, 5, 3]], np.int32)
COUNTERPARTS = np.full(V_STUDENT, -1, np.int32)
COUNTERPARTS[[1, 3, 5, 8, 10, 11]] = [90, 100, 101, 4, 105, 80]  # 2 and 9 have none; the teacher wrote 100, 101, ...
UNITS = [[(1, 1, True), (1, 1, True), (1, 2, True), (1, 1, False), (1, 1, True)]]


@pytest.fixture
def whole():
    logits = np.random.default_rng(0).normal(size=V_TEACHER)
    return logits - np.log(np.exp(logits).sum())


@pytest.fixture
def rollout(random_rollout):
    plain = random_rollout(0, (3, 5))
    ids = np.array([3, 5, 0, 0, 10], np.int32)
    turn = replace(plain.turns[0], sampled_ids=ids, topk_ids=TOPK, topk_logps=np.zeros(TOPK.shape, np.float32))
    return replace(plain, prompt=Prompt(id="0", domain="maths"), turns=(turn,))


def collect(rollout, models, **settings):
    (term,) = asyncio.run(SharedTopK(SharedTopKConfig(k=3, **settings), RunConfig()).collect(rollout, models))
    return term


def test_tokens_of_the_same_bytes_are_compared_where_both_stand_alone(rollout, given_models, whole):
    models = given_models({"maths": [[0.0] * 6]}, {"maths": UNITS}, COUNTERPARTS, whole)
    term = collect(rollout, models, coef=0.5)
    assert (term.kind, term.coef) == ("divergence", 0.5)
    assert (term.inputs["divergence"], term.inputs["tail"]) == ("reverse_kl", "tail")
    assert term.mask.tolist() == [True, True, False, False, True]
    target = term.inputs["target"]
    assert isinstance(target, TopK)
    assert target.unknown is not None
    theirs_alone = [token for token in np.argsort(-whole)[:3] if token not in COUNTERPARTS]
    assert theirs_alone
    given_known = whole - np.log1p(-np.exp(whole[theirs_alone]).sum())
    for place, row in enumerate(TOPK.tolist()):
        known = {token: COUNTERPARTS[token] for token in row if COUNTERPARTS[token] >= 0} if term.mask[place] else {}
        entries = zip(target.ids[place].tolist(), target.logps[place].tolist(), target.unknown[place].tolist())
        found = {token: logp for token, logp, unknown in entries if token >= 0 and not unknown}
        assert found == pytest.approx({token: given_known[theirs] for token, theirs in known.items()}, rel=1e-6)
        mass = sum(np.exp(given_known[theirs]) for theirs in known.values())
        assert target.tail[place] == pytest.approx(1 - mass, abs=1e-6)
        left_out = target.ids[place][target.unknown[place]].tolist()
        assert sorted(left_out) == sorted(set(row) - set(known) if term.mask[place] else [])


def test_the_same_tokenizer_is_compared_everywhere(rollout, given_models, whole):
    models = given_models({"maths": [[0.0] * 5]}, None, None, whole)
    term = collect(rollout, models)
    assert term.mask.all()
    target = term.inputs["target"]
    assert (target.ids == TOPK).all()
    np.testing.assert_allclose(target.logps, whole[TOPK], rtol=1e-6)
    assert not target.unknown.any()
    (asked,) = [request for _, request in models.requests]
    assert asked.token_ids.tolist() == rollout.turns[0].sampled_ids.tolist()
    assert asked.k == 0


def test_two_tokens_with_one_counterpart_count_once(rollout, given_models, whole):
    both = COUNTERPARTS.copy()
    both[5] = both[3]
    target = collect(rollout, given_models({"maths": [[0.0] * 6]}, {"maths": UNITS}, both, whole)).inputs["target"]
    assert target.ids[0].tolist() == [3, -1, 8]
    assert not target.unknown[0].any()
    mass = np.exp(target.logps[0, [0, 2]].astype(float)).sum()
    assert target.tail[0] == pytest.approx(1 - mass, abs=1e-6)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"k": 0}, "terms.shared_topk.k is 0"),
        ({"k": 1, "tail": "renormalise"}, "take k >= 2"),
        ({"coef": float("inf")}, "terms.shared_topk.coef"),
    ],
)
def test_refusals(settings, said):
    with pytest.raises(UserError, match=said):
        SharedTopK.check(SharedTopKConfig(**settings), RunConfig())


def test_a_token_that_is_aligned_with_another_than_elsewhere_is_no_place(rollout, given_models, whole):
    """A first token of which a tokenizer dropped the space: what it is compared with there is not what `same_bytes` says."""
    turn = replace(rollout.turns[0], sampled_ids=np.array([8, 5, 0, 0, 10], np.int32))
    models = given_models({"maths": [[0.0] * 6]}, {"maths": UNITS}, COUNTERPARTS, whole)
    assert collect(replace(rollout, turns=(turn,)), models).mask.tolist() == [False, True, False, False, True]


def test_nothing_to_compare(rollout, given_models, whole):
    models = given_models({"maths": [[0.0] * 6]}, {"maths": [[(5, 6, True)]]}, COUNTERPARTS, whole)
    term = collect(rollout, models)
    assert not term.mask.any()
    assert (term.inputs["target"].ids == -1).all()
    assert models.requests == []


def test_another_terms_larger_k_is_not_its_own(rollout, given_models, whole):
    models = [given_models({"maths": [[0.0] * 6]}, {"maths": UNITS}, COUNTERPARTS, whole) for _ in range(2)]
    wide = replace(rollout.turns[0], topk_ids=np.concatenate([TOPK, TOPK[:, ::-1]], axis=1))
    for one, other in zip(
        vars(collect(rollout, models[0]).inputs["target"]).values(),
        vars(collect(replace(rollout, turns=(wide,)), models[1]).inputs["target"]).values(),
    ):
        np.testing.assert_array_equal(one, other)


def test_an_episode_of_the_same_tokenizer_is_asked_about_once(random_episode, given_models, whole):
    rollout = replace(random_episode(0, 3, (2, 1), (2, 3), (3, 0), reused=1), prompt=Prompt(id="0", domain="maths"))
    first, *turns = rollout.turns
    turns = [replace(turn, topk_ids=TOPK[: len(turn.sampled_ids)]) for turn in turns]
    models = given_models({"maths": [[0.0] * 8]}, None, None, whole)
    term = collect(replace(rollout, turns=(first, *turns)), models)
    ((_, request),) = models.requests
    assert request.context_ids.tolist() == turns[0].context_ids.tolist()
    assert term.mask.tolist() == [False, False, True, True, True, True, True]
    target = term.inputs["target"]
    assert target.ids.tolist() == [[-1] * 3] * 2 + TOPK[:2].tolist() + TOPK[:3].tolist()
    np.testing.assert_allclose(target.logps[2:], whole[target.ids[2:]], rtol=1e-6)
    assert target.tail[:2].tolist() == [1.0, 1.0]


def test_another_tokenizer_is_asked_turn_by_turn_and_never_about_reused_tokens(rollout, given_models, whole):
    (turn,) = rollout.turns
    old, partly = replace(turn, num_reused=5, topk_ids=None), replace(turn, num_reused=1)
    models = given_models({"maths": [[0.0] * 6]}, {"maths": UNITS * 2}, COUNTERPARTS, whole)
    alone = collect(rollout, given_models({"maths": [[0.0] * 6]}, {"maths": UNITS}, COUNTERPARTS, whole))
    term = collect(replace(rollout, turns=(old, partly, turn)), models)
    assert len(models.requests) == 2
    assert term.mask.tolist() == [False] * 5 + [False, True, False, False, True] + alone.mask.tolist()
    for name in ("ids", "logps", "tail", "unknown"):
        found, expected = (getattr(one.inputs["target"], name) for one in (term, alone))
        np.testing.assert_array_equal(found[10:], expected)
        np.testing.assert_array_equal(found[6:10], expected[1:])
