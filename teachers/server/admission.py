"""How much a server takes on at once: tokens to compute and bytes to hold, each counted once from acceptance to answer."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

RETRY_AFTER_S = 1


class Refused(Exception):
    """A request that gets an error instead of an answer: the HTTP status, one line, and whether to come again."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message


class Share:
    """What one request holds of a server."""

    def __init__(self, admission: "Admission") -> None:
        self._admission, self.num_tokens, self.num_bytes = admission, 0, 0

    def add_bytes(self, count: int) -> None:
        """Counts memory that the request needs. Raises `Refused` (503) when the server holds too much already."""
        admission = self._admission
        if admission.num_bytes + count > admission.max_bytes:
            raise Refused(503, f"the server holds {admission.num_bytes} bytes of requests and answers: come again")
        admission.num_bytes += count
        self.num_bytes += count

    def accept(self, num_tokens: int) -> None:
        """Takes the request on: it will be answered, whatever happens. Raises `Refused`: 503, or 413 if it can never fit."""
        assert self.num_tokens == 0, "accepted twice"
        admission, num_tokens = self._admission, max(1, num_tokens)
        if admission.draining:
            raise Refused(503, "the server is shutting down")
        if num_tokens > admission.max_tokens:
            raise Refused(413, f"{num_tokens} tokens in one request: the server's queue takes {admission.max_tokens}")
        if admission.num_tokens + num_tokens > admission.max_tokens:
            raise Refused(503, f"{admission.num_tokens} tokens are waiting already: come again")
        admission.num_tokens += num_tokens
        admission.num_accepted += 1
        admission.idle.clear()
        self.num_tokens = num_tokens


class Admission:
    """The server's shares. Lives in one event loop."""

    def __init__(self, max_tokens: int, max_bytes: int) -> None:
        self.max_tokens, self.max_bytes = max_tokens, max_bytes
        self.num_tokens = self.num_bytes = self.num_accepted = 0
        self.draining = False
        self.idle = asyncio.Event()
        self.idle.set()

    @contextmanager
    def share(self) -> Iterator[Share]:
        """An empty share; whatever it holds is given back at the end."""
        share = Share(self)
        try:
            yield share
        finally:
            self.num_bytes -= share.num_bytes
            self.num_tokens -= share.num_tokens
            if share.num_tokens:
                self.num_accepted -= 1
            if not self.num_accepted:
                self.idle.set()
