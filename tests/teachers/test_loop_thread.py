"""Work in a thread with a loop of its own: results, errors, and what happens to work that nobody waits for any more."""

import asyncio
import gc
import threading
import time

import pytest

from opd.teachers.loop_thread import LoopThread


@pytest.fixture
def thread():
    one = LoopThread("model")
    one.start()
    yield one
    assert asyncio.run(one.stop(5.0))


def test_results_and_errors_come_from_the_other_thread(thread):
    async def where():
        return threading.get_ident()

    async def fail():
        raise KeyError("x")

    async def both():
        assert await thread.run(where) != threading.get_ident()
        with pytest.raises(KeyError):
            await thread.run(fail)

    asyncio.run(both())


def test_work_that_blocks_leaves_the_caller_free(thread):
    async def block():
        time.sleep(0.2)

    async def watch():
        work, ticks = asyncio.create_task(thread.run(block)), 0
        while not work.done():
            await asyncio.sleep(0.01)
            ticks += 1
        return ticks

    assert asyncio.run(watch()) > 5


@pytest.mark.parametrize("delay_s", [0.0, 0.05])
def test_a_cancelled_caller_waits_until_its_work_has_ended(thread, delay_s):
    events = []

    async def work():
        events.append("begun")
        try:
            await asyncio.sleep(30)
        finally:
            time.sleep(0.05)
            events.append("ended")

    async def call():
        task = asyncio.create_task(thread.run(work))
        await asyncio.sleep(delay_s)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return list(events)

    assert asyncio.run(call()) in ([], ["begun", "ended"])


def test_cancelled_before_it_began(thread):
    """While the thread computes, work that is given up must end without having run."""
    begun = []

    async def block():
        time.sleep(0.2)

    async def work():
        begun.append(1)

    async def call():
        first = asyncio.create_task(thread.run(block))
        await asyncio.sleep(0.05)
        second = asyncio.create_task(thread.run(work))
        await asyncio.sleep(0.01)
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        await first

    asyncio.run(call())
    assert begun == []


def test_stop_cancels_what_runs_and_tells_what_does_not_end():
    one, go = LoopThread("model"), threading.Event()
    one.start()

    async def block():
        go.wait(20)

    async def call():
        task = asyncio.create_task(one.run(block))
        await asyncio.sleep(0.05)
        assert not await one.stop(0.05)
        go.set()
        await task
        await asyncio.to_thread(one._thread.join, 5.0)
        assert not one._thread.is_alive()

    asyncio.run(call())


def test_an_error_that_nobody_waits_for_any_more_is_not_reported(thread):
    """As when one of many requests fails and the others are given up."""
    reported = []

    async def fail_late():
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            raise KeyError("gone") from None

    async def give_up():
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: reported.append(context))
        calls = [asyncio.create_task(thread.run(fail_late)) for _ in range(3)]
        await asyncio.sleep(0.05)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        del calls
        gc.collect()
        await asyncio.sleep(0)

    asyncio.run(give_up())
    assert reported == []
