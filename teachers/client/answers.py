"""Is an answer one to the question that was asked? Checked before anything of it is used, however it came.

Pure functions on records. Shape legend: n tokens asked about, m ids asked for each, k of the model's own, H hidden size.
"""

import math
from collections.abc import Collection

import numpy as np
import torch

from opd.records import Array, Chunk, SampleRequest, ScoreRequest, Scores, Turn
from opd.teachers.abilities import Abilities

LOGP_SLACK = 1e-3  # a log-softmax in float32 may exceed 0 by rounding
MASS_SLACK = 1e-2  # what the probabilities of a row may miss 1 by: many roundings, never another distribution


EVERYTHING = Abilities()


class BadAnswer(ValueError):
    """An answer that does not fit its question. The message is one line."""


def check_scores(
    scores: Scores,
    request: ScoreRequest,
    *,
    vocab: int,
    logp_floor: float,
    head: str,
    hidden_size: int | None = None,
    abilities: Abilities = EVERYTHING,
) -> None:
    """Raises `BadAnswer` unless `scores` answers `request`, asked about the first `vocab` ids and with this floor.

    `head` is the id of the only head whose states are of use; `hidden_size` its H, where it is known. What may be missing of
    a row depends on the server's abilities.
    """
    n = len(request.token_ids)
    num_asked = 0 if request.ids is None else request.ids.shape[1]
    width = num_asked + min(request.k, vocab)
    if request.hidden:
        _check_hidden(scores, n, head, hidden_size)
        return
    if scores.hidden is not None or scores.logps is None:
        raise BadAnswer("hidden states, but log-probs were asked for")
    if (scores.topk_ids is not None) != bool(width):
        raise BadAnswer(f"{'no ' if width else ''}log-probs of further ids, but {width} a token were asked for")
    _check_logps("logps", scores.logps, (n,), logp_floor)
    if scores.num_floored > n * (1 + width):
        raise BadAnswer(f"num_floored: {scores.num_floored} of {n * (1 + width)} log-probs")
    if scores.topk_ids is not None:
        _check_topk(scores, request, (n, width), vocab, logp_floor, abilities)


def check_turn(turn: Turn, request: SampleRequest, vocab: int) -> None:
    """Raises `BadAnswer` unless `turn` is what `request` may lead to at a model that samples the first `vocab` ids."""
    _check_sampled(turn, request, request.max_new_tokens, vocab)
    if turn.num_reused:
        raise BadAnswer(f"num_reused: {turn.num_reused} tokens, but none were there to reuse")


def check_chunk(chunk: Chunk, request: SampleRequest, room: int, vocab: int, eos_ids: Collection[int]) -> None:
    """Raises `BadAnswer` unless `chunk` may come next in a turn of `request` that has room for so many tokens more."""
    _check_sampled(chunk, request, room, vocab)
    ended = int(chunk.sampled_ids[-1]) in eos_ids
    due = "eos" if ended else "length" if len(chunk.sampled_ids) == room else None
    if chunk.finish != due:
        raise BadAnswer(f"finish: {chunk.finish}, but the tokens say {due}")


def _check_sampled(turn: Turn | Chunk, request: SampleRequest, room: int, vocab: int) -> None:
    n, num_topk = len(turn.sampled_ids), request.sampling.num_topk
    if not 1 <= n <= room:
        raise BadAnswer(f"sampled_ids: {n} tokens, but 1 to {room} were asked for")
    _check_ids("sampled_ids", turn.sampled_ids, 0, vocab)
    _check_logps("sampler_logps", turn.sampler_logps, (n,), -math.inf)
    if (turn.topk_ids is not None) != bool(num_topk):
        raise BadAnswer(f"{'no ' if num_topk else ''}most likely tokens, but {num_topk} a token were asked for")
    if turn.topk_ids is not None:
        _check_shape("topk_ids", turn.topk_ids, (n, num_topk))
        _check_ids("topk_ids", turn.topk_ids, 0, vocab)
        _check_logps("topk_logps", turn.topk_logps, (n, num_topk), -math.inf)


