"""What the rollout server needs of whatever samples behind it."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, Protocol

from opd.records import Chunk, SampleRequest


class StudentBackend(Protocol):
    """A model that samples, and takes other weights. What is awaited runs in the model's thread."""

    name: str  # without its folders
    tokens: str  # digest of the token -> id map
    weights: str | None  # digest of what was sent last; None until then, and while it is taken over
    vocab: int  # ids that are sampled
    num_sampled: int  # tokens so far
    num_syncs: int

    @property
    def num_bytes(self) -> int:
        """Of all weights."""
        ...

    @property
    def rows(self) -> int:
        """Rows of the output head, padding included."""
        ...

    @property
    def max_context(self) -> int:
        """Tokens of the longest prompt with its completion."""
        ...

    @property
    def busy(self) -> bool:
        """Whether turns are being decoded."""
        ...

    def info(self) -> dict[str, Any]:
        """What a client compares before it sends anything."""
        ...

    async def take(self, path: Path, digest: str) -> None:
        """Takes over the weights of a file. Raises `BadWeights`; what was there before then stays."""
        ...

    def generate(self, request: SampleRequest) -> AsyncIterator[Chunk]:
        """The chunks of a turn; closing it stops the turn."""
        ...

    def when_dead(self, tell: Callable[[str], None]) -> None:
        """`tell(why)` is called, in some thread, should the model be lost for good."""
        ...

    def close(self) -> None:
        """Ends what computes, after the last answer."""
        ...
