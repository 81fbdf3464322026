"""What shows a growing rollout to its controllers, and tells where one of them stopped it.

Of an episode they are shown each turn when it is whole. A single answer they are shown after every `chunk` tokens, while it
is decoded: the scores of one chunk are awaited while the next is sampled and no longer, so that at most one chunk is
sampled in vain. Where a rollout ends depends on its tokens and never on who was faster.
"""

import asyncio
from collections.abc import Sequence

import numpy as np

from opd.plugins import RolloutController
from opd.records import Array, Progress, Prompt, Turn, Unit
from opd.teachers.growing import Scoring
from opd.units import chunk_units, units_of


class Watch:
    """One rollout. `chunk`: tokens of a unit; None where its units are turns. `scoring` is None where no controller needs
    scores."""

    def __init__(
        self,
        controllers: Sequence[RolloutController],
        prompt: Prompt,
        slot: int,
        chunk: int | None,
        scoring: Scoring | None,
    ) -> None:
        self.controllers, self.prompt, self.slot = controllers, prompt, slot
        self.chunk, self.scoring = chunk, scoring
        self.stopped_at: int | None = None  # tokens of the turn, of which those reused come first
        self._units: list[Unit] = []  # of the turns before; in a single answer, of its chunks that were judged whole
        self._turns: tuple[Turn, ...] = ()
        self._looking: asyncio.Task[None] | None = None

    def begin(self, turns: Sequence[Turn], context_ids: Array, reused: Turn | None = None) -> None:
        """The next turn follows `turns`, in this context [c]; it begins with the tokens of `reused`."""
        self._turns, self._context_ids = tuple(turns), context_ids
        self._ids = np.zeros(0, np.int32) if reused is None else reused.sampled_ids
        known = np.zeros(0, np.float32) if reused is None or reused.teacher_logps is None else reused.teacher_logps
        self._reused_logps = np.pad(known, (0, len(self._ids) - len(known)), constant_values=np.nan)
        self._seen = len(self._ids)  # tokens of the turn that were looked at
        self._logps: Array | None = self._reused_logps
        self._units = []
        if self.scoring is not None:
            self.scoring.begin(turns, context_ids, self._ids)

    async def feed(self, ids: Array) -> None:
        """The turn's next tokens. Returns when more may be sampled; raises what went wrong with those before."""
        self._ids = np.concatenate([self._ids, ids])
        if self.chunk is None:
            return
        if self._looking is not None:
            await self._looking
        whole = len(self._ids) // self.chunk * self.chunk
        if self.stopped_at is None and whole > self._seen:
            self._looking = asyncio.create_task(self._look(whole))
            if whole - self._seen > self.chunk or whole < len(self._ids):  # a chunk's end lies behind: it must be known
                await self._looking

    async def ended(self) -> tuple[int | None, Array | None]:
        """(after how many tokens the turn was stopped, or None; the teacher's log-probs of its tokens) once all of it has
        been looked at. Of a single answer the last few tokens are not: they cannot be stopped any more."""
        if self._looking is not None:
            await self._looking
        if self.chunk is None:
            await self._look_at_turn()
        return self.stopped_at, None if self.scoring is None else self._logps

    async def close(self) -> None:
        """Ends the looking of a rollout that comes to nothing, and lets the teacher forget the stream."""
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)
        if self.scoring is not None:
            self.scoring.close()

    async def _look(self, whole: int) -> None:
        """At each new chunk of the first `whole` tokens."""
        assert self.chunk is not None
        for end in range(self._seen + self.chunk, whole + 1, self.chunk):
            if self._stops(end, await self._scores(end)):  # no later text may speak for what was known here
                self.stopped_at = end
                break
        self._seen = whole

    async def _look_at_turn(self) -> None:
        if self._stops(len(self._ids), await self._scores(len(self._ids))):
            self.stopped_at = len(self._ids)

    async def _scores(self, length: int) -> Array | None:
        """[m <= length] of the turn so far, in one request."""
        if self.scoring is None:
            return None
        logps = await self.scoring.logps(self._ids[:length])
        reused = len(self._reused_logps)
        self._logps = np.concatenate([self._reused_logps[: len(logps)], logps[reused:]])
        return self._logps

    def _stops(self, length: int, logps: Array | None) -> bool:
        units: tuple[Unit, ...] = ()
        if logps is not None:
            units = self._units_at(length, logps)
        progress = Progress(
            self.prompt, self.slot, self._context_ids, self._ids[:length], logps, units, len(self._turns) + 1
        )
        return any(controller.stops(progress) for controller in self.controllers)

    def _units_at(self, length: int, logps: Array) -> tuple[Unit, ...]:
        """The rollout's units when `length` tokens of the turn are there, of which `logps` [m] are known."""
        reused = len(self._reused_logps)
        if self.chunk is None:
            return (*units_of(self._turns, None), *chunk_units(logps, length, length, reused))
        done = len(self._units) * self.chunk
        new = chunk_units(logps[done:], length - done, self.chunk, reused - done)
        self._units += new[: (len(logps) - done) // self.chunk]  # the others may still gain a log-prob
        return (*self._units, *new[len(self._units) - done // self.chunk :])
