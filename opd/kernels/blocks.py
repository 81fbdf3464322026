"""Row blocks: how much of a [c, V] matrix is worked on at once."""

from collections.abc import Iterator

import torch
from torch import Tensor

CACHE_BYTES = 6 * 2**20  # scratch blocks of this many bytes together stay in the cores' caches
MIN_ROWS = 24  # of all scratch blocks, however long: a softmax is spread over the cores by rows
LOWEST = -1e30  # a logit that weighs nothing
Rows = slice | Tensor


def row_blocks(num_rows: int, vocab: int, device: torch.device, count: int, live: Tensor | None = None) -> Iterator[Rows]:
    """Indices that together cover the rows of which `live` [c] is true: on the CPU blocks of which `count` in fp32 fit a
    cache, else one."""
    step = max(1, MIN_ROWS // count, CACHE_BYTES // (4 * count * max(1, vocab)))
    if device.type != "cpu":
        step = max(1, num_rows)
    if live is None or bool(live.all()):
        for start in range(0, num_rows, step):
            yield slice(start, min(start + step, num_rows))
    else:
        yield from live.nonzero()[:, 0].split(step)


class Scratch:
    """Buffers reused from block to block: fresh ones of this size would each be a page fault a page."""

    def __init__(self, count: int, like: Tensor, vocab: int) -> None:
        self.count = count
        first = next(row_blocks(len(like), vocab, like.device, count), slice(0, 0))
        assert isinstance(first, slice)
        self.dtype = accumulator(like)
        self._buffers = [like.new_empty(first.stop, vocab, dtype=self.dtype) for _ in range(count)]

    def __call__(self, rows: Rows) -> list[Tensor]:
        size = rows.stop - rows.start if isinstance(rows, slice) else len(rows)
        return [buffer[:size] for buffer in self._buffers]


def exponentials(x: Tensor, out: Tensor) -> Tensor:
    """Writes e^(x - max x) times a factor a row to `out` [c, V], and gives the factor [c].

    Torch's softmax has a faster exponential than `torch.exp`, but its own sum over a long row is off by 1e-5: of its result
    no more is believed than that it is a multiple, whose factor the largest entry shows.
    """
    return torch.softmax(x, -1, out=out).amax(-1)


def scaled_(x: Tensor, scale: float) -> Tensor:
    """x * scale, in place. What masks leave, such as the lowest number that fp32 has, stays finite: 0 * inf is NaN."""
    if scale != 1.0:
        x.mul_(scale)
    return x.clamp_(min=LOWEST) if scale > 1.0 else x


def total(block: Tensor) -> Tensor:
    """Row sums [c] in fp64 of sums over 128 columns each: as fast as a sum over the whole row, with half its error."""
    width = block.shape[1] // 128 * 128
    sums = block[:, :width].unflatten(-1, (-1, 128)).sum(-1).sum(-1, dtype=torch.float64)
    return sums + block[:, width:].sum(-1)


def store(out: Tensor, rows: Rows, block: Tensor) -> None:
    """out[rows] = block, rounded to the type of `out`."""
    if isinstance(rows, slice):
        out[rows].copy_(block)
    else:
        out.index_copy_(0, rows, block.to(out.dtype))


def accumulator(logits: Tensor) -> torch.dtype:
    """What is computed in: fp32, or float64 where the logits are, so that the maths can be checked."""
    return torch.float64 if logits.dtype == torch.float64 else torch.float32
