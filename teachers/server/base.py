"""What all servers share: routes over a model that lives in a thread of its own, admission, metrics, an orderly end.

The loop that talks to clients never computes: it reads and checks requests, hands them to the model's thread, and writes
answers. Well-formed HTTP gets a status and, where something is wrong, one line of JSON; prompts appear in no message, metric
or log.
"""

import asyncio
import logging
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from aiohttp import web

from opd.teachers.loop_thread import LoopThread
from opd.teachers.server.admission import Admission
from opd.teachers.server.gate import gate
from opd.teachers.server.metrics import CONTENT_TYPE, ServerMetrics
from opd.teachers.server.options import listen

KEEPALIVE_S = 75.0
CLOSE_S = 2.0  # for connections and the model's thread to end once everything accepted is answered
HELD_BODIES = 16  # requests and answers of the largest size that are held at once
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Limits:
    """What a server takes on."""

    queue_tokens: int = 2**20  # of all requests accepted and not yet answered
    body_bytes: int = 64 * 2**20  # of one request, and of one answer


class ModelServer:
    """Serves from `start` to `stop`, in the event loop that calls them."""

    def __init__(self, routes: Sequence[web.RouteDef], token: str | None, limits: Limits) -> None:
        self.limits = limits
        self.admission = Admission(limits.queue_tokens, HELD_BODIES * limits.body_bytes)
        self.metrics = ServerMetrics(self._values)
        self.port = 0
        self.told = asyncio.Event()  # that it is to stop
        self.failure: str | None = None  # why it stops by itself
        self._thread = LoopThread("model")
        app = web.Application(middlewares=[gate(token, self.metrics)])
        app.add_routes([web.get("/health", self._health), *routes, web.get("/metrics", self._metrics)])
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

    def fail(self, why: str) -> None:
        """What computes is lost for good: takes nothing more, and is to stop."""
        self.failure, self.admission.draining = why, True
        self.told.set()

    async def _health(self, request: web.Request) -> web.Response:
        draining = self.admission.draining
        return web.json_response({"status": "draining" if draining else "ok"}, status=503 if draining else 200)

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=self.metrics.text(), headers={"Content-Type": CONTENT_TYPE})

    def _values(self) -> Mapping[str, float]:
        """Figures for `/metrics`, by names in `opd.teachers.server.metrics.HELP`."""
        return {
            "opd_outstanding_tokens": self.admission.num_tokens,
            "opd_outstanding_bytes": self.admission.num_bytes,
        }


def _one_line(record: logging.LogRecord) -> bool:
    """aiohttp reports a client's broken HTTP with its parser's traceback: keep one line; and nothing of who has left."""
    error = record.exc_info[1] if record.exc_info is not None else None
    record.exc_info = None
    if error is not None:
        record.msg, record.levelno, record.levelname = f"{record.msg}: {type(error).__name__}", logging.WARNING, "WARNING"
    return not isinstance(error, ConnectionError)
