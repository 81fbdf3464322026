"""What the engine expects of anything that samples the student's turns."""

from collections.abc import AsyncIterator
from typing import Protocol

from torch import nn

from opd.records import Chunk, SampleRequest


class Sampler(Protocol):
    """Decodes many turns at once and reports each as it goes."""

    concurrent: bool  # whether it has weights and a processor of its own, so that it may go on during an update

    @property
    def busy(self) -> bool:
        """Whether turns are being decoded."""
        ...

    def generate(self, request: SampleRequest) -> AsyncIterator[Chunk]:
        """The chunks of one turn; the last one carries its `finish`. Closing the iterator early stops the turn."""
        ...

    def sync(self, student: nn.Module, version: int) -> None:
        """Takes over the student's weights; what is sampled from here on carries `version`."""
        ...

    def release(self) -> None:
        """Gives back the memory of what the next `sync` brings; nothing is sampled until then."""
        ...

    def close(self) -> None:
        """Ends threads and connections; nothing is sampled any more."""
        ...
