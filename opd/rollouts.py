"""From a prompt to a rollout, which controllers may stop while it is being sampled."""

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace

import numpy as np
from transformers import PreTrainedTokenizerBase

from opd.plugins import RolloutController
from opd.records import Array, Chunk, Progress, Prompt, Rollout, SampleRequest, Sampling, Turn
from opd.students.sampler import Sampler
from opd.teachers.growing import AlignedScoring, OwnScoring
from opd.tokenization import render


class Contexts:
    """Prompts as the student sees them."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, max_context: int, max_new_tokens: int) -> None:
        self.tokenizer, self.max_context, self.max_new_tokens = tokenizer, max_context, max_new_tokens

    def __call__(self, prompt: Prompt) -> Array | None:
        """The prompt's ids [c] int32, or None where it leaves no room for a completion: such a prompt is skipped."""
        ids = render(self.tokenizer, prompt)
        return ids if 0 < len(ids) < self.max_context else None

    def room(self, context_ids: Array) -> int:
        """How many tokens may follow."""
        return min(self.max_new_tokens, self.max_context - len(context_ids))


class Watch:
    """Shows a growing turn to the controllers after every `unit` tokens, and tells where one of them stopped it.

    Looking lags behind sampling (scores take their time). What was sampled meanwhile is cut off, so where a turn ends
    depends on its tokens and never on who was faster.
    """

    def __init__(
        self,
        controllers: Sequence[RolloutController],
        prompt: Prompt,
        slot: int,
        context_ids: Array,
        unit: int,
        scoring: OwnScoring | AlignedScoring | None,
    ) -> None:
        self.controllers, self.prompt, self.slot, self.context_ids = controllers, prompt, slot, context_ids
        self.unit, self.scoring = unit, scoring
        self.stopped_at: int | None = None
        self._ids = np.zeros(0, np.int32)
        self._seen = 0
        self._looking: asyncio.Task[None] | None = None

    def feed(self, ids: Array) -> None:
        """The turn's next tokens. Raises what went wrong with those before."""
        self._ids = np.concatenate([self._ids, ids])
        if self._looking is not None and self._looking.done():
            self._looking.result()  # raises what the teacher did
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look())

    async def verdict(self) -> int | None:
        """After how many tokens the turn was stopped, once everything fed has been looked at; None if it was not."""
        if self._looking is not None:
            await self._looking
        return self.stopped_at

    async def close(self) -> None:
        """Ends the looking of a rollout that comes to nothing, and lets the teacher forget the stream."""
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)
        if self.scoring is not None:
            self.scoring.close()

    async def _look(self) -> None:
        """Whole units only: a turn's last few tokens cannot be stopped any more."""
        while self.stopped_at is None and len(self._ids) - self._seen >= self.unit:
            whole = len(self._ids) // self.unit * self.unit
            if isinstance(self.scoring, OwnScoring):
                await self.scoring.logps(self._ids[:whole])  # in one request, which the loop then reads
            for end in range(self._seen + self.unit, whole + 1, self.unit):
                logps = None if self.scoring is None else await self.scoring.logps(self._ids[:end])
                progress = Progress(self.prompt, self.slot, self.context_ids, self._ids[:end], logps)
                if any(controller.stops(progress) for controller in self.controllers):
                    self.stopped_at = end
                    return
            self._seen = whole


async def sample_rollout(
    sampler: Sampler,
    prompt: Prompt,
    slot: int,
    context_ids: Array,
    seed: int,
    room: int,
    sampling: Sampling,
    watch: Watch | None = None,
) -> Rollout:
    """One single-turn rollout."""
    chunks: list[Chunk] = []
    try:
        async with aclosing(sampler.generate(SampleRequest(context_ids, seed, room, sampling))) as stream:  # type: ignore[type-var]
            async for chunk in stream:
                chunks.append(chunk)
                if watch is not None:
                    watch.feed(chunk.sampled_ids)
                    if watch.stopped_at is not None:
                        break
        if chunks[-1].finish is None:
            chunks[-1] = replace(chunks[-1], finish="stopped")
        turn = Turn.of(context_ids, chunks)
        length = None if watch is None else await watch.verdict()
        return Rollout(prompt, slot, (turn if length is None else turn.stopped_at(length),))
    finally:
        if watch is not None:
            await watch.close()
