"""A frozen model's view of a rollout, token by token of the student, whatever tokens the model itself reads."""

import asyncio
import math
from dataclasses import dataclass, fields
from typing import Literal

import numpy as np

from opd.passages import Passage, passages, spread
from opd.plugins import Models
from opd.records import Array, Hidden, Rollout, ScoreRequest, SpanMap, Turn

SpanRule = Literal["split", "mean"]
Covered = Literal["all", "strict_1to1"]


@dataclass(frozen=True, eq=False)
class Judged:
    """A frozen model's log-probs of a rollout's sampled tokens [n]; under either rule where it reads other tokens."""

    split: Array  # [n] float32
    mean: Array  # [n] float32
    mask: Array  # [n] bool: tokens that it has judged; never reused ones
    floored: Array  # [n] bool: some log-prob behind the token was raised to the floor
    unit_starts: Array | None  # [n] bool: the first token of each aligned unit; None where it reads the student's tokens

    def own(self, logps: Array) -> Array:
        """[n]: the student's log-probs of its tokens [n], each unit's sum shared equally as in `split`."""
        if self.unit_starts is None or not len(logps):
            return logps
        first = np.flatnonzero(self.unit_starts)
        sizes = np.diff(first, append=len(logps))
        return np.repeat(np.add.reduceat(logps, first) / sizes, sizes)

    def by(self, rule: SpanRule) -> Array:
        return self.split if rule == "split" else self.mean


async def judge(
    models: Models,
    model: str,
    rollout: Rollout,
    *,
    temperature: float,
    floor: float = -math.inf,
    coverage: Covered = "all",
) -> Judged:
    """Asks `model` about all trainable tokens. `floor` is what it raises log-probs to, where the caller wants to know.

    A model of another tokenizer is shown the rollout turn by turn, without turns that are reused as a whole.
    """
    spans = [models.align(model, rollout, turn) if turn.trainable.any() else None for turn in rollout.turns]
    if all(one is None for one in spans):
        return await _judge_passages(models, model, rollout, temperature, floor)
    parts = await asyncio.gather(
        *(_judge_turn(models, model, turn, one, temperature, floor, coverage) for turn, one in zip(rollout.turns, spans))
    )
    return Judged(*(np.concatenate([getattr(part, field.name) for part in parts]) for field in fields(Judged)))


async def read_hidden(models: Models, model: str, rollout: Rollout) -> Hidden:
    """The model's distributions at the trainable tokens, of which there is at least one. It reads the student's tokens."""
    found = passages(rollout)
    asked = (ScoreRequest(passage.context_ids, passage.token_ids, hidden=True) for passage in found)
    scores = await asyncio.gather(*(models.score(model, request) for request in asked))
    assert scores[0].head is not None
    return Hidden(tuple(one.hidden[passage.at] for passage, one in zip(found, scores)), scores[0].head)


async def _judge_passages(models: Models, model: str, rollout: Rollout, temperature: float, floor: float) -> Judged:
    """By a model that reads the student's own tokens."""

    async def one(passage: Passage) -> Array:
        request = ScoreRequest(passage.context_ids, passage.token_ids, temperature=temperature)
        logps = (await models.score(model, request)).logps
        assert logps is not None
        return logps[passage.at]

    logps = spread(rollout, await asyncio.gather(*map(one, passages(rollout))))
    return Judged(logps, logps, rollout.trainable, logps <= floor, None)


async def _judge_turn(
    models: Models, model: str, turn: Turn, spans: SpanMap | None, temperature: float, floor: float, coverage: Covered
) -> Judged:
    """By a model of another tokenizer; `spans` is None for a turn that it is not shown."""
    nothing = np.zeros(len(turn.sampled_ids), np.float32)
    if spans is None:
        return Judged(nothing, nothing, nothing > 0, nothing > 0, nothing == 0)
    if not len(spans.token_ids):  # its context is full, or nothing was written that it could read
        return Judged(nothing, nothing, nothing > 0, nothing > 0, spans.unit_starts)
    scores = await models.score(model, ScoreRequest(spans.context_ids, spans.token_ids, temperature=temperature))
    logps = scores.logps
    assert logps is not None
    # of a unit with reused tokens the student's share is not known: what is not trained has no log-prob of today's student
    known = spans.student_ends - spans.student_sizes >= turn.num_reused
    return Judged(
        split=spans.reduce(logps, "split"),
        mean=spans.reduce(logps, "mean"),
        mask=spans.per_token(known & (spans.aligned if coverage == "all" else spans.one_to_one)),
        floored=spans.reduce((logps <= floor).astype(np.float32), "mean") > 0,
        unit_starts=spans.unit_starts,
    )
