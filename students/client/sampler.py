"""The sampler that asks rollout servers: turns come chunk by chunk, weights go there after each update.

Whatever is awaited runs in a thread with a loop of its own, as for served teachers. A server that fails in the middle of a
turn is not waited for: the turn goes on elsewhere, or there again, after the tokens that have come. A server that has lost
the weights (it was started anew) gets them again.
"""

import asyncio
import itertools
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from opd.errors import UserError
from opd.records import Chunk, SampleRequest
from opd.students.client.server import OtherWeights, RolloutServer
from opd.students.config import SamplerConfig
from opd.students.going_on import rest_of
from opd.students.weights import layout, write_weights
from opd.teachers.client.addresses import check_addresses, read_token
from opd.teachers.client.answers import BadAnswer, check_chunk
from opd.teachers.client.line import Line
from opd.teachers.client.listening import ListeningClock
from opd.teachers.client.replica import Busy, Failed, last_errors, open_session, pause_s, within
from opd.teachers.loop_thread import LoopThread
from opd.teachers.wire import WireError, decode_chunk, encode_sample_request

FIELD = "sampler.url"
MAX_FAILURES = 16  # of one turn in a row, each at a server that seemed well: then it is the turn
PROBE_S = 10.0
START_S = 20.0  # a server that does not answer at the start is more likely absent than busy
STOP_S = 5.0
T = TypeVar("T")


