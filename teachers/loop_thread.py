"""A thread with an event loop of its own.

A model's coroutines block their loop while they compute. In a loop of their own they may: the loop that talks to clients
goes on, and what arrives meanwhile is computed together afterwards. The other way round, a client in a loop of its own goes
on while the training step blocks the run's.
"""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
    """Runs coroutines in its thread for callers in other threads' loops."""

    def __init__(self, name: str) -> None:
        # a daemon, so that a forward pass of minutes cannot keep a process from ending after its grace period
        self._thread = threading.Thread(target=lambda: asyncio.run(self._live()), name=name, daemon=True)
        self._ready = threading.Event()
        self._loop: asyncio.AbstractEventLoop
        self._ended: asyncio.Event

    def start(self) -> None:
        """Returns when the thread takes work."""
        self._thread.start()
        self._ready.wait()

    async def _live(self) -> None:
        self._loop, self._ended = asyncio.get_running_loop(), asyncio.Event()
        self._ready.set()
        await self._ended.wait()

    async def run(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """What the coroutine `work()` returns or raises, having run in the thread.

        A cancelled caller cancels the work and goes on only when it has ended, so that what the caller holds for it (a
        share of the queue) is held as long as the work exists.
        """
        here = asyncio.get_running_loop()
        answer: asyncio.Future[T] = here.create_future()
        tasks: list[asyncio.Task[T]] = []

        def begin() -> None:
            tasks.append(self._loop.create_task(work()))
            tasks[0].add_done_callback(lambda task: here.call_soon_threadsafe(deliver, task))

        def deliver(task: asyncio.Task[T]) -> None:
            if answer.cancelled():  # this loop is being closed
                return
            if task.cancelled():
                answer.cancel()
            elif (error := task.exception()) is not None:
                answer.set_exception(error)
            else:
                answer.set_result(task.result())

        self._loop.call_soon_threadsafe(begin)
        try:
            return await asyncio.shield(answer)
        except asyncio.CancelledError:
            if not answer.done():
                self._loop.call_soon_threadsafe(lambda: tasks[0].cancel())
                await asyncio.wait([answer])
            if not answer.cancelled():
                answer.exception()  # nobody will ask for it any more, and asyncio would say so
            raise

    def call(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The same for a caller that blocks meanwhile."""

        async def made() -> T:
            return await work()

        return asyncio.run_coroutine_threadsafe(made(), self._loop).result()

    def end(self) -> None:
        """Cancels what still runs, and waits for the thread. For a caller that may block."""
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join()

    async def stop(self, timeout_s: float) -> bool:
        """Cancels what still runs. Whether the thread has ended in time."""
        self._loop.call_soon_threadsafe(self._ended.set)
        await asyncio.to_thread(self._thread.join, timeout_s)
        return not self._thread.is_alive()
