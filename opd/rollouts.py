"""From a prompt to a rollout: turns are sampled and answered until the task, a limit or a controller ends it."""

from contextlib import aclosing
from dataclasses import dataclass, field, replace

import numpy as np

from opd.contexts import Contexts
from opd.envs.episode import Episode
from opd.records import Array, Chunk, Limits, Prompt, Restart, Rollout, SampleRequest, Sampling, Start, Turn
from opd.students.noise import slot_seed
from opd.students.sampler import Sampler
from opd.watch import Watch


@dataclass(frozen=True)
class Plan:
    """What the controllers want of a rollout before it begins."""

    start: Start = field(default_factory=Start)
    limits: Limits = field(default_factory=Limits)


NO_PLAN = Plan()


class InPlay:
    """How many rollouts are being sampled: while there are any, more requests to the teachers are on their way."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> None:
        self.count += 1

    def __exit__(self, *_: object) -> None:
        self.count -= 1


@dataclass(frozen=True)
class Player:
    """Plays prompts with a sampler. `in_play` counts the rollouts of all players that share it."""

    sampler: Sampler
    contexts: Contexts
    sampling: Sampling
    in_play: InPlay

    @property
    def busy(self) -> bool:
        """Whether rollouts are being sampled."""
        return self.in_play.count > 0

    async def play(
        self, prompt: Prompt, slot: int, seed: int, plan: Plan = NO_PLAN, watch: Watch | None = None
    ) -> Rollout | None:
        """One rollout; None for a prompt that leaves no room for an answer.

        Turn k draws its noise from (seed, k); the first from `seed` alone.
        """
        opening_ids = self.contexts(prompt)
        if opening_ids is None:
            return None
        with self.in_play:
            try:
                return await self._play(prompt, opening_ids, slot, seed, plan, watch)
            finally:
                if watch is not None:
                    await watch.close()

    async def _play(
        self, prompt: Prompt, opening_ids: Array, slot: int, seed: int, plan: Plan, watch: Watch | None
    ) -> Rollout:
        episode = Episode(prompt, opening_ids, self.contexts, plan.limits.turns)
        limit = plan.limits.tokens if episode.single else None
        if limit is not None and limit >= self.contexts.room(opening_ids):
            limit = None  # the recipe's own comes first
        reused, restart = self._start(episode, plan.start, limit)
        finish = None
        while finish is None:
            number, room = len(episode.turns), self.contexts.room(episode.context_ids)
            room = room if limit is None else limit
            turn = await self._turn(episode, slot_seed(seed, number) if number else seed, room, reused, watch)
            if turn.finish == "length" and len(turn.sampled_ids) == limit:
                turn = replace(turn, finish="stopped")
            finish = await episode.answered(turn)
            reused = None
            if finish is None and watch is not None and watch.stopped_at is not None:
                finish = "stopped"
                episode.turns[-1] = replace(episode.turns[-1], finish=finish)
        return episode.rollout(slot, restart)

    def _start(self, episode: Episode, start: Start, limit: int | None) -> tuple[Turn | None, Restart]:
        """(the turn whose tokens the first one begins with, what became of the prefix)."""
        if start.tokens is None:
            return None, episode.restore(start) if start.turns else ""
        if not np.array_equal(start.tokens.context_ids, episode.context_ids):
            return None, "failed"  # another prompt by the same id
        room = self.contexts.room(episode.context_ids) if limit is None else limit
        return (start.tokens, "restored") if len(start.tokens.sampled_ids) < room else (None, "too long")

    async def _turn(self, episode: Episode, seed: int, room: int, reused: Turn | None, watch: Watch | None) -> Turn:
        """The next turn, of which the tokens of `reused` come first."""
        context_ids, prefix = episode.context_ids, np.zeros(0, np.int32) if reused is None else reused.sampled_ids
        if watch is not None:
            watch.begin(episode.turns, context_ids, reused)
        chunks: list[Chunk] = []
        shown, room = np.concatenate([context_ids, prefix]), room - len(prefix)
        request = SampleRequest(shown, seed, room, self.sampling, episode=not episode.single)
        async with aclosing(self.sampler.generate(request)) as stream:  # type: ignore[type-var]
            async for chunk in stream:
                chunks.append(chunk)
                if watch is not None:
                    await watch.feed(chunk.sampled_ids)
                    if watch.stopped_at is not None:
                        break
        if chunks[-1].finish is None:
            chunks[-1] = replace(chunks[-1], finish="stopped")
        turn = Turn.of(context_ids, chunks)
        if reused is not None:
            turn = turn.after(reused)
        if watch is None:
            return turn
        length, logps = await watch.ended()
        turn = replace(turn, teacher_logps=logps)
        return turn if length is None else turn.stopped_at(length)
