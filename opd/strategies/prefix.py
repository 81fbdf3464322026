"""Rollout controller `prefix`: fixed truncation, so that generation and loss cover the first part alone.

Fast OPD (arXiv 2602.15260): the first 5 turns of an episode, or the first 2,048 tokens of a single answer.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from opd.errors import UserError
from opd.plugins import RolloutController
from opd.records import Limits

if TYPE_CHECKING:
    from opd.config import RunConfig


@dataclass(frozen=True)
class PrefixConfig:
    """Fixed truncation."""

    turns: int | None = 5
    """Turns of an episode; null: all."""
    tokens: int | None = 2048
    """Tokens of a single answer; null: all."""


class Prefix(RolloutController):
    """See the module."""

    Config = PrefixConfig

    def __init__(self, config: PrefixConfig, run: "RunConfig") -> None:
        self.most = Limits(config.turns, config.tokens)

    @staticmethod
    def check(config: PrefixConfig, run: "RunConfig") -> None:
        if config.turns is None and config.tokens is None:
            raise UserError("rollout.prefix: with turns and tokens null it cuts nothing; leave it out")
        for name in ("turns", "tokens"):
            value = getattr(config, name)
            if value is not None and value < 1:
                raise UserError(f"rollout.prefix.{name} is {value}: it must be at least 1, or null for all")

    def limits(self, step: int) -> Limits:
        return self.most
