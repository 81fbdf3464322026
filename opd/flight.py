"""The rollouts of one step on their way: being sampled, then scored, each at its own pace."""

import asyncio
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from accelerate.utils import gather_object

from opd.alignment.coverage import Coverage
from opd.errors import UserError
from opd.objective.batching import Taught
from opd.records import Rollout
from opd.teachers.pool import Tally


@dataclass(frozen=True)
class Landed:
    """What one step learns from: this process's rollouts with their terms."""

    taught: list[Taught]
    counts: Counter[str]  # of this process, beside those that follow from the rollouts
    coverage: Coverage  # of the texts that were aligned for teachers with other tokenizers, over all processes
    figures: Mapping[str, float]  # means of what term makers noted, over all processes


@dataclass(frozen=True)
class Flight:
    """`sampling` and `teaching` have one task a slot; None results from a prompt too long for the context."""

    step: int
    sampling: Sequence["asyncio.Task[Rollout | None]"]
    teaching: Sequence["asyncio.Task[Taught | None]"]
    tally: Tally
    started: Sequence["asyncio.Task[Any]"] = ()  # what the former wait for

    async def sampled(self) -> list[Rollout]:
        """The rollouts, once the sampler has nothing more to do for them."""
        return [rollout for rollout in await asyncio.gather(*self.sampling) if rollout is not None]

    async def landed(self) -> Landed:
        """The rollouts with their terms, in the order of the slots.

        To be called by every process. Raises `UserError` where too little of the step's text could be aligned.
        """
        results = await asyncio.gather(*self.teaching)
        told = gather_object([(self.tally.coverage, self.tally.first_failed, dict(self.tally.noted))])
        coverage = sum((one for one, _, _ in told), Coverage())
        if coverage.byte_coverage < self.tally.pool.min_byte_coverage:
            first = next(text for _, text, _ in told if text is not None)
            raise UserError(
                f"alignment.min_byte_coverage: {coverage.byte_coverage:.1%} of the step's text is aligned with the "
                f"teachers' tokens, less than {self.tally.pool.min_byte_coverage:.1%}; the first text that failed answers "
                f"{first}; see opd align, or lower the floor and resume"
            )
        taught = [pair for pair in results if pair is not None]
        counts = self.tally.counts + Counter(skipped_prompts=len(results) - len(taught))
        return Landed(taught, counts, coverage, _means([noted for *_, noted in told]))

    async def cancel(self) -> None:
        """Gives up what is not done yet."""
        tasks = [*self.sampling, *self.teaching, *self.started]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _means(noted: Sequence[Mapping[str, Sequence[tuple[float, float]]]]) -> dict[str, float]:
    """The weighted mean of each name's values over all processes; exact, so that it does not depend on their order."""
    names = sorted({name for one in noted for name in one})
    found = {name: [pair for one in noted for pair in one.get(name, ())] for name in names}
    return {
        name: math.fsum(value * weight for value, weight in pairs) / math.fsum(weight for _, weight in pairs)
        for name, pairs in found.items()
    }
