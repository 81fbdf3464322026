"""From the log-probs that an engine gives to the scores that a request wants: pure functions on arrays.

The engine's most likely tokens are over all rows of its output head, padding included; an entry that is not among the first
`vocab` ids is left out, and its mass is in the tail. Shape legend: n tokens asked about, m ids asked for each, e entries of
the engine, k of the model's own that are wanted, K = m + k.
"""

from collections.abc import Mapping

import numpy as np

from opd.records import Array, ScoreRequest, Scores
from opd.teachers.client.answers import without_repeats

PADDED_ROWS = 16  # further entries that are asked for where the head has padding, which might be among the first


def num_entries(request: ScoreRequest, *, vocab: int, rows: int, max_entries: int, exact: bool) -> int:
    """e for a request: to find ids by overlap, all there are."""
    if request.ids is not None and request.ids.size and not exact:
        return min(rows, max_entries)
    return min(rows, max_entries, request.k + (PADDED_ROWS if request.k and vocab < rows else 0))


def read_scores(answer: Mapping[str, Array], request: ScoreRequest, *, vocab: int, logp_floor: float) -> Scores:
    """Scores of `answer`: `logps` [n] of the tokens, `topk_ids` and `topk_logps` [n, e], `chosen_logps` [n, m] where the
    engine scored the ids asked for.

    Raises `ValueError` for a log-prob that is not a number.
    """
    if any(np.isnan(array).any() for name, array in answer.items() if name != "topk_ids"):
        raise ValueError("vLLM's log-probs are not numbers: the model overflows in this type; serve it with another --dtype")
    logps, num_floored = _floored(answer["logps"], np.ones(len(answer["logps"]), bool), logp_floor)
    num_asked = 0 if request.ids is None else request.ids.shape[1]
    if not num_asked + request.k:
        return Scores(logps, num_floored=num_floored)
    own_ids, own_logps = first_entries(answer["topk_ids"], answer["topk_logps"], min(request.k, vocab), vocab)
    asked_ids = own_ids[:, :0] if request.ids is None else without_repeats(request.ids)
    asked_logps = answer.get("chosen_logps")
    if asked_logps is None:
        asked_ids, asked_logps = _overlap(asked_ids, request.token_ids, answer, vocab)
    own_ids = np.where((own_ids[:, :, None] == asked_ids[:, None, :]).any(2), -1, own_ids)
    ids = np.concatenate([asked_ids, own_ids], axis=1).astype(np.int32)
    found = np.concatenate([asked_logps, own_logps], axis=1)
    present = ids >= 0
    tail = 1.0 - np.exp(np.where(present, found, -np.inf), dtype=np.float64).sum(1)
    topk_logps, num_raised = _floored(found, present, logp_floor)
    return Scores(logps, ids, topk_logps, tail.clip(min=0.0).astype(np.float32), num_floored=num_floored + num_raised)


def first_entries(ids: Array, logps: Array, k: int, vocab: int) -> tuple[Array, Array]:
    """The first k entries of each row that are below `vocab` [n, k]; ids are -1 where there are too few."""
    kept = ids < vocab
    order = np.argsort(~kept, axis=1, kind="stable")[:, :k]
    own = np.where(np.take_along_axis(kept, order, axis=1), np.take_along_axis(ids, order, axis=1), -1)
    own_logps = np.take_along_axis(logps, order, axis=1)
    missing = k - own.shape[1]
    return np.pad(own, ((0, 0), (0, missing)), constant_values=-1), np.pad(own_logps, ((0, 0), (0, missing)))


def _overlap(asked: Array, token_ids: Array, answer: Mapping[str, Array], vocab: int) -> tuple[Array, Array]:
    """The ids asked for [n, m] that are the token itself or among the entries, others -1, and their log-probs."""
    entries = np.concatenate([token_ids[:, None], answer["topk_ids"]], axis=1)
    logps = np.concatenate([answer["logps"][:, None], answer["topk_logps"]], axis=1)
    ids, found = np.full(asked.shape, -1, np.int32), np.zeros(asked.shape, np.float32)
    for column in range(asked.shape[1]):  # [n, 1 + e] at a time
        same = entries == asked[:, column, None]
        at = same.argmax(1)[:, None]
        here = np.take_along_axis(same, at, axis=1)[:, 0] & (asked[:, column] >= 0)
        ids[here, column] = asked[here, column]
        found[here, column] = np.take_along_axis(logps, at, axis=1)[here, 0]
    return ids, found


def _floored(logps: Array, present: Array, floor: float) -> tuple[Array, int]:
    """(float32, 0 where nothing is present; how many were raised)."""
    raised = np.maximum(logps, np.float32(floor))
    num_raised = int(((raised != logps) & present).sum())
    # a log-softmax may exceed 0 by rounding
    return np.where(present, np.minimum(raised, 0.0), 0.0).astype(np.float32), num_raised
