"""The student's own most likely tokens, and the question to a teacher about them."""

import numpy as np

from opd.records import Array, Rollout


def likely_ids(rollout: Rollout, k: int) -> Array:
    """[n, k] int32: the student's k most likely tokens at each sampled token, or fewer where its vocabulary has no more.

    0 in turns that are reused as a whole, of which nobody asked for them.
    """
    new = [turn for turn in rollout.turns if turn.trainable.any()]
    assert all(turn.topk_ids is not None for turn in new), "the sampler was not asked for them"
    width = min([k, *(turn.topk_ids.shape[1] for turn in new if turn.topk_ids is not None)])
    parts = [
        np.zeros((len(turn.sampled_ids), width), np.int32)
        if turn.topk_ids is None or not turn.trainable.any()
        else turn.topk_ids[:, :width]
        for turn in rollout.turns
    ]
    return np.concatenate(parts)


def ids_to_ask(token_ids: Array, at: Array, wanted: Array) -> Array:
    """[m, k] int32 for `ScoreRequest.ids` of m tokens: `wanted` [p, k] at the places `at` [p].

    Elsewhere, and where an id is negative, the token itself, whose log-prob the answer has anyway.
    """
    asked = np.repeat(token_ids[:, None], wanted.shape[1], axis=1)
    asked[at] = np.where(wanted >= 0, wanted, asked[at])
    return asked.astype(np.int32)
