"""Environment `calculator`: a chain of operations modulo 10, one tool call each; the tiny family can learn it.

The user message has a digit and the operations on it, `7+5*3-2`, evaluated from left to right. The student calls the tool
once for each, always with the last result (`7+5` gives `2`, then `2*3`), and then replies with the answer, `4`. No
arithmetic is needed: the task is to copy the right operation at each turn, and one mistake spoils what follows. Each
operation maps the digits one to one, so that results are spread evenly and chance is 10 %.
"""

import hashlib
import json
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from opd.envs.environment import Message, Observation, Task
from opd.episodes import Reply, ToolCall
from opd.errors import UserError

MODULUS = 10
OPERANDS = {"+": "123456789", "-": "123456789", "*": "379"}  # by the others, products would crowd on few digits
TOOL = "calculator"
ERROR = "error"  # one word, for which the tiny family has a token
SPARE_TURNS = 2  # beyond one for each operation and one for the answer
EXPRESSION = re.compile(r"\s*([0-9])\s*([-+*])\s*([0-9])\s*")


@dataclass(frozen=True)
class CalculatorConfig:
    """Drawn chains of operations, the same ones for the same seed; of more tasks, the first ones are the same."""

    tasks: int = 512
    """How many there are."""
    seed: int = 0
    """Of their operations."""
    length: int = 10
    """Operations in a chain; an episode has one turn more."""
    instruction: str = "{steps}"
    """The user message, with the chain in the place of {steps}; models other than the tiny family need to be told more."""


class Calculator:
    """See the module. An error observation is the word `error`, and the episode goes on."""

    Config = CalculatorConfig
    single_turn = False
    restores = True
    tools: Sequence[Mapping[str, Any]] = (
        {
            "type": "function",
            "function": {
                "name": TOOL,
                "description": "Computes one operation on two digits, modulo 10.",
                "parameters": {
                    "type": "object",
                    "properties": {
                        "expression": {"type": "string", "description": "digit, one of + - *, digit; for example 7+5"}
                    },
                    "required": ["expression"],
                },
            },
        },
    )

    def __init__(self, config: CalculatorConfig) -> None:
        for field in ("tasks", "length"):
            if getattr(config, field) < 1:
                raise UserError(f"prompts.options.{field} is {getattr(config, field)} and must be at least 1")
        if "{steps}" not in config.instruction:
            raise UserError("prompts.options.instruction has no {steps}: write it where the operations are to stand")
        self.config = config
        self.max_turns = config.length + 1 + SPARE_TURNS

    def tasks(self) -> Sequence[Task]:
        """See `opd.envs.environment.Environment.tasks`."""
        return [self._task(i) for i in range(self.config.tasks)]

    def _task(self, index: int) -> Task:
        name = f"calculator-{self.config.seed}-{index}"
        return Task(name, drawn(random.Random(name), self.config.length), seed=index)

    def reset(self, data: Mapping[str, Any], seed: int) -> Sequence[Message]:
        """See `opd.envs.environment.Environment.reset`. Nothing here is left to chance, so `seed` changes nothing."""
        self.start, self.steps = int(data["start"]), [str(step) for step in data["steps"]]
        self.calls: list[str] = []  # of the true chain: the expressions to come, in order
        value = self.start
        for step in self.steps:
            self.calls.append(f"{value}{step}")
            value = _result(self.calls[-1])
        self.value = str(value)
        self.num_right = 0  # calls of the true chain made so far
        self.history: list[list[str]] = []  # what was called or answered, and what came of it
        self.answer: str | None = None
        return [
            {"role": "user", "content": self.config.instruction.replace("{steps}", f"{self.start}{''.join(self.steps)}")}
        ]

    def step(self, reply: Reply) -> Observation:
        """See `opd.envs.environment.Environment.step`. A mistake is any call but the next one of the true chain, and a wrong
        answer; an answer that comes early and is right is none."""
        if self.answer is not None:
            return Observation(done=True)
        if not reply.calls and reply.error is None:
            self.answer = reply.content.strip()
            self.history.append([self.answer])
            return Observation(done=True, mistake=self.answer != self.value)
        if reply.error is not None:
            self.history.append([ERROR])
            return Observation(({"role": "tool", "content": ERROR},), mistake=True)
        before = self.num_right
        contents = [self._called(call) for call in reply.calls]
        messages = tuple({"role": "tool", "content": content} for content in contents)
        return Observation(messages, mistake=self.num_right - before < len(contents))

    def _called(self, call: ToolCall) -> str:
        """What the tool answers."""
        expression = call.arguments.get("expression")
        parsed = EXPRESSION.fullmatch(expression) if isinstance(expression, str) else None
        if call.name != TOOL or parsed is None:
            self.history.append([ERROR])
            return ERROR
        plain = "".join(parsed.groups())
        result = str(_result(plain))
        self.num_right += self.calls[self.num_right : self.num_right + 1] == [plain]
        self.history.append([plain, result])
        return result

    def outcome(self) -> float | None:
        """See `opd.envs.environment.Environment.outcome`: 1.0 for the true value as the answer, else 0.0."""
        return float(self.answer == self.value)

    def state_hash(self) -> str:
        """See `opd.envs.environment.Environment.state_hash`. All errors are alike, since all are answered alike."""
        state = [self.start, self.steps, self.history]
        return hashlib.sha256(json.dumps(state).encode()).hexdigest()


def drawn(rng: random.Random, length: int) -> dict[str, Any]:
    """The data of a task."""
    operators = rng.choices("+-*", k=length)
    steps = [operator + rng.choice(OPERANDS[operator]) for operator in operators]
    return {"start": rng.randrange(MODULUS), "steps": steps}


def _result(expression: str) -> int:
    """Of `digit operator digit`, modulo 10."""
    left, operator, right = int(expression[0]), expression[1], int(expression[2])
    return {"+": left + right, "-": left - right, "*": left * right}[operator] % MODULUS
