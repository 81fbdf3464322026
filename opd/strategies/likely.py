"""The student's own most likely tokens, and the question to a teacher about them."""

from collections.abc import Sequence

import numpy as np

from opd.records import Array, Rollout


def likely_ids(rollout: Rollout, k: int) -> Array:
    """[n, k] int32: the student's k most likely tokens at each sampled token, or fewer where its vocabulary has no more.

    0 in turns that are reused as a whole, of which nobody asked for them.
    """
    return _of_turns([turn.topk_ids if turn.trainable.any() else None for turn in rollout.turns], rollout, k)


def likely_logps(rollout: Rollout, k: int) -> Array:
    """[n, k] float32: the student's log-probs of `likely_ids`, at the sampling temperature; 0 in the same turns."""
    return _of_turns([turn.topk_logps if turn.trainable.any() else None for turn in rollout.turns], rollout, k)


def _of_turns(found: Sequence[Array | None], rollout: Rollout, k: int) -> Array:
    """The first k columns of what each turn has, one below the other."""
    known = [part for part, turn in zip(found, rollout.turns) if turn.trainable.any()]
    assert all(part is not None for part in known), "the sampler was not asked for them"
    width = min([k, *(part.shape[1] for part in known if part is not None)])
    dtype = next((part.dtype for part in known if part is not None), np.int32)
    parts = [
        np.zeros((len(turn.sampled_ids), width), dtype) if part is None else part[:, :width]
        for part, turn in zip(found, rollout.turns)
    ]
    return np.concatenate(parts)


def ids_to_ask(token_ids: Array, at: Array, wanted: Array) -> Array:
    """[m, k] int32 for `ScoreRequest.ids` of m tokens: `wanted` [p, k] at the places `at` [p].

    Elsewhere, and where an id is negative, the token itself, whose log-prob the answer has anyway.
    """
    asked = np.repeat(token_ids[:, None], wanted.shape[1], axis=1)
    asked[at] = np.where(wanted >= 0, wanted, asked[at])
    return asked.astype(np.int32)
