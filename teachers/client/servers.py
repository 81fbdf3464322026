"""What is read from a teacher's servers once, before a run: what they serve, the tokenizer, the output head.

Everything public here blocks and runs an event loop of its own, so that it must not be called while one is running.
"""

import asyncio
import itertools
import re
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from opd.errors import UserError
from opd.kernels.head import OutputHead
from opd.teachers.client.handshake import Identity, Info, read_info
from opd.teachers.client.listening import ListeningClock
from opd.teachers.client.replica import Busy, Failed, Replica, last_errors, open_session, pause_s, within
from opd.teachers.digest import head_digest, tokens_digest
from opd.teachers.wire import WireError, decode_head
from opd.tokenization import quiet

MAX_ROW_BYTES = 65536  # of a head: H = 16,384 in float32
MAX_TOKENIZER_BYTES = 2**28
FILE_NAME = re.compile(r"([A-Za-z0-9_-]{1,64}/)?[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
T = TypeVar("T")


@dataclass(frozen=True)
class Servers:
    """The addresses of one teacher. Each method raises `UserError` where no answer comes within the deadline."""

    name: str  # the teacher's
    urls: tuple[str, ...]
    token: str | None
    timeout_s: float  # one attempt
    deadline_s: float  # all attempts

    @property
    def field(self) -> str:
        """The recipe's field that errors name."""
        return f"teachers.{self.name}.url"

    def infos(self) -> list[tuple[str, Info]]:
        """(address, its `/v1/info`) of every one. Raises `UserError` where one is no teacher server, or wants a token."""

        async def fetch(replicas: Sequence[Replica]) -> list[Info]:
            return await _all(*(_Asking(self, [replica]).answer(read_info) for replica in replicas))

        return list(zip(self.urls, self._run(fetch)))

    def tokenizer(self, identity: Identity) -> PreTrainedTokenizerBase:
        """The tokenizer of the first one that answers. Raises `UserError` where it cannot be read, or is another here."""

        async def read(replica: Replica) -> Any:
            return await replica.get_json("/v1/tokenizer", MAX_TOKENIZER_BYTES)

        tokenizer = self._load_tokenizer(self._run(lambda replicas: _Asking(self, replicas).answer(read)))
        if tokens_digest(tokenizer.get_vocab()) != identity.tokens:
            raise UserError(
                f"{self.field}: the server's tokenizer has other tokens here; install the same transformers on both sides"
            )
        return tokenizer

    def head(self, identity: Identity) -> OutputHead:
        """The output head, on the CPU, of the first one that has it. Time limits start anew while bytes keep coming."""

        async def fetch(replicas: Sequence[Replica]) -> OutputHead:
            asking, limit = _Asking(self, replicas), (identity.rows + 1) * MAX_ROW_BYTES

            async def read(replica: Replica) -> OutputHead:
                return _read_head(await replica.get(f"/v1/heads/{identity.head}", limit, asking.hear), identity)

            return await asking.answer(read)

        return self._run(fetch)

    def _run(self, work: Callable[[Sequence[Replica]], Awaitable[T]]) -> T:
        assert not _loop_runs(), "this would block the running event loop: call it before"

        async def run() -> T:
            async with open_session(self.token) as session:
                return await work([Replica(session, url, self.field) for url in self.urls])

        return asyncio.run(run())

    def _load_tokenizer(self, files: Any) -> PreTrainedTokenizerBase:
        """From the texts of its files by name."""
        if not isinstance(files, dict) or not all(
            FILE_NAME.fullmatch(name) and isinstance(text, str) for name, text in files.items()
        ):
            raise UserError(f"{self.field}: a server's /v1/tokenizer is no files by name; install the same opd on both")
        with tempfile.TemporaryDirectory() as folder:
            for name, text in files.items():
                path = Path(folder, name)
                path.parent.mkdir(exist_ok=True)
                path.write_text(text, "utf-8")
            try:
                return quiet(AutoTokenizer.from_pretrained(folder, trust_remote_code=False))
            except Exception as error:  # whatever a file of someone else's makes of it
                line = " ".join(str(error).split())[:200]
                raise UserError(f"{self.field}: the server's tokenizer cannot be read here: {line}") from None


class _Asking:
    """Asks some replicas in turn until one answers."""

    def __init__(self, servers: Servers, replicas: Sequence[Replica]) -> None:
        self.servers, self.replicas = servers, replicas
        self.clock = ListeningClock(min(servers.timeout_s, servers.deadline_s))
        self._heard = self.clock.now()

    def hear(self) -> None:
        """Bytes have come."""
        self._heard = self.clock.now()

    async def answer(self, ask: Callable[[Replica], Awaitable[T]]) -> T:
        """The first answer. Raises `UserError` when nothing was heard for the length of the deadline."""
        servers = self.servers
        try:
            async with self.clock.until(lambda: self._heard + servers.deadline_s):
                return await self._persist(ask)
        except TimeoutError:
            raise UserError(
                f"{servers.field}: no answer within {servers.deadline_s:g} s ({last_errors(self.replicas)}); "
                "start the server (opd serve teacher), or correct the address"
            ) from None

    async def _persist(self, ask: Callable[[Replica], Awaitable[T]]) -> T:
        for num_tries, replica in enumerate(itertools.cycle(self.replicas)):
            try:
                return await within(self.clock, self.servers.timeout_s, ask(replica), since=lambda: self._heard)
            except (Busy, Failed) as error:
                replica.last_error = str(error)
            await asyncio.sleep(pause_s(1 + num_tries // len(self.replicas)))
        raise AssertionError("a cycle has no end")


def _read_head(body: bytearray, identity: Identity) -> OutputHead:
    try:
        head, head_id = decode_head(body)
    except WireError as error:
        raise Failed(f"a malformed head: {error}") from None
    if not head_id == identity.head == head_digest(head) or head.num_rows != identity.rows:
        raise Failed("another head than the one it was asked for")
    return head


async def _all(*work: Awaitable[T]) -> list[T]:
    """All results, or the first error; then nothing goes on."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _loop_runs() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
