"""Rollout controller `curriculum`: the number of turns grows with the steps.

TCOD, front to back (arXiv 2604.24005): k = min(k_start + floor(t / eta), t_max) turns at step t.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from opd.envs.opening import plays_turns
from opd.errors import UserError
from opd.plugins import RolloutController
from opd.records import Limits

if TYPE_CHECKING:
    from opd.config import RunConfig


@dataclass(frozen=True)
class CurriculumConfig:
    """A curriculum of turn depth."""

    start: int = 1
    """Turns at the first step."""
    every: int = 10
    """Steps until there is one more."""
    most: int = 50
    """Turns at the end."""


class Curriculum(RolloutController):
    """See the module."""

    Config = CurriculumConfig

    def __init__(self, config: CurriculumConfig, run: "RunConfig") -> None:
        self.config, self.turns = config, config.start

    @staticmethod
    def check(config: CurriculumConfig, run: "RunConfig") -> None:
        for name in ("start", "every"):
            if (value := getattr(config, name)) < 1:
                raise UserError(f"rollout.curriculum.{name} is {value}: it must be at least 1")
        if config.most < config.start:
            raise UserError(f"rollout.curriculum.most is {config.most}: it must be at least start, {config.start}")
        if not plays_turns(run):
            raise UserError(
                "rollout.curriculum counts turns: it needs prompts.type=environment with episodes of several turns"
            )

    def limits(self, step: int) -> Limits:
        return Limits(turns=min(self.config.start + step // self.config.every, self.config.most))

    def landed(self, step: int, rollouts: object) -> None:
        self.turns = self.limits(step).turns or 0

    def figures(self) -> Mapping[str, float]:
        return {"curriculum_turns": float(self.turns)}
