"""What the engine says becomes what the wire says: exact, or by overlap, with padded rows left out."""

import numpy as np
import pytest

from opd.records import ScoreRequest
from opd.teachers.abilities import Abilities
from opd.teachers.client.answers import check_scores
from opd.teachers.vllm.reading import PADDED_ROWS, num_entries, read_scores

V, R, N, FLOOR = 20, 23, 6, -6.0


@pytest.fixture(scope="module")
def rows():
    """[n, R] log-probs; in the first row a padded id is the most likely."""
    logits = 3.0 * np.random.default_rng(0).standard_normal((N, R))
    logits[0, V + 1] = 12.0
    return (logits - np.log(np.exp(logits).sum(1, keepdims=True))).astype(np.float32)


def answer(rows, request, entries, exact=False):
    order = np.argsort(-rows, axis=1)[:, :entries]
    said = {"logps": np.take_along_axis(rows, request.token_ids[:, None], 1)[:, 0]}
    said |= {"topk_ids": order.astype(np.int32), "topk_logps": np.take_along_axis(rows, order, 1)}
    return said | ({"chosen_logps": np.take_along_axis(rows, request.ids, 1)} if exact else {})


def question(seed=0, m=0, **wanted):
    rng = np.random.default_rng(seed)
    if m:
        wanted["ids"] = rng.integers(0, V, (N, m)).astype(np.int32)
    return ScoreRequest(np.arange(3, dtype=np.int32), rng.integers(0, V, N).astype(np.int32), **wanted)


def check(scores, request, ids):
    abilities = Abilities(False, False, ids, 16)
    check_scores(scores, request, vocab=V, logp_floor=FLOOR, head="none", abilities=abilities)


def test_tokens_alone(rows):
    request = question()
    scores = read_scores(answer(rows, request, 0), request, vocab=V, logp_floor=FLOOR)
    expected = rows[np.arange(N), request.token_ids]
    np.testing.assert_array_equal(scores.logps, np.maximum(expected, FLOOR))
    assert scores.num_floored == (expected < FLOOR).sum() > 0
    assert scores.topk_ids is None
    check(scores, request, "exact")


def test_its_own_most_likely_without_padded_rows(rows):
    request = question(k=4)
    scores = read_scores(answer(rows, request, 8), request, vocab=V, logp_floor=FLOOR)
    np.testing.assert_array_equal(scores.topk_ids, np.argsort(-rows[:, :V], axis=1)[:, :4])
    assert scores.tail is not None
    assert scores.tail[0] > 0.9  # what a padded row has is outside
    np.testing.assert_allclose(scores.tail, 1 - np.exp(np.sort(rows[:, :V])[:, -4:].astype(np.float64)).sum(1), atol=1e-6)
    check(scores, request, "exact")


def test_too_few_entries_leave_the_last_absent(rows):
    request = question(k=4)
    scores = read_scores(answer(rows, request, 4), request, vocab=V, logp_floor=FLOOR)
    assert scores.topk_ids is not None
    assert scores.topk_logps is not None
    assert scores.topk_ids[0, 3] == -1
    assert scores.topk_logps[0, 3] == 0.0
    check(scores, request, "exact")


def test_chosen_ids_that_the_engine_scored(rows):
    request = question(m=5, k=3)
    assert request.ids is not None
    request.ids[1, 3] = request.ids[1, 0]  # a repeat
    scores = read_scores(answer(rows, request, 3 + 3, exact=True), request, vocab=V, logp_floor=FLOOR)
    check(scores, request, "exact")
    assert scores.topk_ids is not None
    assert scores.topk_logps is not None
    assert scores.topk_ids[1, 3] == -1
    present = scores.topk_ids[:, :5] >= 0
    expected = np.maximum(np.take_along_axis(rows, request.ids, 1), FLOOR)
    np.testing.assert_array_equal(scores.topk_logps[:, :5][present], expected[present])


def test_chosen_ids_by_overlap(rows):
    request = question(m=6, k=2)
    assert request.ids is not None
    request.ids[:, 2] = request.token_ids  # the token itself is known, however unlikely
    entries = 5
    scores = read_scores(answer(rows, request, entries), request, vocab=V, logp_floor=FLOOR)
    check(scores, request, "overlap")
    assert scores.topk_ids is not None
    assert scores.tail is not None
    likely = np.argsort(-rows, axis=1)[:, :entries]
    known = (request.ids[:, :, None] == np.concatenate([request.token_ids[:, None], likely], 1)[:, None, :]).any(2)
    first = np.array([[column == list(row).index(value) for column, value in enumerate(row)] for row in request.ids])
    np.testing.assert_array_equal(scores.topk_ids[:, :6] >= 0, known & first)
    assert not known.all()
    present = scores.topk_ids >= 0
    mass = (np.exp(np.take_along_axis(rows, scores.topk_ids.clip(min=0), 1).astype(np.float64)) * present).sum(1)
    np.testing.assert_allclose(scores.tail, 1 - mass, atol=1e-6)  # the absent ones' mass is in it


def test_how_many_entries_are_asked_for():
    limits = {"vocab": V, "rows": 100, "max_entries": 50}
    assert num_entries(question(), **limits, exact=False) == 0
    assert num_entries(question(k=4), **limits, exact=False) == 4 + PADDED_ROWS
    assert num_entries(question(k=4), **limits | {"rows": V}, exact=False) == 4
    assert num_entries(question(m=2, k=4), **limits, exact=False) == 50
    assert num_entries(question(m=2), **limits | {"rows": 30}, exact=False) == 30
    assert num_entries(question(m=2), **limits, exact=True) == 0


def test_what_is_no_number_is_refused(rows):
    request = question(k=2)
    with pytest.raises(ValueError, match="serve it with another --dtype"):
        read_scores(answer(rows * np.nan, request, 2), request, vocab=V, logp_floor=FLOOR)
