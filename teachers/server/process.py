"""The process of a server: loads, serves, and drains when told to end."""

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from opd.teachers.server.options import ServeOptions, bind, server_token

if TYPE_CHECKING:
    from opd.teachers.server.backend import Backend
    from opd.teachers.server.base import ModelServer

GRACE_S = 30.0


def serve_teacher(options: ServeOptions) -> None:
    """Serves until SIGTERM or SIGINT, then answers what it had accepted. One line on stdout says when it is ready.

    Raises `UserError` for what the options have wrong, the cheap mistakes before the model is loaded.
    """

    def load(token: str | None) -> tuple["ModelServer", str]:
        from opd.teachers.server.app import TeacherServer
        from opd.teachers.server.base import Limits

        if options.backend == "vllm":
            from opd.teachers.vllm.model import VLLMModel

            model: Backend = VLLMModel.load(options)
        else:
            from opd.teachers.server.model import ServedModel

            model = ServedModel.load(options)
        limits = Limits(queue_tokens=options.max_queue_tokens, body_bytes=options.max_body_mib * 2**20)
        about = f"weights {model.weights['base']}, tokens {model.tokens}"
        return TeacherServer(model, token=token, limits=limits), f"serving {model.name} at {{}} ({about})"

    run_server(options.host, options.port, options.token_file, load)


def run_server(
    host: str, port: int, token_file: str | None, load: Callable[[str | None], tuple["ModelServer", str]]
) -> None:
    """Binds the address, then loads; `load(token)` gives the server and the line that says where it is, as `{}`."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    logging.getLogger("opd").setLevel(logging.INFO)
    token = server_token(token_file)
    with bind(host, port, has_token=token is not None) as listener:
        server, ready = load(token)
        ended = asyncio.run(_serve(server, ready, listener))
    if server.failure is not None:
        print(f"error: {server.failure}; start the server again", file=sys.stderr, flush=True)
    if not ended:
        # a forward pass outlived the grace period, and an interpreter cannot end in order under a thread that computes
        sys.stderr.flush()
        os._exit(1 if server.failure else 0)
    if server.failure is not None:
        raise SystemExit(1)


async def _serve(server: "ModelServer", ready: str, listener: socket.socket) -> bool:
    """Whether everything ended in time."""
    await server.start(listener)
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, server.told.set)
    host = listener.getsockname()[0]
    print(ready.format(f"http://{f'[{host}]' if ':' in host else host}:{server.port}"), flush=True)
    await server.told.wait()
    log = logging.getLogger(__name__)
    log.info("stopping; %d requests to answer", server.admission.num_accepted)
    ended = await server.stop(GRACE_S)
    log.info("stopped")
    return ended
