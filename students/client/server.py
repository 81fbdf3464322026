"""One rollout server, as the trainer asks it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
from yarl import URL

from opd.errors import UserError
from opd.teachers.client.replica import MAX_ERROR_BYTES, Failed, Replica, reason
from opd.teachers.frame import PROTOCOL
from opd.teachers.wire import MEDIA_TYPE

MAX_INFO_BYTES = 2**20
MAX_FRAME_BYTES = 2**24
PIECE_BYTES = 2**20
Info = dict[str, Any]


class OtherWeights(Exception):
    """The server has other weights than a turn is to be sampled from."""


class RolloutServer(Replica):
    """Lives in the loop of its session. `hear` is called whenever something has come or gone."""

    async def info(self) -> Info:
        """Its `/v1/info`. Raises `UserError` when it is no rollout server of this protocol, and as `get_json` does."""
        info = await self.get_json("/v1/info", MAX_INFO_BYTES)
        start = f"{self.field}: {self.url}"
        if not isinstance(info, dict) or info.get("kind") != "student":
            raise UserError(f"{start} is no rollout server: start one with opd serve student")
        if info.get("protocol") != PROTOCOL:
            raise UserError(
                f"{start} speaks protocol {info.get('protocol')}, this side speaks {PROTOCOL}: install the same opd on both"
            )
        return info

    async def sample(self, body: bytes, hear: Callable[[], None]) -> AsyncIterator[bytes]:
        """The frames of a turn. Closing it stops the turn.

        Raises `OtherWeights`, `Busy`, `Failed` and `UserError`.
        """
        try:
            async with self._request("POST", "/v1/sample", body, {}) as response:
                if response.status != 200:
                    await self._refuse(response)
                while True:
                    length = int.from_bytes(await response.content.readexactly(4), "little")
                    hear()
                    if length > MAX_FRAME_BYTES:
                        raise Failed(f"a malformed answer: a frame of {length} bytes")
                    if length:
                        yield await response.content.readexactly(length)
        except asyncio.IncompleteReadError:
            raise Failed("its answer was cut short") from None
        except (aiohttp.ClientError, OSError) as error:
            raise Failed(reason(error)) from None

    async def send(self, path: Path, digest: str, hear: Callable[[], None]) -> None:
        """Gives it the weights in a file. Raises `Busy`, `Failed` and `UserError`."""

        async def read() -> AsyncIterator[bytes]:
            with path.open("rb") as file:
                while piece := await asyncio.to_thread(file.read, PIECE_BYTES):
                    yield piece
                    hear()

        try:
            size = {"Content-Length": str(path.stat().st_size)}
            async with self._request("PUT", f"/v1/weights/{digest}", read(), size) as response:
                if response.status not in (200, 204):
                    await self._refuse(response)
        except (aiohttp.ClientError, OSError) as error:
            raise Failed(reason(error)) from None

    def _request(self, method: str, path: str, data: Any, headers: dict[str, str]) -> Any:
        return self.session.request(
            method,
            URL(self.url + path),
            data=data,
            headers={"Content-Type": MEDIA_TYPE, **headers},
            allow_redirects=False,
            trace_request_ctx=SimpleNamespace(),
        )

    async def _refuse(self, response: aiohttp.ClientResponse) -> None:
        """Raises what an answer other than a success means."""
        content = bytearray(await response.content.read(MAX_ERROR_BYTES))
        if response.status == 409:
            raise OtherWeights(f"it answers 409: {content[:200].decode('utf-8', 'replace')}")
        self.meaning(response.method, response.status, response.headers, content)
