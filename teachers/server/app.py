"""The teacher server: HTTP routes over a model that lives in a thread of its own.

The loop that talks to clients never computes: it reads and checks requests, hands them to the model's thread, and writes
answers. Well-formed HTTP gets a status and, where something is wrong, one line of JSON; prompts appear in no message, metric
or log.
"""

import asyncio
import logging
import socket
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from aiohttp import web

from opd.teachers.loop_thread import LoopThread
from opd.teachers.server.admission import Admission, Refused, Share
from opd.teachers.server.checks import Bounds, check_generate, check_score
from opd.teachers.server.gate import STARTED, break_off, gate, read_body
from opd.teachers.server.metrics import CONTENT_TYPE, ServerMetrics
from opd.teachers.server.model import ServedModel
from opd.teachers.server.options import listen
from opd.teachers.wire import (
    MEDIA_TYPE,
    PROTOCOL,
    STREAM_NAME,
    decode_sample_request,
    decode_score_request,
    encode_head,
)

KEEPALIVE_S = 75.0
SEND_S = 300.0  # for a client to take its answer, which holds its place in the queue meanwhile
CLOSE_S = 2.0  # for connections and the model's thread to end once everything accepted is answered
HELD_BODIES = 16  # requests and answers of the largest size that are held at once
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Limits:
    """What a server takes on."""

    queue_tokens: int = 2**20  # of all requests accepted and not yet answered
    body_bytes: int = 64 * 2**20  # of one request, and of one answer


