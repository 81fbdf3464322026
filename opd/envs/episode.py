"""One rollout's way through its task: the turns so far, the environment's state, and the context of the next turn."""

import asyncio
import math
from dataclasses import replace
from typing import Any

import numpy as np

from opd.contexts import Contexts
from opd.envs.environment import Environment, Message, Observation
from opd.envs.opening import blamed, open_environment, plain_messages
from opd.episodes import Reply
from opd.errors import UserError
from opd.records import Array, Finish, Prompt, Restart, Rollout, Start, Turn


class Episode:
    """A prompt without an environment is an episode of one turn."""

    def __init__(self, prompt: Prompt, opening_ids: Array, contexts: Contexts, max_turns: int | None = None) -> None:
        """`opening_ids` [c] is the prompt as the student sees it; `max_turns` the most turns that a controller allows.

        Raises `UserError` for an environment that opens the task in other words than the prompt's.
        """
        self.prompt, self.opening_ids, self.contexts = prompt, opening_ids, contexts
        self.environment: Environment | None = open_environment(prompt.task) if prompt.task is not None else None
        self.single = self.environment is None or self.environment.single_turn
        own = self.environment.max_turns if self.environment is not None else 1
        limit = prompt.task.max_turns if prompt.task is not None and prompt.task.max_turns is not None else own
        self.stops_at_limit = max_turns is not None and max_turns < limit
        self.max_turns = limit if max_turns is None else min(max_turns, limit)
        self._reset()

    def _reset(self) -> None:
        self.turns: list[Turn] = []
        self.context_ids = self.opening_ids
        self._exchanges: list[tuple[Reply, tuple[Message, ...]]] = []
        if self.environment is None or self.prompt.task is None:
            return
        environment, task = self.environment, self.prompt.task
        with blamed(self._name):
            said = environment.reset(task.data, task.seed)
        opening = plain_messages(said, self._name)
        if opening and opening != [dict(message) for message in self.prompt.messages[-len(opening) :]]:
            raise UserError(
                f"prompts.name: environment {task.environment!r} opens task {self.prompt.id} in other words than before; "
                "its messages must follow from task and seed"
            )

    def restore(self, start: Start) -> Restart:
        """Goes through the turns of an earlier rollout, but leaves at least one to be sampled.

        Where the environment does not come to the same states, or the context is full before the end, the episode is back at
        its beginning.
        """
        found: Restart = ""
        for turn in start.turns[: self.max_turns - 1]:
            found = self._repeat(turn)
            if found != "restored":
                self._reset()
                break
        return found

    def _repeat(self, turn: Turn) -> Restart:
        if not np.array_equal(self.context_ids, turn.context_ids):
            return "failed"
        try:
            finish = self.take(replace(turn, num_reused=len(turn.sampled_ids)))
        except Exception:  # whatever it raises: it is not where it was
            return "failed"
        now = self.turns[-1]
        if now.state_hash != turn.state_hash or now.observations != turn.observations:
            return "failed"
        return "restored" if finish is None else "too long" if finish == "length" else "failed"

    async def answered(self, turn: Turn) -> Finish | None:
        """As `take`; an environment that waits for something does so in a thread."""
        if self.environment is not None and getattr(self.environment, "blocking", False):
            return await asyncio.to_thread(self.take, turn)
        return self.take(turn)

    def take(self, turn: Turn) -> Finish | None:
        """The next turn: the environment answers it. Why the episode is over with it, or None where it goes on.

        A turn that was cut off is not answered, but a single answer is judged as far as it came. Raises `UserError` with the
        environment's name where it fails, or answers with what is no observation.
        """
        whole = turn.finish == "eos" or (self.single and turn.finish == "length")
        if self.environment is None or not whole:
            self.turns.append(turn)
            return turn.finish
        reply = self.contexts.read(turn.sampled_ids)
        seen = self._observed(self.environment, reply)
        with blamed(self._name):
            state_hash = self.environment.state_hash()
        if not isinstance(state_hash, str):
            raise UserError(f"{self._name}: its state_hash is {state_hash!r:.80}; it must be text")
        known = {"observations": seen.messages, "mistake": seen.mistake, "state_hash": state_hash}
        self.turns.append(replace(turn, **known))
        finish = self._finish(turn, reply, seen)
        if finish is not None:
            self.turns[-1] = replace(self.turns[-1], finish=finish)
        return finish

    def _finish(self, turn: Turn, reply: Reply, seen: Observation) -> Finish | None:
        if self.single:
            return turn.finish
        if seen.done:
            return "env"
        if len(self.turns) >= self.max_turns:
            return "stopped" if self.stops_at_limit else "length"
        self._exchanges.append((reply, seen.messages))
        self.context_ids = self.contexts.following(self.prompt, self.context_ids, turn, self._exchanges)
        return None if self.contexts.room(self.context_ids) > 0 else "length"

    def _observed(self, environment: Environment, reply: Reply) -> Observation:
        """What the environment answers, as it comes back from a checkpoint."""
        with blamed(self._name):
            seen = environment.step(reply)
        if not isinstance(seen, Observation):
            raise UserError(f"{self._name}: step() must return an `Observation`, not {seen!r:.80}")
        if not isinstance(seen.mistake, bool | np.bool_ | None):
            raise UserError(f"{self._name}: its mistake is {seen.mistake!r:.80}; it must be True, False or None")
        messages = plain_messages(seen.messages, self._name)
        if any(message["role"] == "assistant" for message in messages):
            raise UserError(f"{self._name}: it answers as 'assistant', which is the student; take user, tool or system")
        if not (messages or seen.done or self.single):
            raise UserError(f"{self._name}: it answers nothing and is not done; return messages, or done=True")
        return Observation(tuple(messages), bool(seen.done), None if seen.mistake is None else bool(seen.mistake))

    @property
    def _name(self) -> str:
        assert self.prompt.task is not None
        return f"environment {self.prompt.task.environment!r} in task {self.prompt.id}"

    def rollout(self, slot: int, restart: Restart) -> Rollout:
        """What came of it. Raises `UserError` for an outcome that is no number from 0 to 1."""
        return Rollout(self.prompt, slot, tuple(self.turns), outcome=self._outcome(), restart=restart)

    def _outcome(self) -> float | None:
        """What the verifier says; nothing of a single answer that was stopped before it could see it."""
        if self.environment is None or (self.single and self.turns[-1].finish == "stopped"):
            return None
        with blamed(self._name):
            said: Any = self.environment.outcome()
        if said is None:
            return None
        try:
            outcome = float(said)
        except (TypeError, ValueError):
            outcome = math.nan
        if not 0 <= outcome <= 1:
            raise UserError(f"{self._name}: its outcome is {said!r:.80}; it must be a number from 0 to 1")
        return outcome
