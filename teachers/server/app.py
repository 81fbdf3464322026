"""The teacher server: the routes of a frozen model."""

import asyncio
import contextlib
import socket
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

from aiohttp import web

from opd.teachers.server.admission import Refused, Share
from opd.teachers.server.backend import Backend
from opd.teachers.server.base import Limits, ModelServer
from opd.teachers.server.checks import Bounds, check_generate, check_score
from opd.teachers.server.gate import STARTED, break_off, read_body
from opd.teachers.wire import (
    MEDIA_TYPE,
    PROTOCOL,
    STREAM_NAME,
    decode_sample_request,
    decode_score_request,
    encode_head,
)

SEND_S = 300.0  # for a client to take its answer, which holds its place in the queue meanwhile


class TeacherServer(ModelServer):
    """Example: `server = TeacherServer(ServedModel.load(options)); await server.start(listener)`"""

    def __init__(self, model: Backend, *, token: str | None = None, limits: Limits | None = None) -> None:
        self.model = model
        routes = [
            web.get("/v1/info", self._info),
            web.get("/v1/tokenizer", self._tokenizer),
            web.get("/v1/heads/{id}", self._head),
            web.post("/v1/score", self._score),
            web.post("/v1/generate", self._generate),
            web.delete("/v1/streams/{name}", self._close_stream),
        ]
        super().__init__(routes, token, limits or Limits())
        self._bounds = Bounds(
            models=tuple(model.weights),
            rows=model.rows,
            max_context=model.max_context,
            hidden_bytes=model.hidden_bytes,
            vocab=model.vocab,
            max_answer_bytes=self.limits.body_bytes,
            abilities=model.abilities,
        )

    async def start(self, listener: socket.socket) -> None:
        """Serves on a bound socket. Raises `UserError` as `ModelServer.start` does."""
        await super().start(listener)
        loop = asyncio.get_running_loop()

        def tell(why: str) -> None:
            with contextlib.suppress(RuntimeError):  # the loop may have ended
                loop.call_soon_threadsafe(self.fail, why)

        self.model.when_dead(tell)

    async def stop(self, grace_s: float = 30.0) -> bool:
        """As `ModelServer.stop`; then ends what computes."""
        ended = await super().stop(grace_s)
        await asyncio.to_thread(self.model.close)
        return ended

    async def _info(self, request: web.Request) -> web.Response:
        limits = {
            "body_bytes": self.limits.body_bytes,
            "batch_tokens": self.model.max_batch_tokens,
            "queue_tokens": self.limits.queue_tokens,
            "stream_bytes": self.model.max_stream_bytes,
        }
        about = {"protocol": PROTOCOL, "version": version("opd"), **self.model.info()}
        return web.json_response(about | {"scores": asdict(self.model.abilities), "limits": limits})

    async def _tokenizer(self, request: web.Request) -> web.Response:
        return web.json_response(self.model.tokenizer_files)

    async def _head(self, request: web.Request) -> web.StreamResponse:
        """Piece by piece: a head may have gigabytes, and one on another device is copied no faster than it is sent."""
        head = self.model.head
        if head is None:
            raise Refused(404, "this server's backend gives no output head: serve the model with --backend hf")
        if request.match_info["id"] != self.model.head_id:
            raise Refused(404, f"this server's only head is {self.model.head_id}")
        pieces = encode_head(head, self.model.head_id)
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

    def _values(self) -> Mapping[str, float]:
        return {**super()._values(), **self.model.counts()}
