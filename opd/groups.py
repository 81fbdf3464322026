"""Which slots a process has, and tasks for the rollouts of one prompt where these are compared with each other."""

import asyncio
from collections.abc import Iterator, Sequence
from typing import TypeVar

Value = TypeVar("Value")


def dealt(num_prompts: int, copies: int, process: int, num_processes: int, *, together: bool) -> Iterator[list[int]]:
    """The slots of process `process`, each list for itself: single ones, or `together` all copies of a prompt."""
    size = copies if together else 1
    for number in range(process, num_prompts * copies // size, num_processes):
        yield list(range(number * size, (number + 1) * size))


def each(whole: "asyncio.Task[Sequence[Value]]", count: int) -> list["asyncio.Task[Value]"]:
    """A task for each of the `count` results of `whole`; cancelling one of them gives up all."""

    async def one(place: int) -> Value:
        return (await whole)[place]

    return [asyncio.create_task(one(place)) for place in range(count)]


async def together(tasks: Sequence["asyncio.Task[Value]"]) -> list[Value]:
    """The results of all; where one fails or the wait is given up, so are the others."""
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
