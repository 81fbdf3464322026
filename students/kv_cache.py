"""A KV cache whose rows all end at the same column, so that decoding appends in place while rows come and go.

A row of length l holds its tokens in the last l columns; what lies left of them is hidden by the mask. Keys carry their
rotary position already, so a column's number means nothing. Shape legend: B rows, h KV heads, C columns of capacity,
P tokens of a prompt, D head size.
"""

from collections.abc import Sequence

from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

SLACK = 64  # columns allocated ahead: the whole cache is copied once in so many tokens


class RowLayer(DynamicLayer):
    """One layer: `keys` and `values` are the filled columns of buffers [B, h, C, D]."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        """Empty, for states of the shapes and types shown."""
        super().__init__()
        self.buffers = [states[:0, :, :0] for states in (keys, values)]
        self.end = 0

    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        """Appends the new columns [B, h, 1, D] in place."""
        new = self.end + key_states.shape[-2]
        for buffer, states in zip(self.buffers, (key_states, value_states)):
            buffer[:, :, self.end : new] = states
        return self.fill(new)

    def fill(self, end: int) -> tuple[Tensor, Tensor]:
        """Sets where the rows end."""
        self.end = end
        keys, values = (buffer[:, :, :end] for buffer in self.buffers)
        self.keys, self.values, self.is_initialized = keys, values, True
        return keys, values


class RowCache(Cache):
    """All layers of the rows being decoded."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.layers: list[RowLayer] = []  # type: ignore[assignment]

    @property
    def room(self) -> int:
        """Columns left before the cache must be repacked."""
        return self.layers[0].buffers[0].shape[2] - self.layers[0].end if self.layers else 0

    def repack(self, keep: Tensor, width: int, prompts: Cache | None = None, lengths: Sequence[int] = ()) -> None:
        """Fresh buffers with the last `width` columns of the rows `keep`, then one row for each prompt of `prompts`.

        `prompts` holds left-aligned rows [R, h, P, D] of which the first `lengths` [R] tokens count.
        """
        if not self.layers:
            assert prompts is not None
            self.layers = [RowLayer(pattern.keys, pattern.values) for pattern in prompts.layers]  # type: ignore[union-attr]
        for index, layer in enumerate(self.layers):
            source = prompts.layers[index] if prompts is not None else None
            added = (source.keys, source.values) if source is not None else (None, None)  # type: ignore[union-attr]
            for i, (old, states) in enumerate(zip(layer.buffers, added)):
                fresh = old.new_zeros(len(keep) + len(lengths), old.shape[1], width + SLACK, old.shape[3])
                kept = min(width, layer.end)
                fresh[: len(keep), :, width - kept : width] = old[keep, :, layer.end - kept : layer.end]
                for row, length in enumerate(lengths):
                    fresh[len(keep) + row, :, width - length : width] = states[row, :, :length]  # type: ignore[index]
                layer.buffers[i] = fresh
            layer.fill(width)
