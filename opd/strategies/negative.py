"""Term maker `negative`: no teacher, but less of what a negative condition makes the model do more of.

Negative Self-Distillation (NSD; Pei et al., arXiv 2609.11699). The student's frozen start scores each response twice: after
the plain prompt, and after the same prompt with a condition that describes a flawed reasoner (`opd.strategies.conditions`).
Where the condition raises a sampled token's probability, the student is pushed off that token; everywhere an anchor holds it
near its start:

    G_t = max(0, p_neg - p_ref)        L_t = G_t / (2 - p_theta) + alpha * anchor_t

Plain distillation pulls to a teacher's whole distribution; this touches a token only where it is both sampled and flawed.
"""

import asyncio
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from opd.envs.opening import plays_turns
from opd.errors import UserError, refuse_unused
from opd.passages import passages, spread
from opd.plugins import Models, TermMaker
from opd.records import Array, Hidden, Rollout, ScoreRequest, Scores, Term, TopK
from opd.strategies.conditions import Condition, ConditionConfig, Conditions
from opd.strategies.reflection import reflections
from opd.strategies.reprompted import seen_under
from opd.teachers.config import START

if TYPE_CHECKING:
    from opd.config import RunConfig

Gate = Literal["probability", "log", "none"]
Anchor = Literal["pointwise_fkl", "is_fkl", "topk_fkl", "full_fkl", "k2_reverse", "k1", "none"]
OF_POSITIONS = ("topk_fkl", "full_fkl")  # anchors on more than the sampled token


@dataclass(frozen=True)
class NegativeConfig:
    """Negative self-distillation. The defaults are the paper's."""

    coef: float = 1.0
    """Scale of this term, anchor included."""
    gate: Gate = "probability"
    """How much a token is pushed down: max(0, p_neg - p_ref); `log`: the same of log-probs, in which rare tokens count as
    much as likely ones; `none`: 1 for every token, and no condition is asked for."""
    penalty: Literal["bounded", "unlikelihood"] = "bounded"
    """The push: 1 / (2 - p), whose gradient vanishes where a token is certain or gone, or the unbounded -log(1 - p)."""
    anchor: Anchor = "pointwise_fkl"
    """What holds the student near its start. `pointwise_fkl`, p_ref log(p_ref / p) of the sampled token, is the paper's, but
    no divergence: its expected gradient is not zero at the start itself. It only ever raises sampled tokens, the likelier
    the more, so that it sharpens the student; with a small `alpha` this is mild. The others have no such pull: `is_fkl`
    weights log(p_ref / p) by p_ref / p, which gives the forward KL's gradient; `topk_fkl` and `full_fkl` are the forward KL
    over the start's `k` most likely tokens and one bucket for the rest, or over the vocabulary (metric `forward_kl`);
    `k2_reverse` has the reverse KL's gradient; `k1` is the reverse KL of `policy_gradient`."""
    alpha: float = 0.01
    """Strength of the anchor."""
    k: int = 32
    """For `topk_fkl`: tokens of each position."""
    importance_cap: float = 10.0
    """For `is_fkl`: largest weight p_ref / p."""
    clamp: float | None = None
    """Largest size of a token's loss; beyond it the token has no gradient, which silences the strongest flaws (the cost of
    `policy_gradient` is only cut off). The published code has 0.5, the paper none. Does not reach the anchors `topk_fkl`
    and `full_fkl`, which are terms of their own."""
    trust: float | None = 0.2
    """With several updates a batch: a token whose probability has fallen by more than this share since the batch began is
    dropped."""
    logp_floor: float = -10.0
    """Log-probs of the start below this are raised to it, under both prompts; the student's own are not."""
    policy_gradient: bool = False
    """Take the loss as a detached cost of each sampled token (minus its advantage) instead of differentiating it. This goes
    with the anchors `k1`, `topk_fkl`, `full_fkl` and `none`; `pointwise_fkl` would lead away from the start."""
    generator: Literal["frozen", "student"] = "frozen"
    """Who writes conditions: the student's frozen start, as in the published code, or the student, as in the paper."""
    condition: ConditionConfig = field(default_factory=ConditionConfig)


