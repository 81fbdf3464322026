"""One address of a teacher: what it is asked over HTTP, and what the results mean.

A result is an answer, `UserError` (the user must mend it), `StreamLost`, `Busy` (later), or `Failed` (elsewhere, or again).
"""

import asyncio
import io
import json
import math
import os
import random
from collections.abc import Awaitable, Callable, Iterable
from types import SimpleNamespace
from typing import Any, TypeVar

import aiohttp
from yarl import URL

from opd.errors import UserError
from opd.teachers.client.listening import ListeningClock
from opd.teachers.stream import StreamLost
from opd.teachers.wire import MEDIA_TYPE

MAX_ERROR_BYTES = 65536  # read of an answer that only says what went wrong
SHORTEST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 5.0  # before another attempt
T = TypeVar("T")


class OtherModel(UserError):
    """An answer of other weights than at the start."""


class Failed(Exception):
    """An attempt that came to nothing, in one line; another may succeed."""


class Busy(Exception):
    """The replica has enough to do for now. `retry_after_s` is what it says itself."""

    def __init__(self, message: str, retry_after_s: float | None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s

    @property
    def pause_s(self) -> float:
        """Seconds to leave it alone."""
        asked_s = random.uniform(0.5, 1.0) if self.retry_after_s is None else self.retry_after_s
        return max(SHORTEST_PAUSE_S, min(LONGEST_PAUSE_S, asked_s))


def last_errors(replicas: Iterable["Replica"]) -> str:
    """What each of them last came to nothing with, as part of a line."""
    return "; ".join(f"{replica.url}: {replica.last_error}" for replica in replicas)


async def within(
    clock: ListeningClock, seconds: float, work: Awaitable[T], since: Callable[[], float] = lambda: -math.inf
) -> T:
    """What `work` gives in this time, which may start anew meanwhile: `since()` is when it last did. Else `Failed`."""
    start = clock.now()
    try:
        async with clock.until(lambda: max(start, since()) + seconds):
            return await work
    except TimeoutError:
        raise Failed(f"no answer within {seconds:g} s") from None


def pause_s(num_failures: int) -> float:
    """Seconds to wait after so many failures (at least 1) in a row: twice as long each time, not in step with others."""
    return min(LONGEST_PAUSE_S, 0.1 * 2 ** min(num_failures - 1, 10)) * random.uniform(0.5, 1.0)


def open_session(token: str | None) -> aiohttp.ClientSession:
    """A session of the running loop: no limits of its own, no proxies, no cookies, no compression."""
    headers = {"Accept-Encoding": "identity"}
    if token is not None:
        headers["Authorization"] = f"Bearer {token}"
    reuse = aiohttp.TraceConfig()
    reuse.on_connection_reuseconn.append(_note_reuse)
    return aiohttp.ClientSession(
        headers=headers,
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        trust_env=False,
        trace_configs=[reuse],
    )


class Replica:
    """One address, and how it is doing. Lives in the loop of its session."""

    def __init__(self, session: aiohttp.ClientSession, url: str, field: str) -> None:
        """`field` is the recipe's field with the address, for errors."""
        self.session, self.url, self.field = session, url, field
        self.up = True
        self.resting = False  # it said that it has enough to do
        self.num_requests = self.num_tokens = 0  # under way
        self.num_failures = 0  # since its last answer
        self.last_error = "no answer yet"

    async def get_json(self, path: str, max_bytes: int) -> Any:
        """The JSON value at `path`. Raises `UserError` (also when it is none), `Busy` and `Failed`."""
        body = await self._exchange("GET", path, max_bytes)
        try:
            return json.loads(bytes(body))
        except (ValueError, RecursionError):
            raise UserError(f"{self.field}: {self.url} is no teacher server of opd: its {path} is not JSON") from None

    async def get(self, path: str, max_bytes: int, progress: Callable[[], None] = lambda: None) -> bytearray:
        """The bytes at `path`; `progress` is called whenever some have come. Raises `UserError`, `Busy` and `Failed`."""
        return await self._exchange("GET", path, max_bytes, progress=progress)

    async def post(self, path: str, body: bytes, max_bytes: int) -> bytearray:
        """The answer to `body`, of at most `max_bytes`. Raises `StreamLost` for a 409, and as `get` does."""
        return await self._exchange("POST", path, max_bytes, body)

    async def delete(self, path: str) -> None:
        """Raises as `get` does."""
        await self._exchange("DELETE", path, MAX_ERROR_BYTES)

    async def _exchange(
        self,
        method: str,
        path: str,
        max_bytes: int,
        body: bytes | None = None,
        progress: Callable[[], None] = lambda: None,
    ) -> bytearray:
        """One request; once more, at once, if an idle connection turns out to have been closed: that says little."""
        await asyncio.sleep(0)  # lets the loop see which idle connections have been closed
        for may_be_stale in (True, False):
            seen = SimpleNamespace(reused=False, answered=False)
            try:
                status, headers, content = await self._once(method, path, max_bytes, body, progress, seen)
                break
            except aiohttp.ClientConnectorCertificateError as error:
                why = _one_line(getattr(error.certificate_error, "verify_message", "") or error.certificate_error)
                raise UserError(
                    f"{self.field}: {self.url} shows a certificate that is not trusted ({why}); name others in SSL_CERT_FILE"
                ) from None
            except (aiohttp.ClientError, OSError) as error:
                if may_be_stale and seen.reused and not seen.answered:
                    continue
                raise Failed(reason(error)) from None
        return self.meaning(method, status, headers, content)

    async def _once(
        self,
        method: str,
        path: str,
        max_bytes: int,
        body: bytes | None,
        progress: Callable[[], None],
        seen: SimpleNamespace,
    ) -> tuple[int, Any, bytearray]:
        """(status, headers, content) of one request. Raises aiohttp's errors, `OSError` and `Failed`."""
        async with self.session.request(
            method,
            URL(self.url + path),
            data=body if body is None or len(body) < 2**20 else io.BytesIO(body),  # aiohttp warns of large bytes
            headers={} if body is None else {"Content-Type": MEDIA_TYPE},
            allow_redirects=False,
            trace_request_ctx=seen,
        ) as response:
            seen.answered = True
            limit = max_bytes if response.status == 200 else MAX_ERROR_BYTES
            content = bytearray()
            async for part in response.content.iter_any():
                content += part
                progress()
                if len(content) > limit:
                    if response.status == 200:
                        raise Failed(f"its answer is longer than the {limit} bytes that were to be expected")
                    break
            return response.status, response.headers, content

    def meaning(self, method: str, status: int, headers: Any, content: bytearray) -> bytearray:
        """The content of a success; everything else is raised."""
        if status in (200, 204):
            return content
        text = _error_text(content)
        if status == 409 and method == "POST":
            raise StreamLost(text)
        if status in (429, 503):
            raise Busy(f"it answers {status}: {text}", _seconds(headers.get("Retry-After")))
        if status == 401:
            raise UserError(
                f"{self.field}: {self.url} answers 401: {text}; set token_file to the file that it was started with"
            )
        if status in (400, 413):  # our servers say what to do about it
            raise UserError(f"{self.field}: {self.url} answers {status}: {text}")
        if 300 <= status < 500 and status != 408:
            hint = "give the address that it leads to" if status < 400 else "is this the opd server of this teacher?"
            raise UserError(f"{self.field}: {self.url} answers {status}: {text}; {hint}")
        raise Failed(f"it answers {status}: {text}")


async def _note_reuse(_session: Any, context: SimpleNamespace, _params: Any) -> None:
    context.trace_request_ctx.reused = True


def _error_text(content: bytearray) -> str:
    """What an answer says about an error: our servers' JSON, or the beginning of whatever it is."""
    try:
        value = json.loads(bytes(content))
    except (ValueError, RecursionError):
        value = None
    text = value.get("error") if isinstance(value, dict) else None
    return _one_line(text if isinstance(text, str) else content[:200].decode("utf-8", "replace")) or "nothing further"


def _one_line(value: object) -> str:
    text = " ".join(str(value).split())[:300]
    return "".join(c if c.isprintable() else "?" for c in text)


def _seconds(text: str | None) -> float | None:
    """The seconds of a Retry-After header; None for a date, or what is no number."""
    return float(text) if text is not None and text.isascii() and text.isdigit() else None


def reason(error: BaseException) -> str:
    """Why a connection came to nothing, in few words."""
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return "its host name is not known"
    if isinstance(error, aiohttp.ServerDisconnectedError):
        return "it closed the connection"
    if isinstance(error, aiohttp.ClientPayloadError):
        return "its answer was cut short"
    if isinstance(error, aiohttp.ClientResponseError):
        return f"its answer is no HTTP: {_one_line(error.message)[:100]}"
    if isinstance(error, aiohttp.ClientConnectorSSLError):
        return f"no TLS with it: {_one_line(error.os_error)[:100]}"
    number = error.errno if isinstance(error, OSError) else None
    return os.strerror(number).lower() if number else _one_line(error) or type(error).__name__