class TeacherServer:
    """Serves a model from `start` to `stop`, in the event loop that calls them.

    Example: `server = TeacherServer(ServedModel.load(options)); await server.start(bind("127.0.0.1", 0, has_token=False))`
    """

    def __init__(self, model: ServedModel, *, token: str | None = None, limits: Limits | None = None) -> None:
        self.model, self.limits = model, limits or Limits()
        body_bytes = self.limits.body_bytes
        self.admission = Admission(self.limits.queue_tokens, HELD_BODIES * body_bytes)
        self.metrics = ServerMetrics(self._values)
        self.port = 0
        self._thread = LoopThread("model")
        self._bounds = Bounds(
            models=tuple(model.weights),
            rows=model.rows,
            max_context=model.max_context,
            hidden_bytes=model.hidden_bytes,
            vocab=model.vocab,
            max_answer_bytes=body_bytes,
        )
        app = web.Application(middlewares=[gate(token, self.metrics)])
        app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/v1/info", self._info),
                web.get("/v1/tokenizer", self._tokenizer),
                web.get("/v1/heads/{id}", self._head),
                web.post("/v1/score", self._score),
                web.post("/v1/generate", self._generate),
                web.delete("/v1/streams/{name}", self._close_stream),
                web.get("/metrics", self._metrics),
            ]
        )
        quiet = logging.getLogger(f"{__name__}.http")
        quiet.addFilter(_one_line)
        self._runner = web.AppRunner(
            app,
            access_log=None,
            logger=quiet,
            keepalive_timeout=KEEPALIVE_S,
            handler_cancellation=True,  # whoever has left holds no place in the queue
            shutdown_timeout=CLOSE_S,
        )

    async def start(self, listener: socket.socket) -> None:
        """Serves on a bound socket. Raises `UserError` when another process listens there already."""
        listen(listener)
        self.port = listener.getsockname()[1]
        self._thread.start()
        await self._runner.setup()
        await web.SockSite(self._runner, listener).start()

    async def stop(self, grace_s: float = 30.0) -> bool:
        """Accepts nothing more, answers what was accepted within the grace period, and closes. Whether all of it ended.

        Until then `/health` says that the server is draining, and new work gets a 503.
        """
        self.admission.draining = True
        try:
            await asyncio.wait_for(self.admission.idle.wait(), grace_s)
        except TimeoutError:
            log.warning("%d requests were not answered within %g s", self.admission.num_accepted, grace_s)
        await self._runner.cleanup()
        return await self._thread.stop(CLOSE_S)

    async def _health(self, request: web.Request) -> web.Response:
        draining = self.admission.draining
        return web.json_response({"status": "draining" if draining else "ok"}, status=503 if draining else 200)

    async def _info(self, request: web.Request) -> web.Response:
        limits = {
            "body_bytes": self.limits.body_bytes,
            "batch_tokens": self.model.model.max_batch_tokens,
            "queue_tokens": self.limits.queue_tokens,
            "stream_bytes": self.model.model.streams.max_bytes,
        }
        return web.json_response({"protocol": PROTOCOL, "version": version("opd"), **self.model.info(), "limits": limits})

    async def _tokenizer(self, request: web.Request) -> web.Response:
        return web.json_response(self.model.tokenizer_files)

    async def _head(self, request: web.Request) -> web.StreamResponse:
        """Piece by piece: a head may have gigabytes, and one on another device is copied no faster than it is sent."""
        if request.match_info["id"] != self.model.head_id:
            raise Refused(404, f"this server's only head is {self.model.head_id}")
        pieces = encode_head(self.model.model.head, self.model.head_id)
        response = web.StreamResponse(headers={"Content-Type": MEDIA_TYPE})
        response.content_length = pieces.num_bytes
        await response.prepare(request)
        request[STARTED] = True
        if request.method != "HEAD":
            waiting = iter(pieces)
            while (piece := await asyncio.to_thread(next, waiting, None)) is not None:
                await response.write(piece)
        await response.write_eof()
        return response

    async def _score(self, request: web.Request) -> web.StreamResponse:
        with self.admission.share() as share:
            asked = decode_score_request(await read_body(request, self.limits.body_bytes, share))
            size = check_score(asked, self._bounds)
            return await self._answer(request, share, asked.request.num_tokens, size, lambda: self.model.score(asked))

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        with self.admission.share() as share:
            asked, model = decode_sample_request(await read_body(request, self.limits.body_bytes, share))
            size = check_generate(asked, model, self._bounds)
            num_tokens = len(asked.context_ids) + asked.max_new_tokens
            return await self._answer(request, share, num_tokens, size, lambda: self.model.generate(asked))

    async def _answer(
        self,
        request: web.Request,
        share: Share,
        num_tokens: int,
        num_bytes: int,
        work: Callable[[], Coroutine[Any, Any, bytes]],
    ) -> web.StreamResponse:
        """Accepts the work, has it done, and sends what it gives to the last byte."""
        share.add_bytes(num_bytes)
        share.accept(num_tokens)
        response = web.Response(body=await self._thread.run(work), content_type=MEDIA_TYPE)
        if request.transport is not None:
            # `write_eof` then returns when the system has every byte, so that nothing is lost when the process ends
            request.transport.set_write_buffer_limits(0)
        request[STARTED] = True
        try:
            async with asyncio.timeout(SEND_S):
                await response.prepare(request)
                await response.write_eof()
        except TimeoutError:
            break_off(request)
        return response

    async def _close_stream(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if not STREAM_NAME.fullmatch(name):
            raise Refused(400, f"a stream's name is like {STREAM_NAME.pattern}")

        async def close() -> None:
            self.model.close_stream(name)

        await self._thread.run(close)
        return web.Response(status=204)

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=self.metrics.text(), headers={"Content-Type": CONTENT_TYPE})

    def _values(self) -> dict[str, float]:
        model = self.model.model
        return {
            "opd_outstanding_tokens": self.admission.num_tokens,
            "opd_outstanding_bytes": self.admission.num_bytes,
            "opd_batches": model.num_batches,
            "opd_scored_tokens": model.num_tokens,
            "opd_sampled_tokens": self.model.num_sampled,
            "opd_floored_logps": self.model.num_floored,
            "opd_stream_cache_bytes": model.streams.num_bytes,
            "opd_streams": model.streams.num_streams,
            "opd_stream_hits": model.streams.num_hits,
            "opd_stream_evictions": model.streams.num_evicted,
        }


def _one_line(record: logging.LogRecord) -> bool:
    """aiohttp reports a client's broken HTTP with its parser's traceback: keep one line; and nothing of who has left."""
    error = record.exc_info[1] if record.exc_info is not None else None
    record.exc_info = None
    if error is not None:
        record.msg, record.levelno, record.levelname = f"{record.msg}: {type(error).__name__}", logging.WARNING, "WARNING"
    return not isinstance(error, ConnectionError)
