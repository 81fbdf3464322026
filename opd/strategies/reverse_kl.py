"""Term maker `reverse_kl`: plain on-policy distillation.

The student is pulled to the teacher on its own rollouts, token by token (Agarwal et al. 2023, arXiv 2306.13649; Lu et
al. 2025, "On-Policy Distillation"). Three forms, from cheap to exact:

* `sampled`: the teacher's log-prob of each sampled token. A_t = l_T(t) - l_theta(t) is a detached advantage of a policy
  gradient, never a back-propagated k1 (whose expected gradient is zero) nor k3 (which is the forward KL's).
* `topk`: a divergence over k tokens of each position, chosen by the student, the teacher, or both.
* `full`: the divergence over the whole vocabulary.
"""

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from opd.errors import UserError
from opd.plugins import Models
from opd.records import Hidden, Rollout, ScoreRequest, Scores, Term, TopK, Turn

if TYPE_CHECKING:
    from opd.config import RunConfig


@dataclass(frozen=True)
class ReverseKLConfig:
    """Plain on-policy distillation."""

    coef: float = 1.0
    """Scale of this term."""
    form: Literal["sampled", "topk", "full"] = "full"
    """What is compared: the sampled token, k tokens of each position, or the whole vocabulary."""
    divergence: Literal["reverse_kl", "forward_kl", "jsd"] = "reverse_kl"
    """For `topk` and `full`."""
    beta: float = 0.5
    """For `jsd`: the teacher's share of the mixture."""
    k: int = 16
    """For `topk`: tokens of each position."""
    source: Literal["student", "teacher", "union"] = "student"
    """For `topk`: whose most likely tokens. `union` takes k of each."""
    tail: Literal["tail", "renormalise", "truncate"] = "tail"
    """For `topk`, the mass outside: one more bucket; none, with both sides scaled to 1; or left out of the sum (the
    divergence of unnormalised measures, which is not negative and whose gradient is that of the kept tokens alone)."""
    advantage_clip: float | None = None
    """For `sampled`: advantages are clipped to plus or minus this."""
    ratio_clip: float | None = 0.2
    """For `sampled` with several updates a batch: the ratio's distance from 1 beyond which a token stops teaching."""
    importance: Literal["auto", "none", "truncated"] = "auto"
    """For `sampled`: weight tokens by trainer over sampler probability, cut off at `importance_cap`. `auto` does so where
    rollouts are older than the student (`lookahead: 1`)."""
    importance_cap: float = 2.0
    """Largest weight of `importance: truncated`."""


class ReverseKL:
    """See the module."""

    Config = ReverseKLConfig

    def __init__(self, config: ReverseKLConfig, run: "RunConfig") -> None:
        self.config = config
        self.temperature = run.loss_temperature
        self.needs_hidden = config.form == "full"
        self.importance = "truncated" if config.importance == "auto" and run.lookahead else config.importance
        self.num_student_topk = config.k if config.form == "topk" and config.source != "teacher" else 0

    @staticmethod
    def check(config: ReverseKLConfig, run: "RunConfig") -> None:
        if config.form == "sampled":
            if config.divergence != "reverse_kl":
                raise UserError(
                    f"terms.reverse_kl.divergence: {config.divergence} needs form topk or full; "
                    "a sampled token estimates the reverse KL only"
                )
            if run.sampling.temperature != run.loss_temperature:
                raise UserError(
                    "terms.reverse_kl.form: sampled needs objective.temperature to be the sampling temperature, "
                    "or its expectation is not the reverse KL; use topk or full"
                )
        elif config.importance == "truncated":
            raise UserError(f"terms.reverse_kl.importance: has no effect with form {config.form}; leave it out")
        if config.form == "topk":
            if config.k < 1:
                raise UserError(f"terms.reverse_kl.k is {config.k}: it must be at least 1")
            if config.k == 1 and config.tail == "renormalise" and config.source != "union":
                raise UserError("terms.reverse_kl.k: one renormalised token has divergence 0 everywhere; take k >= 2")
        if not math.isfinite(config.coef) or (config.ratio_clip is not None and config.ratio_clip <= 0):
            raise UserError("terms.reverse_kl: coef must be a finite number and ratio_clip positive or null")
        if config.importance_cap <= 0 or (config.advantage_clip is not None and config.advantage_clip <= 0):
            raise UserError("terms.reverse_kl: advantage_clip and importance_cap must be positive")
        if not 0.0 < config.beta < 1.0:
            raise UserError(f"terms.reverse_kl.beta is {config.beta}: it must lie between 0 and 1")

    async def collect(self, rollout: Rollout, models: Models) -> list[Term]:
        model = models.teacher_for(rollout.prompt)
        scores = await asyncio.gather(*(self._score(model, turn, models) for turn in rollout.turns))
        config = self.config
        if config.form == "sampled":
            inputs: dict[str, Any] = {
                "reward": _joined([s.logps for s in scores]),
                "self_coef": 1.0,
                "advantage_clip": config.advantage_clip,
                "ratio_clip": config.ratio_clip,
                "importance_cap": config.importance_cap if self.importance == "truncated" else None,
            }
            return [Term("policy_gradient", mask=rollout.trainable, inputs=inputs, coef=config.coef)]
        if config.form == "topk":
            ids, logps = _joined([s.topk_ids for s in scores]), _joined([s.topk_logps for s in scores])
            target: TopK | Hidden = TopK(ids, logps, _joined([s.tail for s in scores]))
        else:
            assert scores[0].head is not None
            target = Hidden(tuple(s.hidden for s in scores), scores[0].head)
        inputs = {"divergence": config.divergence, "beta": config.beta, "tail": config.tail, "target": target}
        return [Term("divergence", mask=rollout.trainable, inputs=inputs, coef=config.coef)]

    async def _score(self, model: str, turn: Turn, models: Models) -> Scores:
        config = self.config
        topk = config.form == "topk"
        request = ScoreRequest(
            context_ids=turn.context_ids,
            token_ids=turn.sampled_ids,
            k=config.k if topk and config.source != "student" else 0,
            ids=turn.topk_ids if topk and config.source != "teacher" else None,
            hidden=config.form == "full",
            temperature=self.temperature,
        )
        return await models.score(model, request)


def _joined(parts: Sequence[np.ndarray | None]) -> np.ndarray:
    """The turns' arrays [n_i, ...] as one [n, ...]."""
    return np.concatenate([part for part in parts if part is not None])
