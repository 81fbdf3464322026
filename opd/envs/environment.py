"""What an environment implements. It sees chat messages and tool calls, never tokens, and imports neither torch nor
transformers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from opd.episodes import Reply

Message = Mapping[str, Any]  # {"role": "user" | "tool" | "system", "content": text}


@dataclass(frozen=True)
class Task:
    """What an episode begins with.

    Example: `Task(id="calculator-0-17", data={"start": 7, "steps": ["+5", "*3"]}, seed=17)`
    """

    id: str  # names the task and its seed, and nothing else has the same one
    data: Mapping[str, Any]  # plain JSON values
    seed: int | None  # of the environment's own chance (a simulated user, say); a set without seeds is refused


@dataclass(frozen=True)
class Observation:
    """How an environment answers a reply.

    Example: `Observation(messages=({"role": "tool", "content": "12"},), mistake=False)`
    """

    messages: tuple[Message, ...] = ()  # what the student sees next; empty at the end
    done: bool = False  # the episode is over
    mistake: bool | None = None  # whether the verifier sees an error in this reply; None: it cannot tell


class Environment(Protocol):
    """One episode at a time. Everything that happens must follow from the task, its seed and the replies.

    A user's mistake in `config` raises `UserError` in `__init__`, naming the field below `prompts.options`; where the
    environment was named in another section, the user sees that one. docs/stride.md has a whole example.
    """

    Config: ClassVar[type]
    single_turn: ClassVar[bool]  # one reply ends every episode: rollouts then stop and restart within it
    restores: ClassVar[bool]  # after `reset`, the same replies lead to the same state: prefixes can be restored
    # `blocking: ClassVar[bool] = True` where a step waits for something (a process, a network): it then has a thread

    tools: Sequence[Mapping[str, Any]]  # JSON schemas, as chat templates take them
    max_turns: int  # after which the house ends an episode, where the recipe names no other number

    def __init__(self, config: Any) -> None: ...

    def tasks(self) -> Sequence[Task]:
        """All tasks that the configuration describes, always the same and in the same order."""
        ...

    def reset(self, data: Mapping[str, Any], seed: int) -> Sequence[Message]:
        """Begins an episode; the messages that open it."""
        ...

    def step(self, reply: Reply) -> Observation:
        """The student's next reply. One with `error` set, or with a call of an unknown tool, is answered by an error
        message, as a real service would; it never raises."""
        ...

    def outcome(self) -> float | None:
        """What the verifier says of the episode so far, from 0 to 1; 0.5 or more is a success. None: it says nothing."""
        ...

    def state_hash(self) -> str:
        """Digest of the whole state, hexadecimal: equal states have equal ones."""
        ...
