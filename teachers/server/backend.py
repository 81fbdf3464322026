"""What the teacher server needs of whatever computes behind it."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from opd.kernels.head import OutputHead
from opd.records import SampleRequest
from opd.teachers.abilities import Abilities
from opd.teachers.wire import Asked


class Backend(Protocol):
    """A model with its tokenizer, and the digests by which clients know it. What is awaited runs in the model's thread."""

    name: str  # of the base, without its folders
    weights: Mapping[str, str]  # digest by model name, `base` among them
    head_id: str
    tokens: str  # digest of the token -> id map
    tokenizer_files: Mapping[str, str]  # texts by file name

    @property
    def abilities(self) -> Abilities: ...

    @property
    def rows(self) -> int:
        """Of the output head, padding included."""
        ...

    @property
    def vocab(self) -> int:
        """Ids that are sampled."""
        ...

    @property
    def max_context(self) -> int:
        """Tokens of the longest sequence."""
        ...

    @property
    def hidden_bytes(self) -> int:
        """Of one token's last hidden state; 0 where there are none."""
        ...

    @property
    def head(self) -> OutputHead | None:
        """None where the abilities have no hidden states."""
        ...

    @property
    def max_batch_tokens(self) -> int: ...

    @property
    def max_stream_bytes(self) -> int: ...

    def info(self) -> dict[str, Any]:
        """What a client compares before it believes an answer."""
        ...

    async def score(self, asked: Asked) -> bytes:
        """The frame of an answer. Raises `StreamLost`, and `Refused` for what the model cannot do."""
        ...

    async def generate(self, request: SampleRequest) -> bytes:
        """The frame of a sampled turn. Raises `Refused` for what the model cannot do."""
        ...

    def close_stream(self, name: str) -> None:
        """Forgets a stream."""
        ...

    def counts(self) -> Mapping[str, float]:
        """Figures for `/metrics`, by names in `opd.teachers.server.metrics.HELP`."""
        ...

    def when_dead(self, tell: Callable[[str], None]) -> None:
        """`tell(why)` is called, in some thread, should the model be lost for good."""
        ...

    def close(self) -> None:
        """Ends what computes, after the last answer."""
        ...
