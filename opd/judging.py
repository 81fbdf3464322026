"""A frozen model's view of a rollout, token by token of the student, whatever tokens the model itself reads."""

import asyncio
import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from opd.plugins import Models
from opd.records import Array, Rollout, ScoreRequest, Turn

SpanRule = Literal["split", "mean"]
Covered = Literal["all", "strict_1to1"]


@dataclass(frozen=True, eq=False)
class Judged:
    """A frozen model's log-probs of a rollout's sampled tokens [n]; under either rule where it reads other tokens."""

    split: Array  # [n] float32
    mean: Array  # [n] float32
    mask: Array  # [n] bool: tokens that it has judged
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
    """Asks `model` about every turn. `floor` is what it raises log-probs to, where the caller wants to know."""
    parts = await asyncio.gather(
        *(_judge_turn(models, model, rollout, turn, temperature, floor, coverage) for turn in rollout.turns)
    )
    starts = [part.unit_starts for part in parts]
    return Judged(
        *(np.concatenate([getattr(part, name) for part in parts]) for name in ("split", "mean", "mask", "floored")),
        unit_starts=None if starts[0] is None else np.concatenate(starts),  # type: ignore[arg-type]
    )


async def _judge_turn(
    models: Models, model: str, rollout: Rollout, turn: Turn, temperature: float, floor: float, coverage: Covered
) -> Judged:
    spans = models.align(model, rollout, turn)
    if spans is not None and not len(spans.token_ids):  # its context is full, or nothing was written that it could read
        nothing = np.zeros(len(turn.sampled_ids), np.float32)
        return Judged(nothing, nothing, nothing > 0, nothing > 0, spans.unit_starts)
    if spans is None:
        scores = await models.score(model, ScoreRequest(turn.context_ids, turn.sampled_ids, temperature=temperature))
        assert scores.logps is not None
        return Judged(scores.logps, scores.logps, np.ones(len(scores.logps), bool), scores.logps <= floor, None)
    scores = await models.score(model, ScoreRequest(spans.context_ids, spans.token_ids, temperature=temperature))
    logps = scores.logps
    assert logps is not None
    return Judged(
        split=spans.reduce(logps, "split"),
        mean=spans.reduce(logps, "mean"),
        mask=spans.per_token(spans.aligned if coverage == "all" else spans.one_to_one),
        floored=spans.reduce((logps <= floor).astype(np.float32), "mean") > 0,
        unit_starts=spans.unit_starts,
    )
