"""Time limits: kept while the loop listens, stretched while it is blocked."""

import asyncio
import time

import pytest

from opd.teachers.client.listening import ListeningClock


def test_a_limit_is_kept():
    async def wait() -> float:
        clock = ListeningClock(0.2)
        start, begun = clock.now(), time.monotonic()
        with pytest.raises(TimeoutError):
            async with clock.until(lambda: start + 0.2):
                await asyncio.sleep(30)
        return time.monotonic() - begun

    assert 0.19 < asyncio.run(wait()) < 1.0


def test_a_limit_may_move():
    async def wait() -> float:
        clock = ListeningClock(0.2)
        heard = [clock.now()]
        begun = time.monotonic()

        async def hear() -> None:
            for _ in range(8):
                await asyncio.sleep(0.05)
                heard[0] = clock.now()

        hearing = asyncio.create_task(hear())
        with pytest.raises(TimeoutError):
            async with clock.until(lambda: heard[0] + 0.2):
                await asyncio.sleep(30)
        await hearing
        return time.monotonic() - begun

    assert asyncio.run(wait()) > 0.55


def test_limits_nest_and_end_apart():
    async def work() -> list[str]:
        clock, seen = ListeningClock(0.1), []
        start = clock.now()
        async with clock.until(lambda: start + 30):
            try:
                async with clock.until(lambda: start + 0.1):
                    await asyncio.sleep(30)
            except TimeoutError:
                seen.append("inner")
            await asyncio.sleep(0.05)
        try:
            async with clock.until(lambda: start), clock.until(lambda: start + 30):
                await asyncio.sleep(30)
        except TimeoutError:
            seen.append("outer")
        async with clock.until(lambda: clock.now() + 1):
            seen.append("none")
        return seen

    assert asyncio.run(work()) == ["inner", "outer", "none"]


def test_a_cancelled_wait_is_no_timeout():
    async def work() -> None:
        clock = ListeningClock(0.1)

        async def wait() -> None:
            async with clock.until(lambda: 1e9):
                await asyncio.sleep(30)

        task = asyncio.create_task(wait())
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(work())


def test_a_blocked_loop_spends_little_of_a_limit():
    async def work() -> str:
        clock, start = ListeningClock(0.4), 0.0

        async def answer() -> str:
            await asyncio.sleep(0.1)  # of listening time: not over when the loop is blocked
            return "heard"

        start = clock.now()
        async with clock.until(lambda: start + 0.4):
            answering = asyncio.create_task(answer())
            await asyncio.sleep(0.02)
            time.sleep(1.0)
            return await answering

    assert asyncio.run(work()) == "heard"


def test_what_arrived_meanwhile_is_read_before_a_limit_ends():
    """A large answer needs several turns of the loop even when all of it lies there."""

    async def work() -> int:
        clock = ListeningClock(0.4)
        start = clock.now()
        async with clock.until(lambda: start + 0.4):
            await asyncio.sleep(0.37)
            time.sleep(1.0)
            turns = 0
            for _ in range(50):
                await asyncio.sleep(0)
                turns += 1
            return turns

    assert asyncio.run(work()) == 50


def test_nothing_is_left_behind():
    async def work() -> set:
        clock = ListeningClock(0.1)
        async with clock.until(lambda: 1e9):
            pass
        await asyncio.sleep(0.05)
        assert clock._limits == {}
        assert clock._timer is None
        return asyncio.all_tasks()

    assert len(asyncio.run(work())) == 1
