"""Rollout controller `stride`: stop where the teacher's support collapses, start again at the weakest correct turn.

STRIDE (arXiv 2609.14636). Stopping is `early_stop`'s. Of each task the last rollout is kept with its turns' mean log-probs
under the teacher. The leading turns above a quality threshold count as correct; the next rollout of the task reuses those
before the weakest of them as context, without a gradient, and is sampled from there. In a single answer chunks take the
place of turns.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from opd.envs.opening import environment_class
from opd.errors import UserError
from opd.records import Array, Prompt, Rollout, Start, Turn
from opd.stopping import restart_index
from opd.strategies.early_stop import EarlyStop, EarlyStopConfig, check_threshold
from opd.students.prefix_buffer import PrefixBuffer
from opd.units import units_of

if TYPE_CHECKING:
    from opd.config import RunConfig


@dataclass(frozen=True)
class StrideConfig(EarlyStopConfig):
    """Early stops, and a prefix buffer."""

    restart: bool = True
    """Start again from the buffer; without it only the stops remain."""
    keep_above: float | None = -0.8
    """A turn (or chunk) counts as correct if the teacher's mean log-prob of it is above this, in nats a token. null: all do,
    the paper's setting for maths; 0: none does."""
    fresh_probability: float = 0.0
    """Chance of starting at the beginning all the same, so that the first turns are trained again now and then."""
    max_prefix_age: int | None = None
    """Prefixes with a token that is more than so many steps old are not used; null: any age."""
    max_buffer_mib: int = 256
    """Size of the buffer; the tasks visited longest ago go first."""


class Stride(EarlyStop):
    """See the module."""

    Config = StrideConfig
    section = "rollout.stride"

    def __init__(self, config: StrideConfig, run: "RunConfig") -> None:
        super().__init__(config, run)
        self.config, self.seed = config, run.seed
        self.keep_above = -math.inf if config.keep_above is None else config.keep_above
        self.restarts = config.restart
        if config.restart and not _restores(run):
            self.restarts = False
            self.notes = [*self.notes, "stride: this environment cannot be brought back to an earlier state: no restarts"]
        elif config.restart and self.keep_above > 0:
            above = f"rollout.stride.keep_above is {self.keep_above:g}, above every log-prob"
            self.notes = [*self.notes, f"WARNING: {above}: nothing is ever kept, and there are no restarts"]
        self.needs_scores = self.needs_scores or self.restarts
        if not self.needs_scores:
            self.notes = [*self.notes, "stride: stop_below is null and there are no restarts: it changes nothing"]
        self.buffer = PrefixBuffer(config.max_buffer_mib * 2**20)

    @staticmethod
    def check(config: StrideConfig, run: "RunConfig") -> None:
        for name in ("stop_below", "keep_above"):
            check_threshold(f"rollout.stride.{name}", getattr(config, name))
        if not 0 <= config.fresh_probability <= 1:
            raise UserError(f"rollout.stride.fresh_probability is {config.fresh_probability}: it is a share, from 0 to 1")
        if config.max_prefix_age is not None and config.max_prefix_age < 1:
            raise UserError(f"rollout.stride.max_prefix_age is {config.max_prefix_age}: it must be at least 1 step, or null")
        if config.max_buffer_mib < 1:
            raise UserError(f"rollout.stride.max_buffer_mib is {config.max_buffer_mib}: it must be at least 1")
        if "early_stop" in run.rollout:
            raise UserError("rollout: stride stops by itself; leave early_stop out, or stride")

    def start(self, prompt: Prompt, step: int, slot: int) -> Start | None:
        kept = self.buffer.get(prompt.id) if self.restarts else None
        if kept is None:
            return None
        if self.config.fresh_probability and self._chance(step, slot) < self.config.fresh_probability:
            return None
        chunk = self.chunk if prompt.single_turn else None
        num = restart_index(units_of(kept, chunk), self.keep_above)
        if not num:
            return None
        first = kept[:num] if chunk is None else (first_tokens(kept[0], num * chunk),)
        oldest = min(version for turn in first for _, version in turn.versions)
        if self.config.max_prefix_age is not None and step - oldest > self.config.max_prefix_age:
            return None
        return Start(turns=first) if chunk is None else Start(tokens=first[0])

    def landed(self, step: int, rollouts: Sequence[Rollout]) -> None:
        super().landed(step, rollouts)
        if self.restarts:
            for rollout in rollouts:  # of several of one task the last slot's stays
                self.buffer.put(rollout.prompt.id, rollout.turns)

    def forget(self) -> None:
        super().forget()
        self.buffer.clear()

    def figures(self) -> Mapping[str, float]:
        sizes = {"buffer_tasks": float(len(self.buffer)), "buffer_mib": round(self.buffer.num_bytes / 2**20, 3)}
        sizes |= {"buffer_evicted": float(self.buffer.num_evicted)}
        return {**super().figures(), **(sizes if self.restarts else {})}

    def state_dict(self) -> tuple[dict[str, Any], dict[str, Array]]:
        state, _ = super().state_dict()
        buffer, arrays = self.buffer.state_dict()
        return {**state, "buffer": buffer}, arrays

    def load_state_dict(self, state: Mapping[str, Any], arrays: Mapping[str, Array]) -> None:
        super().load_state_dict(state, arrays)
        self.buffer.load_state_dict(state["buffer"], arrays)

    def _chance(self, step: int, slot: int) -> float:
        """In [0, 1), of the slot alone, so that a resumed run and every process decide alike."""
        return float(np.random.default_rng([self.seed, step, slot, 0x57]).random())


def first_tokens(turn: Turn, length: int) -> Turn:
    """The first tokens of a single answer, as the beginning of another."""
    assert 0 < length < len(turn.sampled_ids)
    return replace(turn.stopped_at(length), num_reused=0, num_discarded=0)


def _restores(run: "RunConfig") -> bool:
    if run.prompts["type"] != "environment":
        return True
    return bool(environment_class(run.prompts["config"].name).restores)
