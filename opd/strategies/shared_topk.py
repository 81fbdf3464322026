"""Term maker `shared_topk`: a dense signal from a teacher with another tokenizer, where it needs no approximation.

At places where one token of the student stands beside one token of the teacher, both predict the next token after the same
text. There the student's k most likely tokens are compared with the teacher's tokens of the same bytes, and everything else
is one more bucket. Other places are left out; arXiv 2610.08448 finds that this suffices, and that losses on longer spans can
hurt. A teacher with the student's tokenizer is compared everywhere.

Tokens that only one side has (as far as they are among the k most likely of either) are left out of both distributions: the
comparison is of the next token given that both know it, which is what the places compared were drawn by. Otherwise a student
whose own tokens are longer would be taught to write shorter ones.
"""

import asyncio
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from opd.errors import UserError
from opd.passages import passages
from opd.plugins import Models, TermMaker
from opd.records import Array, Rollout, ScoreRequest, Term, TopK
from opd.strategies.likely import ids_to_ask, likely_ids

if TYPE_CHECKING:
    from opd.config import RunConfig


@dataclass(frozen=True)
class SharedTopKConfig:
    """The top-k reverse KL over tokens that both vocabularies have."""

    coef: float = 1.0
    """Scale of this term."""
    k: int = 16
    """The student's most likely tokens at each place."""
    tail: Literal["tail", "renormalise", "truncate"] = "tail"
    """The mass outside, as in `reverse_kl.tail`."""


class SharedTopK(TermMaker):
    """See the module."""

    Config = SharedTopKConfig
    across_tokenizers = True

    def __init__(self, config: SharedTopKConfig, run: "RunConfig") -> None:
        self.config, self.num_student_topk = config, config.k
        self.temperature = run.loss_temperature

    @staticmethod
    def check(config: SharedTopKConfig, run: "RunConfig") -> None:
        if config.k < 1:
            raise UserError(f"terms.shared_topk.k is {config.k}: it must be at least 1")
        if config.k == 1 and config.tail == "renormalise":
            raise UserError("terms.shared_topk.k: one renormalised token has divergence 0 everywhere; take k >= 2")
        if not math.isfinite(config.coef):
            raise UserError("terms.shared_topk.coef must be a finite number")

    async def collect(self, rollout: Rollout, models: Models) -> list[Term]:
        model = models.teacher_for(rollout.prompt)
        likely, counterparts = likely_ids(rollout, self.config.k), models.same_bytes(model)
        if counterparts is None:
            places = _own_places(rollout, likely)
        else:
            places = _aligned_places(models, model, rollout, likely, counterparts)
        target, mask = _nowhere(*likely.shape), np.zeros(len(likely), bool)
        answers = await asyncio.gather(*(self._ask(models, model, one, counterparts) for one in places))
        for one, answer in zip(places, answers):
            mask[one.rows] = True
            for whole, values in zip(target, answer):
                whole[one.rows] = values
        inputs = {"divergence": "reverse_kl", "beta": 0.5, "tail": self.config.tail, "target": TopK(*target)}
        inputs["figure"] = "reverse_kl_shared"
        return [Term("divergence", mask=mask, inputs=inputs, coef=self.config.coef)]

    async def _ask(self, models: Models, model: str, places: "_Places", counterparts: Array | None) -> tuple[Array, ...]:
        """The fields of `TopK` [p, ...] at these places."""
        order = np.argsort(places.wanted < 0, axis=1, kind="stable")  # of a repeated id the teacher answers the first alone
        wanted = np.take_along_axis(places.wanted, order, axis=1)
        request = ScoreRequest(
            places.context_ids,
            places.token_ids,
            k=0 if counterparts is None else self.config.k,
            ids=ids_to_ask(places.token_ids, places.at, wanted),
            temperature=self.temperature,
        )
        scores = await models.score(model, request)
        assert scores.topk_ids is not None
        assert scores.topk_logps is not None
        answered, logps = scores.topk_ids[places.at], scores.topk_logps[places.at].astype(np.float64)
        k, unknown = wanted.shape[1], wanted < 0
        present = ~unknown & (answered[:, :k] >= 0)
        logps = logps[:, :k] - np.log1p(-_mass_without(counterparts, answered, logps))
        mass = (np.exp(logps) * present).sum(1)
        ids = np.where(present | unknown, np.take_along_axis(places.likely, order, axis=1), -1)
        return ids, np.where(present, logps, 0.0), (1.0 - mass).clip(min=0.0), unknown


@dataclass(frozen=True, eq=False)
class _Places:
    """Places of one text [m] that the teacher reads, where both sides' next tokens are compared."""

    context_ids: Array  # [c] int32, the teacher's
    token_ids: Array  # [m] int32, the teacher's
    at: Array  # [p] int64: the places among these
    rows: Array  # [p] int64: the same among the rollout's sampled tokens
    likely: Array  # [p, k] int32: the student's most likely tokens there
    wanted: Array  # [p, k] int32: the teacher's tokens of the same bytes; -1 for none


def _own_places(rollout: Rollout, likely: Array) -> list[_Places]:
    """All of them, where the teacher reads the student's own tokens."""
    return [
        _Places(one.context_ids, one.token_ids, one.at, one.rows, likely[one.rows], likely[one.rows])
        for one in passages(rollout)
    ]


def _aligned_places(models: Models, model: str, rollout: Rollout, likely: Array, counterparts: Array) -> list[_Places]:
    """Those of each turn where one token stands beside one token."""
    found, start = [], 0
    for turn in rollout.turns:
        spans = models.align(model, rollout, turn) if turn.trainable.any() else None
        if spans is not None:
            mine, theirs = (ends[spans.one_to_one] - 1 for ends in (spans.student_ends, spans.teacher_ends))
            # a first token of which a tokenizer dropped the space is aligned with another one than elsewhere
            usual = (counterparts[turn.sampled_ids[mine]] == spans.token_ids[theirs]) & turn.trainable[mine]
            rows, theirs = start + mine[usual], theirs[usual]
            if len(rows):
                likely_there = likely[rows]
                found.append(
                    _Places(spans.context_ids, spans.token_ids, theirs, rows, likely_there, counterparts[likely_there])
                )
        start += len(turn.sampled_ids)
    return found


def _nowhere(num_tokens: int, k: int) -> tuple[Array, ...]:
    """The fields of `TopK` [n, ...] where nothing is compared."""
    ids, none = np.full((num_tokens, k), -1, np.int32), np.zeros((num_tokens, k), bool)
    return ids, none.astype(np.float32), np.ones(num_tokens, np.float32), none


def _mass_without(counterparts: Array | None, ids: Array, logps: Array) -> Array:
    """[p, 1]: the teacher's probability of those of the tokens `ids` [p, K] that the student does not have."""
    if counterparts is None:
        return np.zeros((len(ids), 1))
    theirs = np.ones(max(int(counterparts.max()), int(ids.max(initial=0))) + 1, bool)
    theirs[counterparts[counterparts >= 0]] = False
    return (np.exp(logps) * (theirs[ids] & (ids >= 0))).sum(1, keepdims=True).clip(max=1.0 - 1e-6)
