"""The process of `opd serve teacher`: loads, serves, and drains when told to end."""

import asyncio
import logging
import os
import signal
import socket
import sys
from typing import TYPE_CHECKING

from opd.teachers.server.options import ServeOptions, bind, server_token

if TYPE_CHECKING:
    from opd.teachers.server.app import Limits
    from opd.teachers.server.model import ServedModel

GRACE_S = 30.0


def serve_teacher(options: ServeOptions) -> None:
    """Serves until SIGTERM or SIGINT, then answers what it had accepted. One line on stdout says when it is ready.

    Raises `UserError` for what the options have wrong, the cheap mistakes before the model is loaded.
    """
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    logging.getLogger("opd").setLevel(logging.INFO)
    token = server_token(options.token_file)
    with bind(options.host, options.port, has_token=token is not None) as listener:
        from opd.teachers.server.app import Limits
        from opd.teachers.server.model import ServedModel

        model = ServedModel.load(options)
        limits = Limits(queue_tokens=options.max_queue_tokens, body_bytes=options.max_body_mib * 2**20)
        ended = asyncio.run(_serve(model, token, limits, listener))
    if not ended:
        # a forward pass outlived the grace period, and an interpreter cannot end in order under a thread that computes
        sys.stderr.flush()
        os._exit(0)


async def _serve(model: "ServedModel", token: str | None, limits: "Limits", listener: socket.socket) -> bool:
    """Whether everything ended in time."""
    from opd.teachers.server.app import TeacherServer

    told = asyncio.Event()
    server = TeacherServer(model, token=token, limits=limits)
    await server.start(listener)
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, told.set)
    host = listener.getsockname()[0]
    where = f"http://{f'[{host}]' if ':' in host else host}:{server.port}"
    print(f"serving {model.name} at {where} (weights {model.weights['base']}, tokens {model.tokens})", flush=True)
    await told.wait()
    log = logging.getLogger(__name__)
    log.info("stopping; %d requests to answer", server.admission.num_accepted)
    ended = await server.stop(GRACE_S)
    log.info("stopped")
    return ended
