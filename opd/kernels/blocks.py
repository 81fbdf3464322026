"""Row blocks: how much of a [c, V] matrix is worked on at once."""

from collections.abc import Iterator

import torch
from torch import Tensor

CACHE_BYTES = 10 * 2**20  # two fp32 scratch blocks of this many bytes together stay in the cores' caches


def row_blocks(num_rows: int, vocab: int, device: torch.device) -> Iterator[slice]:
    """Slices that cover `num_rows` rows of `vocab` columns: cache-sized on the CPU, a single one elsewhere."""
    step = max(1, CACHE_BYTES // (8 * vocab)) if device.type == "cpu" else max(1, num_rows)
    for start in range(0, num_rows, step):
        yield slice(start, min(start + step, num_rows))


class Scratch:
    """Fp32 buffers reused from block to block: fresh ones of this size would each be a page fault a page."""

    def __init__(self, count: int, num_rows: int, vocab: int, device: torch.device) -> None:
        first = next(row_blocks(num_rows, vocab, device), slice(0, 0))
        self._buffers = [torch.empty(first.stop, vocab, device=device) for _ in range(count)]

    def __call__(self, rows: slice) -> list[Tensor]:
        return [buffer[: rows.stop - rows.start] for buffer in self._buffers]
