"""Term maker `compass`: learn what made the teacher better than its own family's weak model (CompassOPD, arXiv 2609.10154).

Plain OPD's advantage log pi_T - log pi_theta is the change within the teacher's family, D_T = log pi_T - log pi_R, and the
offset O = log pi_R - log pi_theta between that family and the student, which is habit rather than ability. The term keeps
the former, and holds the student near its frozen start by its own displacement D_S = log pi_theta - log pi_ref:

    A_t = D_T + beta O - alpha D_S        (beta = 0; a detached advantage of a policy gradient)

D_T and O are taken on units of text that both tokenizers have in common, D_S on the student's own tokens. beta = 1 and
alpha = 0 is plain OPD, and so is alpha = 1 with the student's start as the weak reference.
"""

import asyncio
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from opd.errors import UserError
from opd.judging import Judged, SpanRule, judge
from opd.plugins import Models, TermMaker
from opd.records import Rollout, Term
from opd.strategies.sampled import SampledConfig
from opd.teachers.config import weak_name

if TYPE_CHECKING:
    from opd.config import RunConfig


@dataclass(frozen=True)
class CompassConfig(SampledConfig):
    """The teacher's change from the weak reference of its family."""

    alpha: float = 0.5
    """Strength of the pull back to the student's frozen start; the smaller, the further the student goes."""
    beta: float = 0.0
    """Share of the offset between the teacher's family and the student that is added back; 1 with alpha 0 is plain OPD."""
    span_reduce: SpanRule = "mean"
    """With a teacher of another tokenizer: a unit's log-probs as their mean (the paper's), or their sum shared equally."""
    delta_clip: float | None = None
    """Differences between teacher and weak reference are clipped to plus or minus this."""


class Compass(TermMaker):
    """See the module."""

    Config = CompassConfig
    needs_weak_reference = True
    across_tokenizers = True

    def __init__(self, config: CompassConfig, run: "RunConfig") -> None:
        self.config = config
        self.temperature = run.loss_temperature
        self.needs_reference = config.alpha != 0.0
        self.floors = {name: model.logp_floor for name, model in run.frozen.items()}
        self.policy_inputs = config.policy_inputs(run)

    @staticmethod
    def check(config: CompassConfig, run: "RunConfig") -> None:
        config.check("terms.compass")
        for name in ("alpha", "beta"):
            if not 0.0 <= getattr(config, name) < math.inf:
                raise UserError(f"terms.compass.{name} is {getattr(config, name)}: it must be 0 or more, and finite")
        if config.delta_clip is not None and not config.delta_clip > 0:
            raise UserError(f"terms.compass.delta_clip is {config.delta_clip}: it must be positive, or null for none")
        if run.sampling.temperature != run.loss_temperature:
            raise UserError("terms.compass: sampled tokens need objective.temperature to be the sampling temperature")
        for name, teacher in run.teachers.items():
            if teacher.weak_reference is None:
                raise UserError(
                    f"teachers.{name}.weak_reference is missing: compass compares the teacher with it; set "
                    f"teachers.{name}.weak_reference.model=FOLDER, or for mixture-of-experts models "
                    f"teachers.{name}.weak_reference.active_experts=1"
                )

    async def collect(self, rollout: Rollout, models: Models) -> list[Term]:
        config, model = self.config, models.teacher_for(rollout.prompt)
        strong, weak = await asyncio.gather(
            self._judge(models, model, rollout), self._judge(models, weak_name(model), rollout)
        )
        rule = config.span_reduce
        change = strong.by(rule) - weak.by(rule)
        if config.delta_clip is not None:
            change = change.clip(-config.delta_clip, config.delta_clip)
        inputs = {
            **self.policy_inputs,
            "reward": change + np.float32(config.beta) * weak.by(rule),
            "self_coef": config.alpha,
            "reference_coef": config.alpha,
            "unit_coef": config.beta,
            "teacher_sampled": strong.split,
            "teacher_mean": strong.mean,
            "teacher_weak": weak.split,
        }
        if weak.unit_starts is not None:
            inputs["unit_starts"] = weak.unit_starts
        known = strong.mask & weak.mask & ~(strong.floored & weak.floored)  # -inf less -inf says nothing
        return [Term("policy_gradient", mask=rollout.trainable & known, inputs=inputs, coef=config.coef)]

    async def _judge(self, models: Models, model: str, rollout: Rollout) -> Judged:
        floor, coverage = self.floors[model], self.config.coverage
        return await judge(models, model, rollout, temperature=self.temperature, floor=floor, coverage=coverage)
