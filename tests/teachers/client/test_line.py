"""The line before the replicas: order, limits, choice, and moves when one goes down. No server is involved."""

import asyncio
from contextlib import AsyncExitStack

import pytest

from opd.teachers.client.line import Line
from opd.teachers.client.replica import Replica
from opd.teachers.stream import StreamLost


def replicas(count: int) -> list[Replica]:
    return [Replica(None, f"http://{i}", "field") for i in range(count)]  # type: ignore[arg-type]


async def turn() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


class Visitor:
    """A request that holds its place until it is told to leave."""

    def __init__(self, line: Line, order: int, num_tokens: int = 1, **where) -> None:
        self.leave, self.at, self.error = asyncio.Event(), None, None
        self.task = asyncio.create_task(self._visit(line, order, num_tokens, where))

    async def _visit(self, line: Line, order: int, num_tokens: int, where) -> None:
        try:
            async with line.place(order, num_tokens, **where) as replica:
                self.at = replica
                await self.leave.wait()
        except StreamLost as error:
            self.error = error


def run(work) -> None:
    asyncio.run(work())


def test_the_least_busy_replica_by_tokens():
    async def work() -> None:
        a, b = there = replicas(2)
        line = Line(there, 8)
        big, small, next_small, after = (Visitor(line, i, n) for i, n in enumerate((100, 10, 20, 80)))
        await turn()
        assert [one.at for one in (big, small, next_small, after)] == [a, b, b, b]
        assert (a.num_tokens, b.num_tokens, b.num_requests) == (100, 110, 3)
        after.leave.set()
        await turn()
        assert Visitor(line, 9, 1).at is None  # not at once: tasks start in the next turn
        await turn()
        assert (a.num_tokens, b.num_tokens) == (100, 31)
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        await turn()
        assert (a.num_tokens, b.num_tokens, a.num_requests, b.num_requests) == (0, 0, 0, 0)

    run(work)


def test_the_oldest_first_within_the_limit():
    async def work() -> None:
        (only,) = there = replicas(1)
        line = Line(there, 2)
        visitors = [Visitor(line, i) for i in range(6)]
        await turn()
        assert [one.at is not None for one in visitors] == [True, True, False, False, False, False]
        assert (only.num_requests, line.num_waiting) == (2, 4)
        again = Visitor(line, -1)  # came before all of them, and comes again
        await turn()
        visitors[1].leave.set()
        await turn()
        assert again.at is only
        assert visitors[2].at is None
        again.leave.set()
        await turn()
        assert [one.at is not None for one in visitors] == [True, True, True, False, False, False]
        for one in visitors:
            one.leave.set()
        await asyncio.gather(*(one.task for one in visitors))
        assert (only.num_requests, only.num_tokens, line.num_waiting) == (0, 0, 0)

    run(work)


def test_whoever_gives_up_frees_the_place_or_leaves_the_line():
    async def work() -> None:
        (only,) = there = replicas(1)
        line = Line(there, 1)
        first, second, third = (Visitor(line, i) for i in range(3))
        await turn()
        second.task.cancel()  # while waiting
        await turn()
        first.task.cancel()  # while holding the place
        await turn()
        assert third.at is only
        fourth = Visitor(line, 4)
        await turn()
        third.leave.set()
        third.task.cancel()
        fourth.task.cancel()  # in the turn in which the place is given to it
        await turn()
        assert (only.num_requests, only.num_tokens, line.num_waiting) == (0, 0, 0)
        async with line.place(9, 1) as replica:
            assert replica is only

    run(work)


def test_cancelled_between_getting_the_place_and_knowing_it():
    async def work() -> None:
        (only,) = there = replicas(1)
        line = Line(there, 1)
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(line.place(0, 1))
            waiting = Visitor(line, 1)
            await turn()
            await stack.aclose()  # the place is its own now, but its task has not run
            waiting.task.cancel()
        await turn()
        assert waiting.at is None
        assert (only.num_requests, only.num_tokens) == (0, 0)

    run(work)


def test_those_bound_to_a_replica_are_passed_by_others():
    async def work() -> None:
        a, b = there = replicas(2)
        line = Line(there, 1)
        holding, bound, free, later = (
            Visitor(line, 0),
            Visitor(line, 1, holder=a, needs_holder=True),
            Visitor(line, 2),
            Visitor(line, 3),
        )
        await turn()
        assert (holding.at, bound.at, free.at, later.at) == (a, None, b, None)
        holding.leave.set()
        await turn()
        assert (bound.at, later.at) == (a, None)  # the older one of the two that could have it
        free.leave.set()
        await turn()
        assert later.at is b
        for one in (bound, later):
            one.leave.set()
        await turn()

    run(work)


def test_when_a_replica_goes_down_its_line_moves():
    async def work() -> None:
        a, b = there = replicas(2)
        line = Line(there, 1)
        holding, other = Visitor(line, 0), Visitor(line, 1)
        bound, tied, anyone = Visitor(line, 2, holder=a, needs_holder=True), Visitor(line, 3, holder=a), Visitor(line, 4)
        await turn()
        line.down(a)
        await turn()
        assert isinstance(bound.error, StreamLost)
        other.leave.set()
        await turn()
        assert (tied.at, anyone.at) == (b, None)  # its age goes with it
        late, lost = Visitor(line, 5, holder=a), Visitor(line, 6, holder=a, needs_holder=True)
        await turn()
        assert isinstance(lost.error, StreamLost)
        holding.leave.set()
        await turn()
        assert anyone.at is None  # a place at a replica that is down is none
        line.up(a)
        await turn()
        assert (anyone.at, late.at) == (a, None)
        for one in (tied, anyone, late):
            one.leave.set()
        await turn()
        assert (a.num_requests, b.num_requests) == (0, 0)

    run(work)


def test_a_resting_replica_keeps_those_bound_to_it():
    async def work() -> None:
        a, b = there = replicas(2)
        line = Line(there, 4)
        line.rest(a, 0.05)
        line.rest(a, 0.05)
        bound, free = Visitor(line, 0, holder=a, needs_holder=True), Visitor(line, 1)
        await turn()
        assert (bound.at, free.at) == (None, b)
        await asyncio.sleep(0.1)
        assert bound.at is a
        for one in (bound, free):
            one.leave.set()
        await turn()

    run(work)


@pytest.mark.parametrize("limit", [1, 7])
def test_a_long_line_is_served_in_order(limit):
    async def work() -> None:
        line, done = Line(replicas(3), limit), []

        async def visit(order: int) -> None:
            async with line.place(order, order % 5):
                done.append(order)
                await asyncio.sleep(0)

        await asyncio.gather(*(visit(order) for order in range(2000)))
        assert done == sorted(done)
        assert all(one.num_requests == one.num_tokens == 0 for one in line.replicas)

    run(work)
