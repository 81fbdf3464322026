"""Term maker `reverse_kl`: plain on-policy distillation.

The student is pulled to the teacher on its own rollouts, token by token (Agarwal et al. 2023, arXiv 2306.13649; Lu et
al. 2025, "On-Policy Distillation"). `opd.strategies.comparison` has the three forms of the comparison.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from opd.judging import SpanRule
from opd.plugins import Models
from opd.records import Rollout, Term
from opd.strategies.comparison import Comparison, ComparisonConfig

if TYPE_CHECKING:
    from opd.config import RunConfig


@dataclass(frozen=True)
class ReverseKLConfig(ComparisonConfig):
    """Plain on-policy distillation."""

    SAMPLED_ALONE: ClassVar[tuple[str, ...]] = ("span_reduce", *ComparisonConfig.SAMPLED_ALONE)

    span_reduce: SpanRule = "split"
    """For `sampled` with a teacher of another tokenizer: a unit's log-probs as their sum, shared equally among the student's
    tokens, or as their mean, which is biased where the two cut text into unlike numbers of tokens."""


class ReverseKL(Comparison):
    """See the module."""

    Config = ReverseKLConfig

    def __init__(self, config: ReverseKLConfig, run: "RunConfig") -> None:
        super().__init__(config, run)
        self.across_tokenizers = config.compared == "sampled"
        self.span_reduce: SpanRule = config.span_reduce

    @staticmethod
    def check(config: ReverseKLConfig, run: "RunConfig") -> None:
        config.check_for("terms.reverse_kl", run)

    async def collect(self, rollout: Rollout, models: Models) -> list[Term]:
        model = models.teacher_for(rollout.prompt)
        return [await self.compare(model, rollout, models, self.span_reduce)]
