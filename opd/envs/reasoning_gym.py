"""Environment `reasoning_gym`: the tasks of reasoning-gym (extra `gym`), each a question that takes one reply.

The verifier is the task's own, on the answer that the reply commits to: a box, an `<answer>` element or a final phrase. It
may give part of the credit, where `opd eval` counts full credit only.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from omegaconf import MISSING

from opd.envs.environment import Message, Observation, Task
from opd.episodes import SUCCESS, Reply
from opd.errors import UserError
from opd.eval import gym
from opd.eval.pool import WorkerPool

JUDGING_LIMIT_S = 5.0  # a verifier may try to compute `9**9**9`


@dataclass(frozen=True)
class ReasoningGymConfig:
    """One of reasoning-gym's task sets."""

    task: str = MISSING
    """Its name there, such as `chain_sum`; `composite` mixes several."""
    size: int = 100
    """How many problems."""
    seed: int = 0
    """Of the problems."""
    config: dict[str, Any] = field(default_factory=dict)
    """What the task takes, such as `max_terms: 4`; `composite` takes `datasets`, a list of `name`, `weight` and `config`."""


class ReasoningGym:
    """See the module. Verifiers run in processes of their own; `step` waits for them."""

    Config = ReasoningGymConfig
    single_turn = True
    restores = True
    blocking = True  # verifiers run in worker processes
    tools: Sequence[Mapping[str, Any]] = ()
    max_turns = 1

    def __init__(self, config: ReasoningGymConfig) -> None:
        for name in ("size", "seed"):
            if getattr(config, name) < (least := int(name == "size")):
                raise UserError(f"prompts.options.{name} is {getattr(config, name)}: it must be at least {least}")
        gym.check_name(config.task, "prompts.options.task")
        self.config = config

    def tasks(self) -> Sequence[Task]:
        """See `opd.envs.environment.Environment.tasks`. Raises `UserError` for a `config` that the task refuses."""
        config = self.config
        data = {"task": config.task, "size": config.size, "seed": config.seed, "config": config.config}
        found = _entries(data)
        return [Task(f"{config.task}-{config.seed}-{i}", {**data, "index": i}, config.seed) for i in range(len(found))]

    def reset(self, data: Mapping[str, Any], seed: int) -> Sequence[Message]:
        """See `opd.envs.environment.Environment.reset`. The data say all, so `seed` changes nothing."""
        self.data, self.entry = dict(data), _entries(data)[data["index"]]
        self.replies: list[str] = []
        self.credit = 0.0
        return [{"role": "user", "content": self.entry["question"]}]

    def step(self, reply: Reply) -> Observation:
        """See `opd.envs.environment.Environment.step`. There are no tools, so a call is no answer."""
        if not self.replies:
            asked = (reply.content, self.entry, self.data["task"], self.data["config"])
            self.credit = _judges().run([asked])[0] or 0.0  # None: it took too long
        self.replies.append(reply.content)
        return Observation(done=True, mistake=self.credit < SUCCESS)

    def outcome(self) -> float | None:
        """See `opd.envs.environment.Environment.outcome`."""
        return self.credit

    def state_hash(self) -> str:
        """See `opd.envs.environment.Environment.state_hash`."""
        return hashlib.sha256(json.dumps([self.data, self.replies], sort_keys=True).encode()).hexdigest()


def _entries(data: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    return gym.entries(data["task"], data["size"], data["seed"], data["config"], "prompts.options.config")


@lru_cache(maxsize=1)
def _judges() -> WorkerPool:
    return WorkerPool(_judge, num_workers=2, limit_s=JUDGING_LIMIT_S)


def _judge():
    """What a worker does: `opd.eval.gym.credit`, once reasoning-gym is imported, which does not count as judging."""
    import reasoning_gym  # noqa: F401

    return _credit


def _credit(asked: tuple[str, Mapping[str, Any], str, Mapping[str, Any]]) -> float:
    return gym.credit(*asked)
