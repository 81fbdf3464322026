"""Records of episodes: what an environment is asked to play, and what the student said to it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

SUCCESS = 0.5  # the least outcome of an episode that is a success


@dataclass(frozen=True)
class EnvironmentTask:
    """An episode of an environment: what it begins with, and how its conversation is kept.

    Example: `EnvironmentTask("calculator", data={"start": 7, "steps": ["+5"]}, seed=3)`
    """

    environment: str  # a name in `opd.registry.ENVIRONMENTS`
    data: Mapping[str, Any]  # the task, as plain JSON values
    seed: int  # of the environment's own chance: a simulated user, say
    options: Mapping[str, Any] = field(default_factory=dict)  # the environment's configuration
    context: Literal["append_only", "rerender"] = "append_only"  # see `opd.envs.dialogue`
    max_turns: int | None = None  # the student's turns; None leaves it to the environment
    single_turn: bool = False  # one reply ends every episode: what `Environment.single_turn` says


@dataclass(frozen=True)
class ToolCall:
    """A call that the student made.

    Example: `ToolCall("calculator", {"expression": "7+5"})`
    """

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class Reply:
    """What the student said in one turn, as read from its tokens.

    Example: `Reply(content="", calls=(ToolCall("calculator", {"expression": "7+5"}),))`
    """

    content: str  # the text outside of calls
    calls: tuple[ToolCall, ...] = ()
    error: str | None = None  # what is wrong with a call that could not be read; `calls` is then empty

    @property
    def message(self) -> dict[str, Any]:
        """As a chat message."""
        calls = [{"type": "function", "function": {"name": c.name, "arguments": dict(c.arguments)}} for c in self.calls]
        return {"role": "assistant", "content": self.content, **({"tool_calls": calls} if calls else {})}
