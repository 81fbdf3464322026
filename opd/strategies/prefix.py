"""Rollout controller `prefix`: fixed truncation, so that generation and loss cover the first part alone.

Fast OPD (arXiv 2602.15260): the first 5 turns of an episode, or the first 2,048 tokens of a single answer.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from opd.envs.opening import plays_turns
from opd.errors import UserError
from opd.plugins import RolloutController
from opd.records import Limits

if TYPE_CHECKING:
    from opd.config import RunConfig


@dataclass(frozen=True)
class PrefixConfig:
    """Fixed truncation."""

    turns: int | None = 5
    """Turns of an episode; without effect on single answers."""
    tokens: int | None = 2048
    """Tokens of a single answer; without effect on episodes."""


class Prefix(RolloutController):
    """See the module."""

    Config = PrefixConfig

    def __init__(self, config: PrefixConfig, run: "RunConfig") -> None:
        self.most = Limits(config.turns, config.tokens)

    @staticmethod
    def check(config: PrefixConfig, run: "RunConfig") -> None:
        for name in ("turns", "tokens"):
            value = getattr(config, name)
            if value is not None and value < 1:
                raise UserError(f"rollout.prefix.{name} is {value}: it must be at least 1, or null for all")
        cut, other, what = ("turns", "tokens", "episodes") if plays_turns(run) else ("tokens", "turns", "single answers")
        if getattr(config, other) not in (None, getattr(PrefixConfig, other)):
            raise UserError(f"rollout.prefix.{other} has no effect on {what}, which rollout.prefix.{cut} cuts; leave it out")
        if getattr(config, cut) is None:
            raise UserError(f"rollout.prefix.{cut} is null, so that it cuts nothing of {what}; leave prefix out")

    def limits(self, step: int) -> Limits:
        return self.most
