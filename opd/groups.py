"""Which slots a process has, and tasks for the rollouts of one prompt where these are compared with each other."""

import asyncio
from collections.abc import Coroutine, Iterator, Sequence
from typing import Any, TypeVar

Value = TypeVar("Value")


def dealt(num_prompts: int, copies: int, process: int, num_processes: int, *, together: bool) -> Iterator[list[int]]:
    """The slots of process `process`, each list for itself: single ones, or `together` all copies of a prompt."""
    size = copies if together else 1
    for number in range(process, num_prompts * copies // size, num_processes):
        yield list(range(number * size, (number + 1) * size))


def shared(work: Coroutine[Any, Any, Sequence[Value]], count: int) -> list["asyncio.Task[Value]"]:
    """A task for each of the `count` results of `work`, which is done once; cancelling one of them gives it up."""
    whole = asyncio.create_task(work)

    async def one(place: int) -> Value:
        return (await whole)[place]

    return [asyncio.create_task(one(place)) for place in range(count)]