class RemoteSampler:
    """Implements `opd.students.sampler.Sampler`. To be closed at the end."""

    concurrent = True

    def __init__(
        self,
        config: SamplerConfig,
        student: nn.Module,
        dtype: torch.dtype,
        vocab: int,
        eos_ids: Sequence[int],
        tokens: str,
        *,
        share: Callable[[str | None], str] = lambda digest: digest or "",
        writes: bool = True,
    ) -> None:
        """Asks every server what it has. `tokens`: digest of the student's token -> id map. `vocab`: ids that are sampled.

        Of several processes one `writes` the weights, and `share` gives all of them the digest of what it wrote. Raises
        `UserError` naming the field and the address where a server does not answer, or has another model.
        """
        check_addresses(config.urls, FIELD)
        token = None if config.token_file is None else read_token(config.token_file, "sampler.token_file")
        self.config, self.dtype, self.vocab, self.share, self.writes = config, dtype, vocab, share, writes
        self.eos_ids = frozenset(eos_ids)
        self.version, self.weights = 0, ""
        self._tasks: set[asyncio.Task[None]] = set()
        self._folder = tempfile.TemporaryDirectory(prefix="opd-student-")
        self._thread = LoopThread("sampler")
        self._thread.start()
        self._num_turns = 0
        expected = {"layout": layout(student), "tokens": tokens, "eos_ids": sorted(eos_ids)}
        try:
            self._thread.call(lambda: self._open(token, expected))
        except BaseException:
            self.close()
            raise

    @property
    def busy(self) -> bool:
        return self._num_turns > 0

    @property
    def path(self) -> Path:
        """The file of the weights."""
        return Path(self._folder.name, "weights.safetensors")

    def sync(self, student: nn.Module, version: int) -> None:
        """See `opd.students.sampler.Sampler.sync`. Raises `UserError` when no server took the weights in time."""
        assert not self.busy, "sync while turns are being decoded"
        if self.weights and version == self.version:
            return
        self.version = version
        self.weights = self.share(write_weights(student, self.path if self.writes else None, self.dtype, self.vocab))
        if self.writes:
            self._thread.call(self._send_all)

    def release(self) -> None:
        """Nothing is held here."""

    def close(self) -> None:
        """Ends connections and the thread."""
        self._thread.call(self._close)
        self._thread.end()
        self._folder.cleanup()

    async def generate(self, request: SampleRequest) -> AsyncIterator[Chunk]:
        """See `opd.students.sampler.Sampler.generate`. Raises `UserError` when nothing came within the deadline."""
        here, come = asyncio.get_running_loop(), asyncio.Queue[Chunk | None]()

        async def work() -> None:
            async with aclosing(self._turn(request)) as chunks:  # type: ignore[type-var]
                async for chunk in chunks:
                    here.call_soon_threadsafe(come.put_nowait, chunk)

        self._num_turns += 1
        task = asyncio.create_task(self._thread.run(work))
        task.add_done_callback(lambda _: come.put_nowait(None))
        try:
            while (chunk := await come.get()) is not None:
                yield chunk
            await task
        finally:
            self._num_turns -= 1
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _turn(self, request: SampleRequest) -> AsyncIterator[Chunk]:
        """The chunks of one turn, whatever happens to servers meanwhile."""
        asked, order, num_failures = request, next(self._order), 0
        started = self.clock.now()
        deadline_s = self.config.deadline_s
        while True:
            try:
                async with (
                    self.clock.until(lambda: max(started, self._heard) + deadline_s),
                    self.line.place(order, len(asked.context_ids) + asked.max_new_tokens) as server,
                    aclosing(self._attempt(server, asked)) as chunks,  # type: ignore[type-var]
                ):
                    async for chunk in chunks:
                        num_failures = 0
                        asked = rest_of(asked, chunk)
                        yield chunk
                        if chunk.finish is not None:
                            return
            except TimeoutError:
                raise UserError(
                    f"{FIELD}: no token within {deadline_s:g} s ({last_errors(self.servers)}); "
                    "start the server again (opd serve student) and resume with --resume"
                ) from None
            except Failed as failure:
                num_failures += 1
                if num_failures == MAX_FAILURES:
                    raise UserError(
                        f"{FIELD}: {MAX_FAILURES} attempts at one turn failed, the last because {failure}; "
                        "see the servers' logs, and resume with --resume"
                    ) from None

    async def _attempt(self, server: RolloutServer, asked: SampleRequest) -> AsyncIterator[Chunk]:
        """The chunks that a server gives. Ends early where it is busy, or had to be sent the weights first. Raises `Failed`,
        after which the server takes nothing until a probe shows that it is well."""
        heard = self.clock.now()

        def hear() -> None:
            nonlocal heard
            heard = self._heard = self.clock.now()

        room = asked.max_new_tokens
        try:
            frames = server.sample(encode_sample_request(asked, self.weights), hear)
            async with aclosing(frames):  # type: ignore[type-var]
                while room:
                    frame = await within(self.clock, self.config.timeout_s, anext(frames), since=lambda: heard)
                    chunk, weights = decode_chunk(frame, self.version)
                    if weights != self.weights:
                        raise BadAnswer(f"tokens of the weights {weights}, not {self.weights}")
                    check_chunk(chunk, asked, room, self.vocab, self.eos_ids)
                    room -= len(chunk.sampled_ids)
                    server.num_failures, server.last_error = 0, "nothing more came"
                    yield chunk
                    if chunk.finish is not None:
                        return
            raise Failed("a turn without an end")
        except Busy as busy:
            server.last_error = str(busy)
            self.line.rest(server, busy.pause_s)
        except OtherWeights as error:
            server.last_error = str(error)
            if not self.writes:
                self.line.rest(server, 0.2)  # they are on their way from another process
            else:
                self._down(server, str(error))
        except (WireError, BadAnswer) as error:
            self._down(server, f"a malformed answer: {error}")
            raise Failed(server.last_error) from None
        except Failed as failure:
            self._down(server, str(failure))
            raise

    async def _open(self, token: str | None, expected: dict[str, Any]) -> None:
        config = self.config
        self.session = open_session(token)
        self.servers = [RolloutServer(self.session, url, FIELD) for url in config.urls]
        self.line: Line[RolloutServer] = Line(self.servers, config.max_in_flight)
        self.probe_s = min(PROBE_S, config.timeout_s)
        self.clock = ListeningClock(min(self.probe_s, config.deadline_s))
        self._heard, self._order, self._expected = self.clock.now(), itertools.count(), expected
        await asyncio.gather(*(self._patiently(server, self._check) for server in self.servers))

    async def _close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.session.close()

    async def _patiently(self, server: RolloutServer, ask: Callable[[RolloutServer], Any]) -> None:
        """Asks a server until it answers. Raises `UserError` when it does not for some seconds."""
        started = self.clock.now()
        limit_s = min(START_S, self.config.deadline_s)
        try:
            async with self.clock.until(lambda: started + limit_s):
                for num_tries in itertools.count(1):
                    try:
                        await within(self.clock, self.config.timeout_s, ask(server))
                        return
                    except (Busy, Failed) as error:
                        server.last_error = str(error)
                    await asyncio.sleep(pause_s(num_tries))
        except TimeoutError:
            raise UserError(
                f"{FIELD}: no answer within {limit_s:g} s ({last_errors([server])}); "
                "start the server (opd serve student), or correct the address"
            ) from None

    async def _check(self, server: RolloutServer) -> None:
        """Raises `UserError` unless it has the student's model."""
        info = await server.info()
        what = {"layout": "weights of other names or shapes", "tokens": "another tokenizer", "eos_ids": "other EOS ids"}
        for name, text in what.items():
            if info.get(name) != self._expected[name]:
                raise UserError(f"{FIELD}: {server.url} has {text} than student.model: serve the model that is trained")
        if info.get("rows", 0) < self.vocab:
            raise UserError(f"{FIELD}: {server.url} has {info.get('rows')} ids, fewer than the {self.vocab} of the student")

    async def _send_all(self) -> None:
        """Sends the weights to every server. It is enough if one takes them: others get them when they are back.

        Raises `UserError` where none does within the deadline.
        """
        self._heard = started = self.clock.now()
        sending = [asyncio.create_task(self._send_patiently(server)) for server in self.servers]
        deadline_s = self.config.deadline_s
        try:
            async with self.clock.until(lambda: max(started, self._heard) + deadline_s):
                for number in itertools.count(1):
                    await asyncio.gather(*sending)
                    if any(server.up for server in self.servers):
                        return
                    await asyncio.sleep(pause_s(number))
        except TimeoutError:
            raise UserError(
                f"{FIELD}: no server took the new weights within {deadline_s:g} s ({last_errors(self.servers)}); "
                "start it again (opd serve student) and resume with --resume"
            ) from None
        finally:
            for task in sending:
                task.cancel()

    async def _send_patiently(self, server: RolloutServer) -> None:
        """Sends the weights to a server that is up; where that fails it is down, and gets them by the probe."""
        while server.up:
            try:
                await self._send(server)
                return
            except Busy as busy:
                server.last_error = str(busy)
                await asyncio.sleep(busy.pause_s)
            except (Failed, OtherWeights) as error:
                self._down(server, str(error))

    async def _send(self, server: RolloutServer) -> None:
        heard = self.clock.now()

        def hear() -> None:
            nonlocal heard
            heard = self._heard = self.clock.now()

        await within(self.clock, self.config.timeout_s, server.send(self.path, self.weights, hear), since=lambda: heard)

    def _down(self, server: RolloutServer, reason: str) -> None:
        server.last_error = reason
        if server.up:
            server.num_failures += 1
            self.line.down(server)
            task = asyncio.create_task(self._probe(server))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _probe(self, server: RolloutServer) -> None:
        """Looks after a server that is down until it is well and has the weights."""
        for num_failures in itertools.count(server.num_failures):
            await asyncio.sleep(pause_s(num_failures))
            try:
                await within(self.clock, self.probe_s, self._check(server))
                if self.writes and self.weights:
                    await self._send(server)
            except (Busy, Failed, OtherWeights, UserError) as error:
                server.last_error = str(error).removeprefix(f"{FIELD}: {server.url} ")
                continue
            self.line.up(server)
            return
