"""A rollout as the sequences that models read.

Where each turn's context continues the turn before, all turns are one passage: scored and trained at the cost of one
sequence. Where the conversation was rendered anew (`context: rerender`), each turn is one of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from opd.records import Array, Rollout, Turn


@dataclass(frozen=True, eq=False)
class Passage:
    """The longest run of turns that are one sequence, from its first trainable token on.

    s trainable tokens, n sampled tokens of the whole rollout (reused ones included), m tokens from the first trainable one.
    """

    context_ids: Array  # [c] int32: all that comes before the first trainable token
    token_ids: Array  # [m] int32: the rest, trainable tokens and what stands between turns
    at: Array  # [s] int64: places of the trainable tokens in `token_ids`, ascending
    rows: Array  # [s] int64: their places among the rollout's sampled tokens, ascending


def passages(rollout: Rollout) -> tuple[Passage, ...]:
    """The passages that hold a trainable token, in order. Each trainable token is in exactly one."""
    found: list[Passage] = []
    run: list[Turn] = []
    start = 0  # of the run, among the rollout's sampled tokens
    for turn in rollout.turns:
        if run and not _continues(run[-1], turn):
            found += _passage(run, start)
            start += sum(len(one.sampled_ids) for one in run)
            run = []
        run.append(turn)
    return (*found, *_passage(run, start))


def spread(rollout: Rollout, values: Sequence[Array | None]) -> Array:
    """[n, ...]: what each passage has for its trainable tokens [s, ...], put at their places; 0 for reused tokens."""
    found = passages(rollout)
    parts = [part for part in values if part is not None]
    assert len(parts) == len(found)
    if not parts:
        return np.zeros(rollout.num_tokens, np.float32)
    whole = np.zeros((rollout.num_tokens, *parts[0].shape[1:]), parts[0].dtype)
    for passage, part in zip(found, parts):
        whole[passage.rows] = part
    return whole


def _continues(before: Turn, turn: Turn) -> bool:
    """Whether `turn` was sampled after exactly what `before` read and wrote."""
    read, written = len(before.context_ids), len(before.sampled_ids)
    return (
        len(turn.context_ids) >= read + written
        and np.array_equal(turn.context_ids[:read], before.context_ids)
        and np.array_equal(turn.context_ids[read : read + written], before.sampled_ids)
    )


def _passage(run: Sequence[Turn], start: int) -> list[Passage]:
    if not any(turn.trainable.any() for turn in run):
        return []
    ids = np.concatenate([run[-1].context_ids, run[-1].sampled_ids])
    places, rows = [], []
    for turn in run:
        new = np.arange(turn.num_reused, len(turn.sampled_ids))
        places.append(len(turn.context_ids) + new)
        rows.append(start + new)
        start += len(turn.sampled_ids)
    at, first = np.concatenate(places), int(np.concatenate(places)[0])
    return [Passage(ids[:first], ids[first:], at - first, np.concatenate(rows))]
