"""The replicas of one teacher behind one question: whatever happens to some of them, a request gets exactly one answer.

A request waits in line for a free place at the least busy replica, and is sent again, elsewhere or later, until a valid
answer comes. A replica that fails takes nothing more until a probe shows that it is up and serves the same weights.
"""

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from opd.errors import UserError
from opd.teachers.client.answers import BadAnswer
from opd.teachers.client.handshake import MAX_INFO_BYTES, Identity, difference, identity, read_info
from opd.teachers.client.line import Line
from opd.teachers.client.listening import ListeningClock
from opd.teachers.client.replica import Busy, Failed, OtherModel, Replica, last_errors, open_session, pause_s, within
from opd.teachers.stream import StreamLost
from opd.teachers.wire import WireError

MAX_FAILURES = 16  # of one request, each at a replica that seemed well: then it is the request
MAX_STREAMS = 65536  # whose replica is remembered
PROBE_S = 10.0
T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Job(Generic[T]):
    """One question, and how its answer is read."""

    path: str
    body: bytes
    num_tokens: int  # how much work it is
    max_bytes: int  # of the answer
    read: Callable[[bytearray], T]  # raises `WireError`, `BadAnswer`, and `UserError` for an answer of another teacher
    stream: str | None = None
    keep_tokens: int = 0

    @property
    def needs_stream(self) -> bool:
        """Whether only a replica that holds the stream can answer."""
        return self.stream is not None and self.keep_tokens > 0


@dataclass(frozen=True)
class Patience:
    """How long to wait, and for how much at once. Seconds."""

    timeout_s: float  # one attempt
    deadline_s: float  # without any answer, from the request's start or the last answer to another
    max_in_flight: int  # at each replica


@dataclass
class _Stream:
    holder: Replica | None  # None once it is lost
    since: float | None = None  # start of the request that lost it, from which the deadline of its repetition counts


