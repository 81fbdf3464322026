"""Time limits for what comes from elsewhere: a limit runs only while this process can hear an answer.

A process that was stopped, or a loop that somebody blocked, finds its timers due and its sockets unread at the same moment,
and would give up answers that have long arrived. `ListeningClock` counts no more than a little of such a gap.
"""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager


class ListeningClock:
    """Seconds in which an event loop was there to listen. Lives in one loop."""

    def __init__(self, shortest_limit_s: float) -> None:
        """`shortest_limit_s`: no limit is shorter. One gap counts at most a quarter of it, and limits are kept to a 20th."""
        self._most, self._interval = shortest_limit_s / 4, min(0.5, shortest_limit_s / 20)
        self._seconds, self._last, self._gap_ended = 0.0, time.monotonic(), -math.inf
        self._limits: dict[asyncio.Timeout, Callable[[], float]] = {}
        self._timer: asyncio.TimerHandle | None = None

    def now(self) -> float:
        """The seconds so far."""
        last, self._last = self._last, time.monotonic()
        if self._last - last > self._most:
            self._gap_ended = self._last
        self._seconds += min(self._last - last, self._most)
        return self._seconds

    @asynccontextmanager
    async def until(self, due: Callable[[], float]) -> AsyncIterator[None]:
        """Raises `TimeoutError` in its block when `now()` reaches `due()`, which may change meanwhile."""
        async with asyncio.timeout(None) as limit:
            self._limits[limit] = due
            if self._timer is None:
                self._timer = asyncio.get_running_loop().call_later(self._interval, self._look)
            try:
                yield
            finally:
                self._limits.pop(limit, None)

    def _look(self) -> None:
        """Ends what is due, and comes back as long as there is something to watch."""
        loop, now = asyncio.get_running_loop(), self.now()
        if self._last - self._gap_ended >= self._interval:  # else what arrived in the gap is still being read
            for limit in [limit for limit, due in self._limits.items() if now >= due()]:
                del self._limits[limit]
                limit.reschedule(loop.time())
        self._timer = loop.call_later(self._interval, self._look) if self._limits else None
