"""Who asks which replica next: requests wait in one line, the oldest first, for the replica with the least to do.

Each replica has a limit of requests under way; a request that must go to one replica (its stream is held there) waits for
that one, and the others pass it.
"""

import asyncio
import heapq
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from opd.teachers.client.replica import Replica
from opd.teachers.stream import StreamLost

R = TypeVar("R", bound=Replica)


@dataclass(order=True)
class _Waiting(Generic[R]):
    order: int  # of arrival; a request that comes again keeps its place
    num_tokens: int = field(compare=False)
    holder: R | None = field(compare=False)
    needs_holder: bool = field(compare=False)
    ready: "asyncio.Future[R]" = field(compare=False)
    replica: R | None = field(compare=False, default=None)  # once it is there


class Line(Generic[R]):
    """The line before some replicas. Lives in one event loop."""

    def __init__(self, replicas: Sequence[R], max_in_flight: int) -> None:
        self.replicas, self.max_in_flight = replicas, max_in_flight
        self._anywhere: list[_Waiting[R]] = []  # a heap
        self._there: dict[str, list[_Waiting[R]]] = {replica.url: [] for replica in replicas}  # heaps by the replica needed

    @property
    def num_waiting(self) -> int:
        """Requests that are in line."""
        heaps = (self._anywhere, *self._there.values())
        return sum(not waiting.ready.done() for heap in heaps for waiting in heap)

    @asynccontextmanager
    async def place(
        self, order: int, num_tokens: int, holder: R | None = None, needs_holder: bool = False
    ) -> AsyncIterator[R]:
        """Waits, and holds one of a replica's places for a request of so many tokens.

        With a `holder` it waits for that one. When the holder goes down, the request joins those that any replica may take,
        or, where it `needs_holder`, `StreamLost` is raised.
        """
        waiting: _Waiting[R] = _Waiting(order, num_tokens, holder, needs_holder, asyncio.get_running_loop().create_future())
        self._join(waiting)
        self._serve()
        try:
            yield await waiting.ready
        finally:
            waiting.ready.cancel()  # whoever gives up has left the line
            if waiting.replica is not None:
                waiting.replica.num_requests -= 1
                waiting.replica.num_tokens -= num_tokens
                self._serve()

    def down(self, replica: R) -> None:
        """It takes nothing until it is up again. Those in line for it alone go elsewhere."""
        replica.up = False
        moving, self._there[replica.url] = self._there[replica.url], []
        for waiting in moving:
            if not waiting.ready.done():
                self._join(waiting)
        self._serve()

    def up(self, replica: R) -> None:
        """It takes requests again."""
        replica.up = True
        self._serve()

    def rest(self, replica: R, seconds: float) -> None:
        """It takes nothing for a while; those in line for it wait."""

        def end() -> None:
            replica.resting = False
            self._serve()

        if not replica.resting:
            replica.resting = True
            asyncio.get_running_loop().call_later(seconds, end)

    def _join(self, waiting: _Waiting[R]) -> None:
        if waiting.holder is None or (not waiting.holder.up and not waiting.needs_holder):
            heapq.heappush(self._anywhere, waiting)
        elif waiting.holder.up:
            heapq.heappush(self._there[waiting.holder.url], waiting)
        else:
            waiting.ready.set_exception(StreamLost(f"{waiting.holder.url}, which held it, is down"))

    def _serve(self) -> None:
        """Gives free places to those who have waited longest for them."""
        while free := [one for one in self.replicas if one.up and not one.resting and one.num_requests < self.max_in_flight]:
            least = min(free, key=lambda replica: (replica.num_tokens, replica.num_requests))
            lines = [(self._anywhere, least), *((self._there[replica.url], replica) for replica in free)]
            heads = [(heap[0], heap, replica) for heap, replica in lines if _waits(heap)]
            if not heads:
                return
            waiting, heap, replica = min(heads, key=lambda head: head[0].order)
            heapq.heappop(heap)
            replica.num_requests += 1
            replica.num_tokens += waiting.num_tokens
            waiting.replica = replica
            waiting.ready.set_result(replica)


def _waits(heap: list[_Waiting[Any]]) -> bool:
    """Whether anybody is in line, after those at its head who have left are taken off."""
    while heap and heap[0].ready.done():
        heapq.heappop(heap)
    return bool(heap)