class Replicas:
    """Lives in one event loop, from its making to `close`."""

    def __init__(
        self, urls: tuple[str, ...], name: str, token: str | None, patience: Patience, model: str, expected: Identity
    ) -> None:
        """`name` is the teacher's; every replica has shown that its `model` is what is `expected`."""
        self.name, self.patience, self.model, self.expected = name, patience, model, expected
        self.session = open_session(token)
        self.replicas = [Replica(self.session, url, f"teachers.{name}.url") for url in urls]
        self.line: Line[Replica] = Line(self.replicas, patience.max_in_flight)
        self.probe_s = min(PROBE_S, patience.timeout_s)
        self.clock = ListeningClock(min(self.probe_s, patience.deadline_s))
        self.num_failed = 0  # attempts that came to nothing
        self._order = itertools.count()
        self._answered = 0.0
        self._streams: dict[str, _Stream] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._few = asyncio.Semaphore(4)  # streams that are being closed at once

    async def ask(self, job: Job[T]) -> T:
        """The answer to one request.

        Raises `StreamLost` when the only replica that could answer does not hold the stream any more, and `UserError` when
        no answer came within the deadline, or when no further attempt could help.
        """
        known = self._streams.get(job.stream) if job.stream is not None else None
        started = self.clock.now() if known is None or known.since is None else known.since
        deadline_s = self.patience.deadline_s
        try:
            async with self.clock.until(lambda: max(started, self._answered) + deadline_s):
                return await self._persist(job, next(self._order), started)
        except TimeoutError:
            raise UserError(
                f"teachers.{self.name}.url: no answer within {deadline_s:g} s ({last_errors(self.replicas)}); "
                "start it again and resume with --resume"
            ) from None

    def forget(self, stream: str) -> None:
        """Lets the replica that holds the stream forget it, without waiting for that."""
        known = self._streams.pop(stream, None)
        if known is not None and known.holder is not None and known.holder.up:
            self._start(self._close_stream(known.holder, stream))

    async def close(self) -> None:
        """Ends probes and connections."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.session.close()

    async def _persist(self, job: Job[T], order: int, started: float) -> T:
        """Attempts until one succeeds."""
        reason = ""
        for _ in range(MAX_FAILURES):
            holder = self._holder(job)
            try:
                answer = await self._while_busy(job, order, holder)
            except (Failed, StreamLost) as error:
                reason = str(error)
                self._remember(job, _Stream(None, started))
                if job.needs_stream:
                    raise StreamLost(reason) from None
            else:
                self._answered = self.clock.now()
                return answer
        raise UserError(
            f"teachers.{self.name}.url: {MAX_FAILURES} attempts at one request failed, the last because {reason}; "
            "see the servers' logs, and resume with --resume"
        )

    async def _while_busy(self, job: Job[T], order: int, holder: Replica | None) -> T:
        """One attempt; a replica that is only busy is asked again, and keeps the stream."""
        while True:
            async with self.line.place(order, job.num_tokens, holder, job.needs_stream) as replica:
                try:
                    answer = await self._attempt(replica, job)
                except Busy as busy:
                    replica.last_error = str(busy)
                    self.line.rest(replica, busy.pause_s)
                except Failed as failure:
                    self._down(replica, str(failure))
                    raise
                except OtherModel as error:
                    if not self._others_up(replica):
                        raise
                    self._down(replica, str(error))
                    raise Failed(str(error)) from None
                else:
                    replica.num_failures, replica.last_error = 0, "nothing more came"
                    self._remember(job, _Stream(replica))
                    return answer

    async def _attempt(self, replica: Replica, job: Job[T]) -> T:
        """One attempt at one replica. Raises `Busy`, `Failed`, `StreamLost` where a stream is needed, and `UserError`."""
        try:
            body = await within(self.clock, self.patience.timeout_s, replica.post(job.path, job.body, job.max_bytes))
            return job.read(body)
        except (WireError, BadAnswer) as error:
            raise Failed(f"a malformed answer: {error}") from None
        except StreamLost as error:
            if job.needs_stream:
                raise
            raise Failed(f"it answers 409 where no stream is needed: {error}") from None

    def _holder(self, job: Job[Any]) -> Replica | None:
        """The replica that holds the job's stream. Raises `StreamLost` where it needs one."""
        known = self._streams.get(job.stream) if job.stream is not None else None
        if job.needs_stream and (known is None or known.holder is None):
            raise StreamLost("no replica is known to hold it")
        return known.holder if known is not None else None

    def _remember(self, job: Job[Any], stream: _Stream) -> None:
        if job.stream is not None:
            self._streams.pop(job.stream, None)  # the newest are last
            self._streams[job.stream] = stream
            if len(self._streams) > MAX_STREAMS:
                del self._streams[next(iter(self._streams))]

    def _others_up(self, replica: Replica) -> bool:
        """Whether another replica may still serve the model that this one has changed."""
        return any(other.up for other in self.replicas if other is not replica)

    def _down(self, replica: Replica, reason: str) -> None:
        self.num_failed += 1
        replica.last_error = reason
        if replica.up:
            replica.num_failures += 1
            self.line.down(replica)
            self._start(self._probe(replica))

    async def _probe(self, replica: Replica) -> None:
        """Looks after a replica that is down until it is well."""
        for num_failures in itertools.count(replica.num_failures):
            await asyncio.sleep(pause_s(num_failures))
            try:
                problem = await within(self.clock, self.probe_s, self._problem(replica))
            except (Busy, Failed, UserError) as error:
                problem = str(error).removeprefix(f"{replica.field}: {replica.url} ")
            if problem is None:
                self.line.up(replica)
                return
            replica.last_error = problem

    async def _problem(self, replica: Replica) -> str | None:
        """Why a replica that answers cannot be used."""
        await replica.get("/health", MAX_INFO_BYTES)
        info = await read_info(replica)
        if self.model not in info["models"]:
            return f"serves no {self.model!r} any more"
        differing = difference(identity(info, self.model), self.expected)
        return None if differing is None else f"serves another model than at the start: {differing}"

    async def _close_stream(self, replica: Replica, stream: str) -> None:
        async with self._few:
            with contextlib.suppress(Busy, Failed, StreamLost, UserError):  # the server's limits free it in the end
                await within(self.clock, self.probe_s, replica.delete(f"/v1/streams/{stream}"))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
