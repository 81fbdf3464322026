"""Keys and values of turns that ended, for those that follow: an episode's context is read once, not at each turn."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from opd.records import Array
from opd.teachers.kv_streams import Row, Stream


class KeptTurns:
    """Sequences by their ids, of `max_bytes` together; those kept longest go first. A sequence is taken by one turn only.

    Example: `kept.put(ids, layers); kept.take(next_context_ids)`
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes, self.num_bytes = max_bytes, 0
        self._kept: dict[bytes, Stream] = {}  # by the ids, the oldest first
        self._lengths: dict[int, int] = {}  # how many there are of each length

    def put(self, ids: Array, layers: list[tuple[Tensor, Tensor]]) -> None:
        """Keeps what a model computed for these ids [t]: keys and values [h, t, D] of each layer."""
        stream = Stream(None, ids, layers)
        if (old := self._kept.pop(ids.tobytes(), None)) is not None:
            self._forget(old)
        self._kept[ids.tobytes()] = stream
        self._lengths[len(ids)] = self._lengths.get(len(ids), 0) + 1
        self.num_bytes += stream.num_bytes
        while self.num_bytes > self.max_bytes:
            self._forget(self._kept.pop(next(iter(self._kept))))

    def take(self, context_ids: Array) -> Stream | None:
        """The longest sequence that the context [c] goes on after, no longer kept."""
        for length in sorted(self._lengths, reverse=True):
            if length < len(context_ids) and (found := self._kept.pop(context_ids[:length].tobytes(), None)) is not None:
                self._forget(found)
                return found
        return None

    def clear(self) -> None:
        """Forgets everything: the weights are no longer those that computed it."""
        self._kept, self._lengths, self.num_bytes = {}, {}, 0

    def _forget(self, stream: Stream) -> None:
        self.num_bytes -= stream.num_bytes
        self._lengths[len(stream.ids)] -= 1
        if not self._lengths[len(stream.ids)]:
            del self._lengths[len(stream.ids)]


def following_row(context_ids: Array, before: Stream) -> Row:
    """A context [c] of which `before` holds the beginning."""
    return Row(np.asarray(context_ids, np.int32), len(before.ids), 1, before)


def left_aligned(rows: Sequence[Row]) -> DynamicCache:
    """The keys and values of all rows' tokens [R, h, P, D], each row from the left, as after a prefill without a cache."""
    cache = DynamicCache()
    streams = [row.stream for row in rows if row.stream is not None]
    for layer in range(len(streams[0].layers)):
        parts = [
            torch.nn.utils.rnn.pad_sequence([stream.layers[layer][which].transpose(0, 1) for stream in streams], True)
            for which in (0, 1)
        ]
        cache.update(parts[0].transpose(1, 2), parts[1].transpose(1, 2), layer)
    return cache