class Negative(TermMaker):
    """See the module."""

    Config = NegativeConfig
    needs_teacher = False

    def __init__(self, config: NegativeConfig, run: "RunConfig") -> None:
        self.config, self.temperature = config, run.loss_temperature
        self.anchor = _anchor(config)
        self.needs_hidden = self.anchor == "full_fkl"
        if config.gate != "none" and config.condition.written:
            self.generates = ("a condition for each rollout",)
        self.conditions = Conditions(config.condition, START if config.generator == "frozen" else "student", run.seed)

    @staticmethod
    def needs_start(config: NegativeConfig) -> bool:
        """Without gate and anchor every token is pushed down alike, whatever the start thinks of it."""
        return config.gate != "none" or _anchor(config) != "none"

    @staticmethod
    def check(config: NegativeConfig, run: "RunConfig") -> None:
        _check_values(config)
        _refuse_unused(config)
        config.condition.check()
        if config.policy_gradient and config.anchor not in ("k1", "none", *OF_POSITIONS):
            raise UserError(
                f"terms.negative.anchor: with policy_gradient {config.anchor} would lead away from the start or to no "
                "divergence at all; set terms.negative.anchor=k1"
            )
        if config.anchor == "k1" and not config.policy_gradient:
            raise UserError(
                "terms.negative.anchor: k1 as a loss has no expected gradient; set terms.negative.policy_gradient=true, or "
                "take k2_reverse"
            )
        if run.sampling.temperature != run.loss_temperature:
            raise UserError("terms.negative: sampled tokens need objective.temperature to be the sampling temperature")
        if plays_turns(run):
            raise UserError(
                "terms.negative: a condition is about one answer, and prompts open episodes of several turns; take single "
                "answers"
            )
        if config.generator == "student" and (config.gate == "none" or not config.condition.written):
            why = "with gate none" if config.gate == "none" else f"of source {config.condition.source}"
            raise UserError(f"terms.negative.generator: nobody writes conditions {why}; set it to frozen, its default")
        if config.generator == "student" and run.lookahead:
            raise UserError(
                "terms.negative.generator: with lookahead newer weights would write the conditions of rollouts that were in "
                "flight when a run was resumed; take generator frozen, or set lookahead=0"
            )

    @staticmethod
    def check_files(config: NegativeConfig) -> None:
        config.condition.check_files()

    async def collect(self, rollout: Rollout, models: Models) -> list[Term]:
        """Without terms where nothing of the rollout was sampled now. Raises `UserError` as `Conditions` does."""
        found = passages(rollout)
        if not found:
            return []
        (passage,), (turn,) = found, rollout.turns
        condition, context_ids = await self._condition(rollout, models)
        request = ScoreRequest(passage.context_ids, passage.token_ids, temperature=self.temperature)
        asked: list[ScoreRequest] = []
        if self.needs_start(self.config):
            full = self.anchor == "full_fkl"
            topk = self.config.k if self.anchor == "topk_fkl" else 0
            asked.append(replace(request, k=topk, hidden=full, logps_too=full))
        if context_ids is not None:
            asked.append(replace(request, context_ids=context_ids))
        # at once, so that they are answered in one batch
        answers = await asyncio.gather(*(models.score(START, one) for one in asked))
        figures = {} if self.config.gate == "none" else _figures(rollout, condition)
        figures["reflection_rate"] = reflections(models.spell(turn.sampled_ids))
        reference = _at(rollout, answers[0].logps) if answers else np.zeros(rollout.num_tokens, np.float32)
        negative = None if context_ids is None else _at(rollout, answers[1].logps)
        term = self._penalty(rollout, reference, negative, figures)
        return [term] if self.anchor not in OF_POSITIONS else [term, self._divergence(rollout, answers[0])]

    async def _condition(self, rollout: Rollout, models: Models) -> tuple[Condition, Array | None]:
        """The rollout's condition, and what stands before its new tokens under the prompt with it [c]; None where there is
        no condition, or where it leaves no room for the response."""
        if self.config.gate == "none":
            return Condition(""), None
        condition = await self.conditions.of(rollout, models)
        if not condition.text:
            return condition, None
        seen = seen_under(rollout, self.conditions.negative(rollout.prompt, condition.text), models)
        return (Condition(""), None) if seen is None else (condition, passages(seen)[0].context_ids)

    def warning(self, figures: Mapping[str, float]) -> str | None:
        if figures.get("no_condition") != 1.0:
            return None
        if figures["answer_leaked"] == 1.0:
            why, fix = "each held the answer of its problem", "ask for it in other words, or take another source"
        else:
            writer = ", or its writer wrote nothing" if self.config.condition.written else ""
            why = f"problem, response and condition together are longer than the context{writer}"
            fix = "lower sampling.max_new_tokens, raise sampling.max_context or take a student with a longer context"
            fix += ", or set terms.negative.condition.source=fixed with a short text" if writer else ""
        return f"terms.negative pushes nothing down, since no rollout has a condition (no_condition): {why}; {fix}"

    def _penalty(self, rollout: Rollout, reference: Array, negative: Array | None, figures: dict[str, Array]) -> Term:
        config = self.config
        floored = np.maximum(reference, np.float32(config.logp_floor))
        inputs: dict[str, Any] = {
            "gate": gate_of(config.gate, floored, negative, config.logp_floor),
            "reference": floored,
            "penalty": config.penalty,
            "anchor": "none" if self.anchor in OF_POSITIONS else self.anchor,
            "alpha": config.alpha,
            "importance_cap": config.importance_cap,
            "clamp": config.clamp,
            "trust": config.trust,
            "policy_gradient": config.policy_gradient,
            **{f"figure_{name}": rows for name, rows in figures.items()},
        }
        return Term("penalty", mask=rollout.trainable, inputs=inputs, coef=config.coef)

    def _divergence(self, rollout: Rollout, own: Scores) -> Term:
        """The forward KL to the start at every position, beside the penalty."""
        (passage,), target = passages(rollout), None
        if self.anchor == "full_fkl":
            assert own.head is not None
            target = Hidden((own.hidden[passage.at],), own.head)
        else:
            target = TopK(_at(rollout, own.topk_ids), _at(rollout, own.topk_logps), _at(rollout, own.tail))
        inputs = {"divergence": "forward_kl", "beta": 0.5, "tail": "tail", "target": target}
        return Term("divergence", mask=rollout.trainable, inputs=inputs, coef=self.config.coef * self.config.alpha)


