"""Who has which slots, tasks for the results of one piece of work, and tasks that go together."""

import asyncio

import pytest

from opd.groups import dealt, each, together


def test_slots_are_dealt_one_by_one():
    assert [list(dealt(3, 2, process, 2, together=False)) for process in (0, 1)] == [[[0], [2], [4]], [[1], [3], [5]]]


def test_the_rollouts_of_a_prompt_are_dealt_together():
    assert [list(dealt(3, 2, process, 2, together=True)) for process in (0, 1)] == [[[0, 1], [4, 5]], [[2, 3]]]


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("processes", [1, 2, 3, 7])
def test_each_slot_is_dealt_once(processes, together):
    lists = [own for process in range(processes) for own in dealt(5, 4, process, processes, together=together)]
    assert sorted(slot for own in lists for slot in own) == list(range(20))


def test_each_task_has_its_result():
    async def work():
        await asyncio.sleep(0)
        return ["a", "b", "c"]

    async def run():
        return await asyncio.gather(*reversed(each(asyncio.create_task(work()), 3)))

    assert asyncio.run(run()) == ["c", "b", "a"]


def test_an_error_reaches_every_task():
    async def work():
        raise ValueError("no")

    async def run():
        return await asyncio.gather(*each(asyncio.create_task(work()), 2), return_exceptions=True)

    assert [str(one) for one in asyncio.run(run())] == ["no", "no"]


def test_cancelling_a_task_gives_the_work_up():
    async def run():
        whole = asyncio.create_task(asyncio.sleep(60, [1, 2]))
        tasks = each(whole, 2)
        await asyncio.sleep(0)
        tasks[0].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return whole.cancelled()

    assert asyncio.run(run())


def test_where_one_fails_the_others_are_given_up():
    async def fail():
        await asyncio.sleep(0)
        raise ValueError("no")

    async def run():
        others = [asyncio.create_task(asyncio.sleep(60)) for _ in range(2)]
        with pytest.raises(ValueError, match="no"):
            await together([others[0], asyncio.create_task(fail()), others[1]])
        return [one.cancelled() for one in others]

    assert asyncio.run(run()) == [True, True]


def test_a_wait_that_is_given_up_gives_up_what_it_waits_for():
    async def run():
        others = [asyncio.create_task(asyncio.sleep(60)) for _ in range(2)]
        wait = asyncio.create_task(together(others))
        await asyncio.sleep(0)
        wait.cancel()
        await asyncio.gather(wait, return_exceptions=True)
        return [one.cancelled() for one in others]

    assert asyncio.run(run()) == [True, True]
