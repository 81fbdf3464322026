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
from opd.plugins import Models
from opd.records import Array, Rollout, ScoreRequest, Term, TopK, Turn

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


class SharedTopK:
    """See the module."""

    Config = SharedTopKConfig
    needs_weak_reference = False
    needs_reference = False
    needs_hidden = False
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
        parts = await asyncio.gather(*(self._turn(models, model, rollout, turn) for turn in rollout.turns))
        *target, mask = (np.concatenate(arrays) for arrays in zip(*parts))
        inputs = {"divergence": "reverse_kl", "beta": 0.5, "tail": self.config.tail, "target": TopK(*target)}
        inputs["figure"] = "reverse_kl_shared"
        return [Term("divergence", mask=rollout.trainable & mask, inputs=inputs, coef=self.config.coef)]

    async def _turn(self, models: Models, model: str, rollout: Rollout, turn: Turn) -> tuple[Array, ...]:
        """The fields of `TopK` [n, ...] for one turn, and the places compared [n]."""
        assert turn.topk_ids is not None
        likely = turn.topk_ids[:, : self.config.k]  # another term may have asked for more
        spans, counterparts = models.align(model, rollout, turn), models.same_bytes(model)
        if spans is None or counterparts is None:
            places = theirs = np.arange(len(turn.sampled_ids))
            context_ids, token_ids, wanted, own = turn.context_ids, turn.sampled_ids, likely, 0
        else:
            units = spans.one_to_one
            places, theirs = (ends[units] - 1 for ends in (spans.student_ends, spans.teacher_ends))
            # a first token of which a tokenizer dropped the space is aligned with another one than elsewhere
            usual = counterparts[turn.sampled_ids[places]] == spans.token_ids[theirs]
            places, theirs = places[usual], theirs[usual]
            context_ids, token_ids, wanted = spans.context_ids, spans.token_ids, counterparts[likely[places]]
            own = self.config.k
        order = np.argsort(wanted < 0, axis=1, kind="stable")  # of a repeated id the teacher answers the first alone
        wanted = np.take_along_axis(wanted, order, axis=1)
        asked = np.repeat(token_ids[:, None], likely.shape[1], axis=1)  # where nothing is wanted, a token that it has anyway
        asked[theirs] = np.where(wanted >= 0, wanted, asked[theirs])
        if not len(places):
            return _nothing(*likely.shape)
        request = ScoreRequest(context_ids, token_ids, k=own, ids=asked.astype(np.int32), temperature=self.temperature)
        scores = await models.score(model, request)
        assert scores.topk_ids is not None
        assert scores.topk_logps is not None
        answered, logps = scores.topk_ids[theirs], scores.topk_logps[theirs].astype(np.float64)
        unknown = wanted < 0
        present = ~unknown & (answered[:, : likely.shape[1]] >= 0)
        logps = logps[:, : likely.shape[1]] - np.log1p(-_mass_without(counterparts, answered, logps))
        mass = (np.exp(logps) * present).sum(1)

        def spread(values: Array, filler: float, dtype: type) -> Array:
            whole = np.full((len(turn.sampled_ids), *values.shape[1:]), filler, dtype)
            whole[places] = values
            return whole

        ids = np.where(present | unknown, np.take_along_axis(likely[places], order, axis=1), -1)
        return (
            spread(ids, -1, np.int32),
            spread(np.where(present, logps, 0.0), 0.0, np.float32),
            spread((1.0 - mass).clip(min=0.0), 1.0, np.float32),
            spread(unknown, False, bool),
            spread(np.ones(len(places)), False, bool),
        )


def _nothing(num_tokens: int, k: int) -> tuple[Array, ...]:
    """Of a turn without a place to compare."""
    ids, none = np.full((num_tokens, k), -1, np.int32), np.zeros((num_tokens, k), bool)
    return ids, none.astype(np.float32), np.ones(num_tokens, np.float32), none, none[:, 0]


def _mass_without(counterparts: Array | None, ids: Array, logps: Array) -> Array:
    """[p, 1]: the teacher's probability of those of the tokens `ids` [p, K] that the student does not have."""
    if counterparts is None:
        return np.zeros((len(ids), 1))
    theirs = np.ones(max(int(counterparts.max()), int(ids.max(initial=0))) + 1, bool)
    theirs[counterparts[counterparts >= 0]] = False
    return (np.exp(logps) * (theirs[ids] & (ids >= 0))).sum(1, keepdims=True).clip(max=1.0 - 1e-6)
