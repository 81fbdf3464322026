"""The rollout controllers of a run together: where rollouts start, what they may have at most, and when they stop."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from accelerate.utils import gather_object

from opd.plugins import RolloutController
from opd.records import Array, Limits, Prompt, Rollout, Start, Turn
from opd.rollouts import Plan


class Steering:
    """Every process has the same controllers, shown the same rollouts in the same order."""

    def __init__(self, controllers: Mapping[str, RolloutController], identity: str = "") -> None:
        """`identity` changes with what earlier scores depend on: tokenizers, templates, teachers."""
        self.controllers, self.identity = controllers, identity

    def __bool__(self) -> bool:
        return bool(self.controllers)

    @property
    def needs_scores(self) -> bool:
        return any(controller.needs_scores for controller in self.controllers.values())

    @property
    def notes(self) -> list[str]:
        return [note for controller in self.controllers.values() for note in controller.notes]

    def plan(self, prompt: Prompt, step: int, slot: int) -> Plan:
        """What is decided before the rollout begins. The first controller that wants another start has it."""
        starts = (controller.start(prompt, step, slot) for controller in self.controllers.values())
        limits = [controller.limits(step) for controller in self.controllers.values()]
        return Plan(
            next((start for start in starts if start is not None), Start()),
            Limits(_least(limit.turns for limit in limits), _least(limit.tokens for limit in limits)),
        )

    def limited(self, step: int) -> bool:
        """Whether a controller limits the rollouts of this step, so that none may be as long as it would be."""
        return any(controller.limits(step) != Limits() for controller in self.controllers.values())

    def landed(self, step: int, rollouts: Sequence[Rollout]) -> None:
        """Shows the controllers the rollouts of a step. To be called by every process, with its own."""
        if self.controllers:
            light = [replace(one, turns=tuple(map(_without_topk, one.turns))) for one in rollouts]
            everyones = sorted(gather_object(light), key=lambda rollout: rollout.slot)
            for controller in self.controllers.values():
                controller.landed(step, everyones)

    def figures(self) -> dict[str, float]:
        """The controllers' own metrics."""
        return {name: value for controller in self.controllers.values() for name, value in controller.figures().items()}

    def state_dict(self) -> tuple[dict[str, Any], dict[str, Array]]:
        """JSON values, and arrays by `CONTROLLER/NAME`."""
        states = {name: controller.state_dict() for name, controller in self.controllers.items()}
        arrays = {f"{name}/{key}": array for name, (_, own) in states.items() for key, array in own.items()}
        return {"identity": self.identity, "states": {name: values for name, (values, _) in states.items()}}, arrays

    def load_state_dict(self, state: Mapping[str, Any], arrays: Mapping[str, Array]) -> bool:
        """What `state_dict` returned. False where it was of other teachers, tokenizers or templates, and is forgotten."""
        for name, controller in self.controllers.items():
            own = {key.removeprefix(f"{name}/"): array for key, array in arrays.items() if key.startswith(f"{name}/")}
            controller.load_state_dict(state["states"][name], own)
            if state["identity"] != self.identity:
                controller.forget()
        return state["identity"] == self.identity


def _without_topk(turn: Turn) -> Turn:
    return replace(turn, topk_ids=None, topk_logps=None)


def _least(values: Any) -> int | None:
    return min((value for value in values if value is not None), default=None)
