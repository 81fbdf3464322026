"""One rollout's way through its task: the turns so far, the environment's state, and the context of the next turn."""

from dataclasses import replace

import numpy as np

from opd.contexts import Contexts
from opd.envs.environment import Environment, Observation
from opd.envs.opening import open_environment
from opd.episodes import Reply
from opd.records import Array, Finish, Prompt, Restart, Rollout, Start, Turn


class Episode:
    """A prompt without an environment is an episode of one turn."""

    def __init__(self, prompt: Prompt, opening_ids: Array, contexts: Contexts, max_turns: int | None = None) -> None:
        """`opening_ids` [c] is the prompt as the student sees it; `max_turns` the most turns that a controller allows."""
        self.prompt, self.opening_ids, self.contexts = prompt, opening_ids, contexts
        self.environment: Environment | None = open_environment(prompt.task) if prompt.task is not None else None
        self.single = self.environment is None or self.environment.single_turn
        own = self.environment.max_turns if self.environment is not None else 1
        limit = prompt.task.max_turns if prompt.task is not None and prompt.task.max_turns is not None else own
        self.max_turns, self.stops_at_limit = (
            (limit, False) if max_turns is None or max_turns >= limit else (max_turns, True)
        )
        self._reset()

    def _reset(self) -> None:
        self.turns: list[Turn] = []
        self.context_ids = self.opening_ids
        self._exchanges: list[tuple[Reply, tuple]] = []
        if self.environment is not None and self.prompt.task is not None:
            self.environment.reset(self.prompt.task.data, self.prompt.task.seed)

    def restore(self, start: Start) -> Restart:
        """Goes through the turns of an earlier rollout, but leaves at least one to be sampled.

        Where the environment does not come to the same states, or the context is full before the end, the episode is back at
        its beginning.
        """
        for turn in start.turns[: self.max_turns - 1]:
            same = np.array_equal(self.context_ids, turn.context_ids)
            finish = self.take(replace(turn, num_reused=len(turn.sampled_ids))) if same else "stopped"
            now = self.turns[-1] if same else None
            alike = now is not None and now.state_hash == turn.state_hash and now.observations == turn.observations
            if finish is not None or not alike:
                self._reset()
                return "too long" if finish == "length" and alike else "failed"
        return "restored"

    def take(self, turn: Turn) -> Finish | None:
        """The next turn: the environment answers it. Why the episode is over with it, or None where it goes on."""
        finish = self._answer(turn) if self.environment is not None and turn.finish == "eos" else turn.finish
        if self.environment is None or turn.finish != "eos":
            self.turns.append(turn)
        if finish is not None:
            self.turns[-1] = replace(self.turns[-1], finish=finish)
        return finish

    def _answer(self, turn: Turn) -> Finish | None:
        assert self.environment is not None
        reply = self.contexts.read(turn.sampled_ids)
        seen: Observation = self.environment.step(reply)
        known = {"observations": seen.messages, "mistake": seen.mistake, "state_hash": self.environment.state_hash()}
        self.turns.append(replace(turn, **known))
        if seen.done:
            return "eos" if self.single else "env"
        if len(self.turns) >= self.max_turns:
            return "stopped" if self.stops_at_limit else "length"
        self._exchanges.append((reply, seen.messages))
        self.context_ids = self.contexts.following(self.prompt, self.context_ids, turn, self._exchanges)
        return None if self.contexts.room(self.context_ids) > 0 else "length"

    def rollout(self, slot: int, restart: Restart) -> Rollout:
        """What came of it."""
        outcome = self.environment.outcome() if self.environment is not None else None
        return Rollout(self.prompt, slot, tuple(self.turns), outcome=outcome, restart=restart)
