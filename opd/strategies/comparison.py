"""What term makers have in common that compare the student with another model's distribution on its own rollouts.

Three forms, from cheap to exact:

* `sampled`: the model's log-prob of each sampled token. A_t = l_T(t) - l_theta(t) is a detached advantage of a policy
  gradient, never a back-propagated k1 (whose expected gradient is zero) nor k3 (which is the forward KL's).
* `topk`: a divergence over k tokens of each position, chosen by the student, the model, or both.
* `full`: the divergence over the whole vocabulary.
"""

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from opd.errors import UserError
from opd.judging import SpanRule, judge, read_hidden
from opd.passages import Passage, passages, spread
from opd.plugins import Models, TermMaker
from opd.records import Array, Hidden, Rollout, ScoreRequest, Term, TopK
from opd.strategies.likely import ids_to_ask, likely_ids
from opd.strategies.sampled import SampledConfig

if TYPE_CHECKING:
    from opd.config import RunConfig


@dataclass(frozen=True)
class ComparisonConfig(SampledConfig):
    """How two distributions are compared."""

    form: Literal["sampled", "topk", "full"] = "full"
    """What is compared: the sampled token, k tokens of each position, or the whole vocabulary."""
    divergence: Literal["reverse_kl", "forward_kl", "jsd"] = "reverse_kl"
    """For `topk` and `full`."""
    beta: float = 0.5
    """For `jsd`: the teacher's share of the mixture."""
    k: int = 16
    """For `topk`: tokens of each position; 0 is the form `sampled`, so that a sweep may begin there."""
    source: Literal["student", "teacher", "union"] = "student"
    """For `topk`: whose most likely tokens. `union` takes k of each."""
    tail: Literal["tail", "renormalise", "truncate"] = "tail"
    """For `topk`, the mass outside: one more bucket; none, with both sides scaled to 1; or left out of the sum (the
    divergence of unnormalised measures, which is not negative and whose gradient is that of the kept tokens alone)."""

    @property
    def compared(self) -> Literal["sampled", "topk", "full"]:
        """The form, whatever it is called."""
        return "sampled" if self.form == "topk" and self.k == 0 else self.form

    def check_for(self, field: str, run: "RunConfig") -> None:
        """Raises `UserError` naming `field`, as `terms.reverse_kl`, for what cannot be compared or has no effect."""
        if self.compared == "sampled":
            if self.divergence != "reverse_kl":
                raise UserError(
                    f"{field}.divergence: {self.divergence} needs form topk or full; "
                    "a sampled token estimates the reverse KL only"
                )
            if run.sampling.temperature != run.loss_temperature:
                raise UserError(
                    f"{field}.form: sampled needs objective.temperature to be the sampling temperature, "
                    "or its expectation is not the reverse KL; use topk or full"
                )
        else:
            for name in self.SAMPLED_ALONE:
                if getattr(self, name) != getattr(type(self), name):
                    raise UserError(f"{field}.{name}: has no effect with form {self.form}; leave it out")
        if self.form == "topk":
            if self.k < 0:
                raise UserError(f"{field}.k is {self.k}: it must be 0 (the sampled token alone) or more")
            if self.k == 1 and self.tail == "renormalise" and self.source != "union":
                raise UserError(f"{field}.k: one renormalised token has divergence 0 everywhere; take k >= 2")
        self.check(field)
        if not 0.0 < self.beta < 1.0:
            raise UserError(f"{field}.beta is {self.beta}: it must lie between 0 and 1")


class Comparison(TermMaker):
    """See the module. A plug-in says which model is asked about which rollout."""

    Config: ClassVar[type] = ComparisonConfig

    def __init__(self, config: ComparisonConfig, run: "RunConfig") -> None:
        self.config = config
        self.temperature = run.loss_temperature
        self.needs_hidden = config.compared == "full"
        self.policy_inputs = config.policy_inputs(run)
        self.num_student_topk = config.k if config.compared == "topk" and config.source != "teacher" else 0

    async def compare(self, model: str, rollout: Rollout, models: Models, rule: SpanRule = "split") -> Term:
        """The term by which the student learns from `model` on the rollout as it is. `rule` is for a model of another
        tokenizer, of which only the form `sampled` can learn."""
        config = self.config
        if config.compared == "sampled":
            return await self._sampled(model, rollout, models, rule)
        target: TopK | Hidden
        if config.compared == "topk":
            target = await self._topk(model, rollout, models)
        else:
            target = await read_hidden(models, model, rollout)
        inputs = {"divergence": config.divergence, "beta": config.beta, "tail": config.tail, "target": target}
        return Term("divergence", mask=rollout.trainable, inputs=inputs, coef=config.coef)

    async def _sampled(self, model: str, rollout: Rollout, models: Models, rule: SpanRule) -> Term:
        config = self.config
        judged = await judge(models, model, rollout, temperature=self.temperature, coverage=config.coverage)
        inputs = {**self.policy_inputs, "reward": judged.by(rule), "teacher_sampled": judged.split}
        if judged.unit_starts is None:
            inputs |= {"self_coef": 1.0}
        else:  # both sides by the same rule, so that texts of equal probability have advantage 0 however they are cut
            own = {"self_coef": 0.0, "unit_coef": 1.0, "unit_starts": judged.unit_starts}
            inputs |= {**own, "teacher_mean": judged.mean}
        return Term("policy_gradient", mask=rollout.trainable & judged.mask, inputs=inputs, coef=config.coef)

    async def _topk(self, model: str, rollout: Rollout, models: Models) -> TopK:
        k, source = self.config.k, self.config.source
        likely = None if source == "teacher" else likely_ids(rollout, k)

        async def one(passage: Passage) -> tuple[Array, Array, Array]:
            token_ids, at = passage.token_ids, passage.at
            ids = None if likely is None else ids_to_ask(token_ids, at, likely[passage.rows])
            own = 0 if source == "student" else k
            request = ScoreRequest(passage.context_ids, token_ids, k=own, ids=ids, temperature=self.temperature)
            scores = await models.score(model, request)
            assert scores.topk_ids is not None
            assert scores.topk_logps is not None
            assert scores.tail is not None
            return scores.topk_ids[at], scores.topk_logps[at], scores.tail[at]

        parts = await asyncio.gather(*map(one, passages(rollout)))
        return TopK(*(spread(rollout, column) for column in zip(*parts)))
