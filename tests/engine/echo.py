"""Environments for engine tests, and `opd` with them: `python echo.py train ...`."""

import hashlib
import random
import sys
import types
from dataclasses import dataclass

from opd.envs.environment import Observation, Task
from opd.registry import ENVIRONMENTS


@dataclass(frozen=True)
class EchoConfig:
    tasks: int = 8
    seed: int = 0
    length: int = 4
    """Turns of an episode."""


class Echo:
    """Says two letters that follow from all that was said to it; succeeds where the last reply has an even digest."""

    Config = EchoConfig
    single_turn = False
    restores = True
    tools = ()
    max_turns = 6

    def __init__(self, config):
        self.config = config

    def tasks(self):
        seed, length = self.config.seed, self.config.length
        words = ["".join(random.Random(f"{seed}-{i}").choices("uvwxyz", k=2)) for i in range(self.config.tasks)]
        return [Task(f"echo-{seed}-{i}", {"word": word, "length": length}, seed=i) for i, word in enumerate(words)]

    def reset(self, data, seed):
        self.length, self.said = data["length"], [f"{seed}"]
        return [{"role": "user", "content": data["word"]}]

    def step(self, reply):
        self.said.append(reply.content)
        letters = "".join("uvwxyz"[int(digit, 16) % 6] for digit in self.state_hash()[:2])
        done = len(self.said) > self.length
        messages = () if done else ({"role": "user", "content": letters},)
        return Observation(messages, done=done, mistake=len(reply.content) > 3)

    def outcome(self):
        return float(int(self.state_hash(), 16) % 2)

    def state_hash(self):
        return hashlib.sha256("|".join(self.said).encode()).hexdigest()


class Forgetful(Echo):
    """Cannot be brought back to an earlier state."""

    restores = False


class Drifting(Echo):
    """Says that it can be restored, but its states are never the same again."""

    count = 0

    def reset(self, data, seed):
        opening = super().reset(data, seed)
        Drifting.count += 1
        self.said.append(str(Drifting.count))
        self.length += 1
        return opening


def register():
    """Makes `echo`, `forgetful` and `drifting` known; undone by deleting them from `ENVIRONMENTS.builtin`."""
    module = types.ModuleType("echo_environments")
    for kind in (Echo, Forgetful, Drifting):
        setattr(module, kind.__name__, kind)
        ENVIRONMENTS.builtin[kind.__name__.lower()] = f"{module.__name__}:{kind.__name__}"
    sys.modules[module.__name__] = module


if __name__ == "__main__":
    register()
    from opd.cli import main

    main()
