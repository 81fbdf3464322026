"""What every request passes: the bearer token, the limits on its body, and errors as one line of JSON."""

import asyncio
import hmac
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn

import torch
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from opd.teachers.server.admission import RETRY_AFTER_S, Refused, Share
from opd.teachers.server.metrics import ServerMetrics
from opd.teachers.stream import StreamLost
from opd.teachers.wire import WireError

STALL_S = 30.0  # without a byte of a body that is not whole
OPEN_ROUTE = "/health"
CLIENT_LEFT = 499  # as nginx has it; only metrics see it
STARTED = web.RequestKey("started", bool)  # set once the answer's headers are on their way
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
log = logging.getLogger("opd.teachers.server.app")


def gate(token: str | None, metrics: ServerMetrics) -> Any:
    """The middleware. With a token, every path but /health answers 401 to whoever does not show it."""
    expected = None if token is None else token.encode()

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        resource = request.match_info.route.resource
        route, start, status = "other" if resource is None else resource.canonical, time.perf_counter(), CLIENT_LEFT
        try:
            response = await _answered(request, handler, None if route == OPEN_ROUTE else expected)
            status = response.status
            return response
        finally:
            metrics.observe(route, status, time.perf_counter() - start)

    return middleware


async def _answered(request: web.Request, handler: Handler, expected: bytes | None) -> web.StreamResponse:
    try:
        if expected is not None and not _shows(request, expected):
            return _error(401, "give the server's token: Authorization: Bearer TOKEN", {"WWW-Authenticate": "Bearer"})
        return await handler(request)
    except Refused as refused:
        headers = {"Retry-After": str(RETRY_AFTER_S)} if refused.status == 503 else {}
        return _error(refused.status, refused.message, headers)
    except WireError as error:
        return _error(400, str(error))
    except StreamLost as error:
        return _error(409, f"the stream is lost: {error}")
    except web.HTTPException as error:  # aiohttp's own: no such route or method
        allowed = {name: value for name, value in error.headers.items() if name == "Allow"}
        return _error(error.status, error.reason, allowed)
    except ConnectionError:  # the client has left
        raise
    except Exception as error:
        return _failed(request, error)


def _failed(request: web.Request, error: Exception) -> web.StreamResponse:
    """Our own fault: the log gets the traceback, the client a line without internals."""
    if not vars(error).setdefault("opd_logged", False):  # requests that were computed together share it
        vars(error)["opd_logged"] = True
        log.error("%s %s failed", request.method, request.path, exc_info=error)
    chain: BaseException | None = error
    while chain is not None:  # tracebacks hold the tensors of the failed pass, and the next one needs their memory
        chain.__traceback__, chain = None, chain.__cause__ or chain.__context__
    if request.get(STARTED):
        break_off(request)
    if isinstance(error, torch.OutOfMemoryError):
        return _error(500, "the model ran out of memory: serve it with a smaller --max-batch-tokens or --max-logits-mib")
    return _error(500, "the server failed at this request: its log has the reason")


def break_off(request: web.Request) -> NoReturn:
    """Ends the connection: after half an answer nothing else can say that the rest will not come."""
    if request.transport is not None:
        request.transport.abort()
    raise ConnectionResetError


def _error(status: int, message: str, headers: dict[str, str] | None = None) -> web.Response:
    return web.json_response({"error": " ".join(message.split())}, status=status, headers=headers)


def _shows(request: web.Request, expected: bytes) -> bool:
    scheme, _, given = request.headers.get("Authorization", "").partition(" ")
    same = hmac.compare_digest(given.strip().encode("utf-8", "surrogateescape"), expected)
    return same and scheme.lower() == "bearer"


async def read_body(request: web.Request, max_bytes: int, share: Share) -> bytearray:
    """The request's body, counted in its share as it comes.

    Raises `Refused`: 413 too large, 503 as `Share.add_bytes`, 408 when it stalls, 400 when its encoding is broken.
    """
    body = bytearray()
    async for piece in pieces(request, max_bytes):
        share.add_bytes(len(piece))
        body += piece
    return body


async def pieces(request: web.Request, max_bytes: int) -> AsyncIterator[bytes]:
    """The request's body as it comes. Raises `Refused`: 413 too large, 408 when it stalls, 400 for a broken encoding."""
    too_large = Refused(413, f"the body has more than {max_bytes} bytes: ask about fewer tokens")
    if (request.content_length or 0) > max_bytes:
        raise too_large
    size = 0
    while True:
        try:
            async with asyncio.timeout(STALL_S):
                piece = await request.content.readany()
        except TimeoutError:
            raise Refused(408, f"nothing came for {STALL_S:g} s and the body is not whole") from None
        except (HttpProcessingError, web.RequestPayloadError) as error:
            raise Refused(400, f"the body cannot be read: {type(error).__name__}") from None
        if not piece:
            return
        size += len(piece)
        if size > max_bytes:
            raise too_large
        yield piece