def _anchor(config: NegativeConfig) -> Anchor:
    """The anchor that has a gradient."""
    return config.anchor if config.alpha else "none"


def gate_of(gate: Gate, reference: Array, negative: Array | None, floor: float) -> Array:
    """[n] float32: how much each token is pushed down, from its log-probs [n] under the plain and the negative prompt, of
    which `reference` is floored. Without a negative prompt nothing is; see `NegativeConfig.gate`."""
    if gate == "none":
        return np.ones_like(reference)
    if negative is None:
        return np.zeros_like(reference)
    raised = np.maximum(negative, np.float32(floor))
    return (raised - reference if gate == "log" else np.exp(raised) - np.exp(reference)).clip(min=0.0)


def _figures(rollout: Rollout, condition: Condition) -> dict[str, Array]:
    """Shares of the trained tokens [n]: whose rollout had no condition, and whose condition had held the answer."""
    named = {"no_condition": not condition.text, "answer_leaked": condition.leaked}
    return {name: np.full(rollout.num_tokens, value, np.float32) for name, value in named.items()}


def _at(rollout: Rollout, values: Array | None) -> Array:
    """[n, ...]: an answer about the rollout's one passage, at its sampled tokens."""
    assert values is not None
    (passage,) = passages(rollout)
    return spread(rollout, [values[passage.at]])


def _check_values(config: NegativeConfig) -> None:
    if not math.isfinite(config.coef):
        raise UserError(f"terms.negative.coef is {config.coef}: it must be a finite number")
    if not 0.0 <= config.alpha < math.inf:
        raise UserError(f"terms.negative.alpha is {config.alpha}: it must be 0 or more, and finite")
    if config.k < 1:
        raise UserError(f"terms.negative.k is {config.k}: it must be at least 1")
    if not config.importance_cap > 0:
        raise UserError(f"terms.negative.importance_cap is {config.importance_cap}: it must be positive")
    if config.clamp is not None and not config.clamp > 0:
        raise UserError(f"terms.negative.clamp is {config.clamp}: it must be positive, or null for none")
    if config.trust is not None and not 0 < config.trust < 1:
        raise UserError(f"terms.negative.trust is {config.trust}: it is a share above 0 and below 1, or null to drop none")
    if not -math.inf < config.logp_floor < 0:
        raise UserError(f"terms.negative.logp_floor is {config.logp_floor}: it must be negative, and finite")


def _refuse_unused(config: NegativeConfig) -> None:
    field, why = "terms.negative", f"with anchor {config.anchor}"
    for name, unused in (
        ("k", config.anchor != "topk_fkl"),
        ("importance_cap", config.anchor != "is_fkl"),
        ("alpha", config.anchor == "none"),
    ):
        if unused:
            refuse_unused(config, (name,), field, why)
    if config.gate == "none":
        refuse_unused(config, ("condition",), field, "with gate none")
        if config.anchor in ("none", *OF_POSITIONS):
            refuse_unused(config, ("logp_floor",), field, f"{why} and gate none")
