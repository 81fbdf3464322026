"""What term makers on sampled tokens have in common: the switches of the policy gradient."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from opd.errors import UserError
from opd.judging import Covered

if TYPE_CHECKING:
    from opd.config import RunConfig


@dataclass(frozen=True)
class PolicyGradientConfig:
    """The policy gradient, whatever its advantages are."""

    coef: float = 1.0
    """Scale of this term."""
    ratio_clip: float | None = 0.2
    """On sampled tokens, with several updates a batch: the ratio's distance from 1 beyond which a token stops teaching."""
    importance: Literal["auto", "none", "truncated"] = "auto"
    """On sampled tokens: weight them by trainer over sampler probability, cut off at `importance_cap`. `auto` does so where
    rollouts are older than the student (`lookahead: 1`)."""
    importance_cap: float = 2.0
    """Largest weight of `importance: truncated`."""

    def check(self, field: str) -> None:
        """Raises `UserError` naming `field`, as `terms.compass`."""
        if not math.isfinite(self.coef):
            raise UserError(f"{field}.coef is {self.coef}: it must be a finite number")
        if not (self.ratio_clip is None or self.ratio_clip > 0):
            raise UserError(f"{field}.ratio_clip is {self.ratio_clip}: it must be positive, or null for none")
        if not self.importance_cap > 0:
            raise UserError(f"{field}.importance_cap is {self.importance_cap}: it must be positive")

    def policy_inputs(self, run: "RunConfig") -> dict[str, Any]:
        """The scalar inputs of the term kind `policy_gradient`."""
        truncated = self.importance == "truncated" or (self.importance == "auto" and run.lookahead > 0)
        return {
            "advantage_clip": None,
            "ratio_clip": self.ratio_clip,
            "importance_cap": self.importance_cap if truncated else None,
        }


@dataclass(frozen=True)
class SampledConfig(PolicyGradientConfig):
    """The policy gradient whose advantages compare a teacher with the student, token by token."""

    SAMPLED_ALONE: ClassVar[tuple[str, ...]] = ("baseline", "advantage_clip", "ratio_clip", "importance", "coverage")

    baseline: Literal["none", "mean"] = "none"
    """On sampled tokens: subtract the batch's mean advantage, which takes away noise. Where every token is judged it leaves
    the expected gradient as it is, but for each token's own share of the mean. Where some are not (no counterpart in
    another tokenizer), it makes those neutral: without it the mean is minus the divergence, every judged token is pushed
    down a little, and what nobody judges is what remains."""
    advantage_clip: float | None = None
    """On sampled tokens: advantages are clipped to plus or minus this."""
    coverage: Covered = "all"
    """With a teacher of another tokenizer: learn from every aligned unit, or only where one token stands beside one token
    (arXiv 2610.08448)."""

    def check(self, field: str) -> None:
        super().check(field)
        if not (self.advantage_clip is None or self.advantage_clip > 0):
            raise UserError(f"{field}.advantage_clip is {self.advantage_clip}: it must be positive, or null for none")

    def policy_inputs(self, run: "RunConfig") -> dict[str, Any]:
        return {
            **({"baseline": self.baseline} if self.baseline == "mean" else {}),
            **super().policy_inputs(run),
            "advantage_clip": self.advantage_clip,
        }
