"""Rollout controller `horizon`: the most turns that an episode may have follow the lengths of successful ones.

Elastic Horizon (arXiv 2609.07247): of the last `window` successes, the 90th percentile of the lengths plus a margin is the
target, kept between `least` and `most`; the limit moves towards it by a share a step. Failures are trained as well, they
only tell nothing about lengths. Growth comes from the margin alone: no success is longer than the limit it was under.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from opd.envs.opening import plays_turns
from opd.episodes import SUCCESS
from opd.errors import UserError
from opd.plugins import RolloutController
from opd.records import Array, Limits, Rollout

if TYPE_CHECKING:
    from opd.config import RunConfig


@dataclass(frozen=True)
class HorizonConfig:
    """A limit that follows successful lengths."""

    start: int = 10
    """Turns that an episode may have at first."""
    least: int = 1
    """The limit never falls below."""
    most: int = 50
    """The limit never rises above."""
    margin: float = 10.0
    """Turns above the percentile, for exploring; without any the limit can only shrink."""
    percentile: float = 90.0
    """Of the successful lengths."""
    window: int = 100
    """Successes that are remembered, the latest."""
    min_successes: int = 20
    """The limit does not move before there are so many."""
    rate: float = 0.1
    """Share of the way to its target that the limit moves a step."""


class Horizon(RolloutController):
    """See the module."""

    Config = HorizonConfig

    def __init__(self, config: HorizonConfig, run: "RunConfig") -> None:
        self.config, self.limit = config, float(config.start)
        self.lengths: deque[int] = deque(maxlen=config.window)

    @staticmethod
    def check(config: HorizonConfig, run: "RunConfig") -> None:
        if not plays_turns(run):
            raise UserError("rollout.horizon counts turns: it needs prompts.type=environment, with several turns")
        if not 1 <= config.least <= config.start <= config.most:
            raise UserError(
                f"rollout.horizon: least {config.least}, start {config.start} and most {config.most} must be at least 1 and "
                "in this order"
            )
        if config.margin < 0 or not 0 <= config.percentile <= 100 or not 0 < config.rate <= 1:
            raise UserError(
                "rollout.horizon: margin must be 0 or more, percentile from 0 to 100, rate above 0 and at most 1"
            )
        if not 1 <= config.min_successes <= config.window:
            raise UserError("rollout.horizon.min_successes must be at least 1 and at most window")

    def limits(self, step: int) -> Limits:
        return Limits(turns=round(self.limit))

    def landed(self, step: int, rollouts: Sequence[Rollout]) -> None:
        config = self.config
        self.lengths += [len(rollout.turns) for rollout in rollouts if _succeeded(rollout)]
        if len(self.lengths) >= config.min_successes:
            target = float(np.percentile(self.lengths, config.percentile)) + config.margin
            target = min(max(target, config.least), config.most)
            self.limit = (1 - config.rate) * self.limit + config.rate * target

    def figures(self) -> Mapping[str, float]:
        return {"horizon": self.limit}

    def state_dict(self) -> tuple[dict[str, Any], dict[str, Array]]:
        return {"limit": self.limit, "lengths": list(self.lengths)}, {}

    def load_state_dict(self, state: Mapping[str, Any], arrays: Mapping[str, Array]) -> None:
        self.limit, self.lengths = state["limit"], deque(state["lengths"], maxlen=self.config.window)


def _succeeded(rollout: Rollout) -> bool:
    """Whole episodes only: one that a controller stopped says nothing about how long a success is."""
    return rollout.finish != "stopped" and rollout.outcome is not None and rollout.outcome >= SUCCESS
