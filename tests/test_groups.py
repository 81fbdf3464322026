"""Who has which slots, and one piece of work that is a task for each of its results."""

import asyncio

import pytest

from opd.groups import dealt, shared


def test_slots_are_dealt_one_by_one():
    assert [list(dealt(3, 2, process, 2, together=False)) for process in (0, 1)] == [[[0], [2], [4]], [[1], [3], [5]]]


def test_the_rollouts_of_a_prompt_are_dealt_together():
    assert [list(dealt(3, 2, process, 2, together=True)) for process in (0, 1)] == [[[0, 1], [4, 5]], [[2, 3]]]


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("processes", [1, 2, 3, 7])
def test_each_slot_is_dealt_once(processes, together):
    lists = [own for process in range(processes) for own in dealt(5, 4, process, processes, together=together)]
    assert sorted(slot for own in lists for slot in own) == list(range(20))


def test_the_work_is_done_once_and_each_task_has_its_result():
    calls = []

    async def work():
        calls.append(1)
        await asyncio.sleep(0)
        return ["a", "b", "c"]

    async def run():
        return await asyncio.gather(*reversed(shared(work(), 3)))

    assert asyncio.run(run()) == ["c", "b", "a"]
    assert calls == [1]


def test_an_error_reaches_every_task():
    async def work():
        raise ValueError("no")

    async def run():
        return await asyncio.gather(*shared(work(), 2), return_exceptions=True)

    assert [str(one) for one in asyncio.run(run())] == ["no", "no"]


def test_cancelling_a_task_gives_the_work_up():
    ended = []

    async def work():
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(1)
        return [1, 2]

    async def run():
        tasks = shared(work(), 2)
        await asyncio.sleep(0)
        tasks[0].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(run())
    assert ended == [1]
