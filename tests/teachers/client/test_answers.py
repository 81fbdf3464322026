"""Answers that fit their question pass; every single thing that is wrong with one is found."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from opd.kernels.head import OutputHead
from opd.records import SampleRequest, Sampling, ScoreRequest, Scores, Turn
from opd.teachers.abilities import Abilities
from opd.teachers.client.answers import BadAnswer, check_scores, check_turn, without_repeats
from opd.teachers.scoring import mark_repeats, read_states

V, H, FLOOR, HEAD = 50, 8, -6.0, "head-1"


@pytest.fixture(scope="module")
def answer():
    """`answer(request)`: what a model with random states and head says."""

    def build(request: ScoreRequest) -> Scores:
        rng = torch.Generator().manual_seed(0)
        n = len(request.token_ids)
        states = torch.randn(n, H, generator=rng)
        if request.hidden:
            return Scores(hidden=states, head=HEAD)
        head = OutputHead(3 * torch.randn(V + 3, H, generator=rng))
        asked = torch.zeros(n, 0).long() if request.ids is None else torch.from_numpy(request.ids).long()
        tokens = torch.from_numpy(request.token_ids).long()
        reading = read_states(
            states, head, tokens, asked, k=request.k, vocab=V, temperature=1.0, logp_floor=FLOOR, chunk_bytes=2000
        )
        logps, ids, topk_logps, tail, num_floored = (part.numpy() for part in reading)
        if not ids.shape[1]:
            return Scores(logps, num_floored=int(num_floored.sum()))
        return Scores(logps, ids.astype(np.int32), topk_logps, tail, num_floored=int(num_floored.sum()))

    return build


def question(n: int = 7, **wanted) -> ScoreRequest:
    rng = np.random.default_rng(1)
    if "ids" in wanted:
        wanted["ids"] = rng.integers(-1, V, (n, wanted["ids"])).astype(np.int32)
    return ScoreRequest(np.arange(4, dtype=np.int32), rng.integers(0, V, n).astype(np.int32), **wanted)


def check(scores: Scores, request: ScoreRequest, **options) -> None:
    check_scores(scores, request, **{"vocab": V, "logp_floor": FLOOR, "head": HEAD, **options})


@pytest.mark.parametrize("n", [0, 1, 7, 200])
@pytest.mark.parametrize(
    "wanted", [{}, {"k": 1}, {"k": 9}, {"k": V}, {"k": 10**6}, {"ids": 12}, {"ids": 40, "k": 9}, {"ids": V, "k": V}]
)
def test_right_answers(answer, n, wanted):
    request = question(n, **wanted)
    scores = answer(request)
    check(scores, request)
    if n == 200 and wanted:
        assert scores.num_floored > 0


def test_right_hidden_states(answer):
    request = question(hidden=True)
    check(answer(request), request)
    check(answer(request), request, hidden_size=H)
    half = answer(request).hidden.bfloat16()
    check(Scores(hidden=half, head=HEAD), request)


def changed(array, place, value):
    array = array.copy() if isinstance(array, np.ndarray) else array.clone()
    array[place] = value
    return array


WRONG = {
    "a missing row": lambda s: {"logps": s.logps[1:]},
    "nan": lambda s: {"logps": changed(s.logps, 2, np.nan)},
    "minus infinity": lambda s: {"logps": changed(s.logps, 2, -np.inf)},
    "a positive log-prob": lambda s: {"logps": changed(s.logps, 2, 0.01)},
    "below the floor": lambda s: {"logps": changed(s.logps, 2, FLOOR - 0.01)},
    "too many floored": lambda s: {"num_floored": 10**6},
    "no top-k": lambda s: {"topk_ids": None, "topk_logps": None, "tail": None},
    "no log-probs": lambda s: {
        "logps": None,
        "topk_ids": None,
        "topk_logps": None,
        "tail": None,
        "hidden": torch.ones(7, H),
    },
    "a column less": lambda s: {"topk_ids": s.topk_ids[:, 1:], "topk_logps": s.topk_logps[:, 1:]},
    "an id beyond the vocabulary": lambda s: {"topk_ids": changed(s.topk_ids, (1, 11), V)},
    "an id below -1": lambda s: {"topk_ids": changed(s.topk_ids, (1, 11), -2)},
    "another id than asked": lambda s: {"topk_ids": changed(s.topk_ids, (1, 0), (s.topk_ids[1, 0] + 1) % V)},
    "an asked id left out": lambda s: {"topk_ids": changed(s.topk_ids, (1, 0), -1)},
    "an own id twice": lambda s: {"topk_ids": changed(s.topk_ids, (1, 11), s.topk_ids[1, 12])},
    "own ids left out": lambda s: {"topk_ids": changed(s.topk_ids, (1, slice(5, None)), -1)},
    "nan in the top-k": lambda s: {"topk_logps": changed(s.topk_logps, (1, 11), np.nan)},
    "nan where there is no id": lambda s: {"topk_logps": np.where(s.topk_ids < 0, np.nan, s.topk_logps)},
    "infinity where there is no id": lambda s: {"topk_logps": np.where(s.topk_ids < 0, np.inf, s.topk_logps)},
    "a positive log-prob in the top-k": lambda s: {"topk_logps": changed(s.topk_logps, (1, 11), 0.5)},
    "a negative tail": lambda s: {"tail": changed(s.tail, 3, -0.1)},
    "a tail above 1": lambda s: {"tail": changed(s.tail, 3, 1.1)},
    "no number as tail": lambda s: {"tail": changed(s.tail, 3, np.nan)},
    "a tail too short": lambda s: {"tail": s.tail[1:]},
    "too much mass": lambda s: {"tail": np.minimum(s.tail + 0.5, 1.0)},
    "rows shifted by one": lambda s: {"topk_logps": np.roll(s.topk_logps, 1, axis=1)},
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_answers(answer, what):
    request = replace(question(k=12), ids=np.arange(35, dtype=np.int32).reshape(7, 5))
    scores = answer(request)
    check(scores, request)
    assert (scores.topk_ids < 0).any()
    with pytest.raises(BadAnswer) as info:
        check(replace(scores, **WRONG[what](scores)), request)
    assert "\n" not in str(info.value)


def test_random_bytes_are_refused_or_harmless(answer):
    """Nothing but `BadAnswer` comes of an answer whose numbers are anything, and what passes is in range."""
    request = question(20, ids=5, k=9)
    scores, rng, num_passed = answer(request), np.random.default_rng(0), 0
    names = ("logps", "topk_ids", "topk_logps", "tail")
    for _ in range(3000):
        name = names[rng.integers(4)]
        array = getattr(scores, name).copy()
        array.view(np.uint8).reshape(-1)[rng.integers(array.nbytes)] = rng.integers(256)
        found = replace(scores, **{name: array})
        try:
            check(found, request)
        except BadAnswer:
            continue
        num_passed += 1
        assert all(np.isfinite(getattr(found, name)).all() for name in names)
        assert found.logps.max() <= 1e-3
        assert (found.topk_ids < V).all()
    assert 0 < num_passed < 1500


def test_a_top_k_nobody_asked_for(answer):
    with pytest.raises(BadAnswer, match="0 a token were asked for"):
        check(answer(question(k=3)), question())


@pytest.mark.parametrize(
    ("change", "options"),
    [
        ({"head": "other"}, {}),
        ({"hidden": torch.ones(6, H)}, {}),
        ({"hidden": torch.ones(7)}, {}),
        ({"hidden": torch.full((7, H), torch.inf)}, {}),
        ({"hidden": changed(torch.ones(7, H), (3, 3), torch.nan)}, {}),
        ({"hidden": None, "logps": np.zeros(7, np.float32)}, {}),
        ({}, {"hidden_size": H + 1}),
    ],
)
def test_wrong_hidden_states(answer, change, options):
    request = question(hidden=True)
    with pytest.raises(BadAnswer):
        check(replace(answer(request), **change), request, **options)


def test_repeats_are_marked_as_the_model_marks_them():
    rng = np.random.default_rng(0)
    for shape in ((0, 3), (5, 1), (40, 9), (3, 0)):
        ids = rng.integers(-1, 6, shape).astype(np.int32)
        expected = mark_repeats(torch.from_numpy(ids)).numpy() if shape[1] else ids
        np.testing.assert_array_equal(without_repeats(ids), expected)


def turn(**changes) -> Turn:
    ids, logps = np.array([4, 2], np.int32), np.array([-0.1, -2.3], np.float32)
    topk = np.array([[4, 7, 9], [1, 2, 3]], np.int32), np.full((2, 3), -1.5, np.float32)
    return replace(Turn(np.arange(3, dtype=np.int32), ids, logps, "eos", *topk), **changes)


REQUEST = SampleRequest(np.arange(3, dtype=np.int32), 7, 4, Sampling(num_topk=3))


def test_a_right_turn():
    check_turn(turn(), REQUEST, V)
    check_turn(turn(topk_ids=None, topk_logps=None), replace(REQUEST, sampling=Sampling()), V)


@pytest.mark.parametrize(
    "changes",
    [
        {"sampled_ids": np.zeros(0, np.int32), "sampler_logps": np.zeros(0, np.float32)},
        {"sampled_ids": np.zeros(5, np.int32), "sampler_logps": np.zeros(5, np.float32)},
        {"sampled_ids": np.array([4, V], np.int32)},
        {"sampler_logps": np.array([-0.1, np.nan], np.float32)},
        {"sampler_logps": np.array([-0.1, -np.inf], np.float32)},
        {"sampler_logps": np.array([-0.1, 0.1], np.float32)},
        {"num_reused": 1},
        {"topk_ids": None, "topk_logps": None},
        {"topk_ids": np.zeros((2, 2), np.int32)},
        {"topk_ids": np.full((2, 3), V, np.int32)},
        {"topk_logps": np.full((2, 3), np.nan, np.float32)},
    ],
)
def test_wrong_turns(changes):
    with pytest.raises(BadAnswer):
        check_turn(turn(**changes), REQUEST, V)


def test_most_likely_tokens_nobody_asked_for():
    with pytest.raises(BadAnswer):
        check_turn(turn(), replace(REQUEST, sampling=Sampling()), V)


@pytest.mark.parametrize(
    ("wanted", "forgiving"),
    [({"ids": 3}, [Abilities(ids="overlap", max_k=8)]), ({"k": 3}, [Abilities(max_k=8), Abilities(ids="overlap", max_k=8)])],
)
def test_what_may_be_missing_depends_on_the_server(answer, wanted, forgiving):
    request = question(**wanted)
    if request.ids is not None:
        request.ids[:] = 1, 2, 3
    scores = answer(request)
    assert scores.topk_ids is not None
    assert scores.topk_logps is not None
    assert scores.tail is not None
    scores.topk_ids[2, 1] = -1
    scores.tail[2] += np.exp(scores.topk_logps[2, 1])
    for abilities in (Abilities(), Abilities(max_k=8), Abilities(ids="overlap", max_k=8)):
        if abilities in forgiving:
            check(scores, request, abilities=abilities)
        else:
            with pytest.raises(BadAnswer, match=r"other ids|are missing"):
                check(scores, request, abilities=abilities)
    scores.topk_ids[2, 1] = scores.topk_ids[2, 0]
    with pytest.raises(BadAnswer, match=r"other ids|twice"):
        check(scores, request, abilities=forgiving[-1])
