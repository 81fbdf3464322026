"""The rollout server: turns of the student, chunk by chunk, from the weights that the trainer sent last.

`POST /v1/sample` answers with one frame a chunk, each behind its length (4 bytes, little-endian); a length of 0 says only
that the turn is not forgotten. Whoever closes the connection stops the turn. `PUT /v1/weights/DIGEST` takes a file of
`opd.students.weights`. A request names the weights that it wants to be answered by, and gets a 409 from others.
"""

import asyncio
import contextlib
import hashlib
import logging
import socket
import tempfile
from collections.abc import AsyncIterator, Mapping
from importlib.metadata import version
from pathlib import Path

from aiohttp import web

from opd.records import SampleRequest
from opd.students.server.backend import StudentBackend
from opd.students.weights import BadWeights
from opd.teachers.digest import NUM_DIGITS
from opd.teachers.server.admission import Refused
from opd.teachers.server.base import Limits, ModelServer
from opd.teachers.server.checks import Bounds, check_generate
from opd.teachers.server.gate import STALL_S, STARTED, break_off, pieces, read_body
from opd.teachers.wire import DIGEST, MEDIA_TYPE, PROTOCOL, decode_sample_request, encode_chunk

BEAT_S = 5.0  # between two signs of life of a turn that waits for its tokens
SEND_S = 60.0  # for a client to take a chunk
HEADER_BYTES = 16 * 2**20  # of a file of weights beside them
log = logging.getLogger(__name__)


class StudentServer(ModelServer):
    """Example: `server = StudentServer(ServedStudent.load(options)); await server.start(listener)`"""

    def __init__(self, model: StudentBackend, *, token: str | None = None, limits: Limits | None = None) -> None:
        self.model = model
        routes = [
            web.get("/v1/info", self._info),
            web.post("/v1/sample", self._sample),
            web.put("/v1/weights/{digest}", self._weights),
        ]
        super().__init__(routes, token, limits or Limits(body_bytes=16 * 2**20))
        self._taking = asyncio.Lock()

    async def start(self, listener: socket.socket) -> None:
        """See `ModelServer.start`. A model that is lost for good ends the server."""
        here = asyncio.get_running_loop()

        def tell(why: str) -> None:
            here.call_soon_threadsafe(self.fail, why)

        self.model.when_dead(tell)
        await super().start(listener)

    async def stop(self, grace_s: float = 30.0) -> bool:
        """See `ModelServer.stop`."""
        try:
            return await super().stop(grace_s)
        finally:
            await asyncio.to_thread(self.model.close)

    async def _info(self, request: web.Request) -> web.Response:
        limits = {"body_bytes": self.limits.body_bytes, "queue_tokens": self.limits.queue_tokens}
        return web.json_response({"protocol": PROTOCOL, "version": version("opd"), **self.model.info(), "limits": limits})

    async def _sample(self, request: web.Request) -> web.StreamResponse:
        with self.admission.share() as share:
            asked, weights = decode_sample_request(await read_body(request, self.limits.body_bytes, share))
            if weights != self.model.weights:
                raise Refused(409, f"this server has the weights {self.model.weights or 'of nobody yet'}, not {weights}")
            share.add_bytes(check_generate(asked, weights, self._bounds(weights)))
            share.accept(len(asked.context_ids) + asked.max_new_tokens)
            response = web.StreamResponse(headers={"Content-Type": MEDIA_TYPE})
            await response.prepare(request)
            request[STARTED] = True
            async with contextlib.aclosing(self._frames(asked, weights)) as frames:  # type: ignore[type-var]
                async for frame in frames:
                    try:
                        async with asyncio.timeout(SEND_S):
                            await response.write(len(frame).to_bytes(4, "little") + frame)
                    except TimeoutError:
                        break_off(request)
            await response.write_eof()
            return response

    async def _frames(self, asked: SampleRequest, weights: str) -> AsyncIterator[bytes]:
        """The frames of a turn that is sampled in the model's thread; an empty one where nothing came for a while."""
        here, made = asyncio.get_running_loop(), asyncio.Queue[bytes | None]()

        async def work() -> None:
            if self.model.weights != weights:
                raise ConnectionAbortedError("other weights came first")
            async with contextlib.aclosing(self.model.generate(asked)) as chunks:  # type: ignore[type-var]
                async for chunk in chunks:
                    here.call_soon_threadsafe(made.put_nowait, encode_chunk(chunk, weights))

        task = asyncio.create_task(self._thread.run(work))
        task.add_done_callback(lambda _: made.put_nowait(None))
        try:
            while True:
                try:
                    frame = await asyncio.wait_for(made.get(), BEAT_S)
                except TimeoutError:
                    frame = b""
                if frame is None:
                    break
                yield frame
            await task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _weights(self, request: web.Request) -> web.Response:
        digest = request.match_info["digest"]
        if not DIGEST.fullmatch(digest):
            raise Refused(400, f"weights are named by a digest like {DIGEST.pattern}")
        if self.admission.draining:
            raise Refused(503, "the server is shutting down")
        async with self._taking:
            with tempfile.TemporaryDirectory(prefix="opd-weights-") as folder:
                path = Path(folder, "weights.safetensors")
                await self._receive(request, path, digest)
                await self._idle()
                try:
                    await self._thread.run(lambda: self._take(path, digest))
                except BadWeights as error:
                    raise Refused(400, str(error)) from None
        log.info("weights %s", digest)
        return web.Response(status=204)

    async def _receive(self, request: web.Request, path: Path, digest: str) -> None:
        """Writes the body to the file. Raises `Refused`, also where it has another digest."""
        found, limit = hashlib.sha256(), self.model.num_bytes * 2 + HEADER_BYTES  # float32 for a server in bfloat16
        with path.open("wb") as file:
            async for piece in pieces(request, limit):
                found.update(piece)
                await asyncio.to_thread(file.write, piece)
        if found.hexdigest()[:NUM_DIGITS] != digest:
            raise Refused(400, "the weights do not have the digest by which they are named: they did not come whole")

    async def _idle(self) -> None:
        """Until no turn is being decoded. Raises `Refused` (503) where that takes long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STALL_S):
                while self.model.busy:
                    await asyncio.sleep(0.01)
        if self.model.busy:
            raise Refused(503, "turns are being decoded with the weights that would be replaced: come again")

    async def _take(self, path: Path, digest: str) -> None:
        if self.model.busy:  # a turn has begun between the look and the work
            raise Refused(503, "turns are being decoded with the weights that would be replaced: come again")
        await self.model.take(path, digest)

    def _bounds(self, weights: str) -> Bounds:
        model = self.model
        return Bounds(
            models=(weights,),
            rows=model.rows,
            max_context=model.max_context,
            hidden_bytes=0,
            vocab=model.vocab,
            max_answer_bytes=self.limits.body_bytes,
            sampling=weights,
        )

    def _values(self) -> Mapping[str, float]:
        return {
            **super()._values(),
            "opd_sampled_tokens": self.model.num_sampled,
            "opd_weight_syncs": self.model.num_syncs,
        }