def without_repeats(ids: Array) -> Array:
    """`ids` [n, m] with every second and later mention of an id in a row replaced by -1."""
    order = np.argsort(ids, axis=1, kind="stable")
    in_order = np.take_along_axis(ids, order, axis=1)
    repeated = np.zeros(ids.shape, bool)
    repeated[:, 1:] = in_order[:, 1:] == in_order[:, :-1]
    marked = ids.copy()
    np.put_along_axis(marked, order, np.where(repeated, -1, in_order), axis=1)
    return marked


def _check_hidden(scores: Scores, n: int, head: str, hidden_size: int | None) -> None:
    states = scores.hidden
    if states is None:
        raise BadAnswer("log-probs, but hidden states were asked for")
    if states.ndim != 2 or len(states) != n or states.shape[1] != (hidden_size or states.shape[1]):
        raise BadAnswer(f"hidden: shape {list(states.shape)}, not [{n}, {hidden_size or 'H'}]")
    if scores.head != head:
        raise BadAnswer(f"hidden: for the head {scores.head}, not {head}")
    if not torch.isfinite(states).all():
        raise BadAnswer("hidden: some are not finite")


def _check_topk(
    scores: Scores,
    request: ScoreRequest,
    shape: tuple[int, int],
    vocab: int,
    logp_floor: float,
    abilities: Abilities,
) -> None:
    ids, logps, tail = scores.topk_ids, scores.topk_logps, scores.tail
    assert ids is not None
    assert logps is not None
    assert tail is not None
    _check_shape("topk_ids", ids, shape)
    _check_ids("topk_ids", ids, -1, vocab)
    present = ids >= 0
    num_asked = 0 if request.ids is None else request.ids.shape[1]
    if request.ids is not None:
        wanted, answered = without_repeats(request.ids), ids[:, :num_asked]
        may_miss = abilities.ids == "overlap"
        if ((answered != wanted) & ~((answered == -1) & may_miss)).any():
            raise BadAnswer("topk_ids: other ids than those asked for")
    # of its own ids, only those that were asked for already may be missing
    if abilities.max_k is None and ((~present[:, num_asked:]).sum(1) > present[:, :num_asked].sum(1)).any():
        raise BadAnswer("topk_ids: some of its most likely tokens are missing")
    in_order = np.sort(ids, axis=1)
    if ((in_order[:, 1:] == in_order[:, :-1]) & (in_order[:, 1:] >= 0)).any():
        raise BadAnswer("topk_ids: an id twice in a row")
    _check_logps("topk_logps", np.where(present, logps, 0.0), shape, logp_floor)
    if not np.isfinite(logps).all():
        raise BadAnswer("topk_logps: not finite where there is no id")
    _check_shape("tail", tail, shape[:1])
    if not ((tail >= 0.0) & (tail <= 1.0 + LOGP_SLACK)).all():
        raise BadAnswer("tail: some are no probabilities")
    mass = np.exp(np.where(present, logps, -np.inf), dtype=np.float64).sum(1) + tail
    raised = shape[1] * math.exp(logp_floor)  # what the floor may have added
    if not ((mass >= 1.0 - MASS_SLACK) & (mass <= 1.0 + MASS_SLACK + raised)).all():
        raise BadAnswer("topk_logps: with the tail they make no distribution")


def _check_logps(name: str, logps: Array | None, shape: tuple[int, ...], floor: float) -> None:
    assert logps is not None
    _check_shape(name, logps, shape)
    if not np.isfinite(logps).all():
        raise BadAnswer(f"{name}: some are not finite")
    # the floor travels as float64 and is applied in float32
    if logps.size and (logps.max() > LOGP_SLACK or logps.min() < floor - abs(floor) * 1e-6):
        raise BadAnswer(f"{name}: from {logps.min():g} to {logps.max():g}, but log-probs lie between {floor:g} and 0")


def _check_ids(name: str, ids: Array, lowest: int, vocab: int) -> None:
    if ids.size and (ids.min() < lowest or ids.max() >= vocab):
        raise BadAnswer(f"{name}: from {ids.min()} to {ids.max()}, but ids are below {vocab}")


def _check_shape(name: str, array: Array, shape: tuple[int, ...]) -> None:
    if array.shape != shape:
        raise BadAnswer(f"{name}: shape {list(array.shape)}, but {list(shape)} was asked for")
