"""Rollout controller `early_stop`: a rollout ends where the teacher's support for it has collapsed.

STRIDE's rule alone (arXiv 2609.14636): after each turn, stop if the teacher's mean log-probs of the new turns add up to less
than a threshold; the turn that triggers it is trained. In a single answer the same holds of its tokens' log-probs, looked at
after every chunk.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from opd.errors import UserError
from opd.plugins import RolloutController
from opd.records import Array, Progress, Rollout, Unit
from opd.stopping import Stat, statistic
from opd.units import units_of

if TYPE_CHECKING:
    from opd.config import RunConfig

MU_DECAY = 0.9  # of the running mean that `excess` is measured against, a step


@dataclass(frozen=True)
class EarlyStopConfig:
    """When a rollout stops."""

    stop_below: float | None = -1.0
    """The statistic below which a rollout stops, in nats; its scale depends on the task and the statistic (`opd replay`
    tries thresholds on recorded rollouts). null never stops."""
    stop_stat: Literal["cumulative", "mean", "min", "excess"] = "cumulative"
    """Of the new turns' mean log-probs: their sum (the paper's, which also counts turns), their mean, the smallest, or the
    sum of what each is above or below the running mean. In a single answer sum and excess are taken over tokens."""


class EarlyStop(RolloutController):
    """See the module."""

    Config = EarlyStopConfig
    section: ClassVar[str] = "rollout.early_stop"  # of the recipe, for messages

    def __init__(self, config: EarlyStopConfig, run: "RunConfig") -> None:
        self.threshold = -math.inf if config.stop_below is None else config.stop_below
        self.stat: Stat = config.stop_stat
        self.chunk = run.sampler.chunk_tokens
        self.needs_scores = self.threshold > -math.inf
        self.mu: float | None = None  # running mean of what `excess` adds up: of turns, or of tokens
        if self.threshold >= 0 and self.stat != "excess":
            field = f"{self.section}.stop_below"
            self.notes = [f"WARNING: {field} is {self.threshold:g}: every rollout stops after one new turn or chunk"]

    @staticmethod
    def check(config: EarlyStopConfig, run: "RunConfig") -> None:
        check_threshold("rollout.early_stop.stop_below", config.stop_below)

    def stops(self, progress: Progress) -> bool:
        return self.needs_scores and self.collapsed(progress)

    def collapsed(self, progress: Progress) -> bool:
        """Whether the statistic is below the threshold. `excess` stops nothing before it has seen a step."""
        judged = any(unit.num_judged for unit in progress.units if not unit.reused)
        if not judged or (self.stat == "excess" and self.mu is None):
            return False
        whole_turns = not progress.prompt.single_turn
        return statistic(progress.units, self.stat, whole_turns, self.mu or 0.0) < self.threshold

    def landed(self, step: int, rollouts: Sequence[Rollout]) -> None:
        if self.stat == "excess":
            values = [value for rollout in rollouts for value in self._values(rollout)]
            if values:
                mean = sum(values) / len(values)
                self.mu = mean if self.mu is None else MU_DECAY * self.mu + (1 - MU_DECAY) * mean

    def _values(self, rollout: Rollout) -> Sequence[float]:
        """Means of the new turns, or the new tokens' log-probs."""
        new = [unit for unit in self.units(rollout) if not unit.reused]
        if not rollout.prompt.single_turn:
            return [mean for unit in new if (mean := unit.mean) is not None]
        judged = sum(unit.num_judged for unit in new)
        return [sum(unit.logp_sum for unit in new) / judged] * judged if judged else []

    def units(self, rollout: Rollout) -> Sequence[Unit]:
        """The rollout's units as its teacher saw them."""
        return units_of(rollout.turns, self.chunk if rollout.prompt.single_turn else None)

    def figures(self) -> Mapping[str, float]:
        return {} if self.mu is None else {"stop_mu": self.mu}

    def forget(self) -> None:
        self.mu = None

    def state_dict(self) -> tuple[dict[str, Any], dict[str, Array]]:
        return {"mu": self.mu}, {}

    def load_state_dict(self, state: Mapping[str, Any], arrays: Mapping[str, Array]) -> None:
        self.mu = state.get("mu")


def check_threshold(field: str, value: float | None) -> None:
    """Raises `UserError` naming `field` for NaN, which nothing is above or below."""
    if value is not None and math.isnan(value):
        raise UserError(f"{field} is nan: it must be a number of nats, or null for no threshold")
