"""How many programs a Triton kernel is launched with, and which columns of which row each of them works on.

Grids have one dimension: CUDA takes 2^31 - 1 programs in the first and 65,535 in the others.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from opd.kernels.dispatch import interpreted

MAX_BLOCK = 4096  # columns of a tile: 16 a thread of 8 warps, whose registers hold four sums of that width
INTERPRETED_BLOCK = 32768  # the interpreter's time goes by tiles, not by columns
ID_BLOCK = 64  # ids of a row that are compared with as many others at once
PROGRAMS_PER_PROCESSOR = 4  # as many keep enough loads in flight


@dataclass(frozen=True)
class Grid:
    """Program `i` works on row `i // num_slices`, on the columns from `i % num_slices * width` on."""

    num_rows: int
    block: int  # columns of a tile, a power of two
    num_slices: int  # of a row
    width: int  # columns of a slice, a multiple of `block`

    @property
    def num_programs(self) -> int:
        return self.num_rows * self.num_slices

    def launch(self, kernel: Any, first: Any, *args: Any, **constants: Any) -> None:
        """Runs `kernel` on the device of its first argument, unless there are no rows."""
        if self.num_programs == 0:
            return
        assert self.num_programs < 2**31, f"{self.num_programs} programs: hand over fewer rows at once"
        shape = {"num_slices": self.num_slices, "width": self.width, "block": self.block}
        options = {"num_warps": max(1, min(8, self.block // 512)), "enable_fp_fusion": True}
        with torch.cuda.device_of(first):
            kernel[(self.num_programs,)](first, *args, **constants, **shape, **options)


def tiles(num_rows: int, vocab: int) -> Grid:
    """One program a tile, for what is done column by column."""
    block = _block(vocab)
    return Grid(num_rows, block, _ceil_div(vocab, block), block)


def slices(num_rows: int, vocab: int, device: torch.device) -> Grid:
    """One program a row, for sums over the columns; a few a row where rows alone do not occupy the device."""
    block = _block(vocab)
    wanted = _ceil_div(PROGRAMS_PER_PROCESSOR * _num_processors(device), max(1, num_rows))
    wanted = 1 << (wanted - 1).bit_length()  # powers of two, for each of which the kernel is compiled anew
    width = _ceil_div(_ceil_div(vocab, wanted), block) * block
    return Grid(num_rows, block, _ceil_div(vocab, width), width)


def entries(num_rows: int, num_ids: int) -> Grid:
    """One program a few ids of a row."""
    return Grid(num_rows, ID_BLOCK, _ceil_div(num_ids, ID_BLOCK), ID_BLOCK)


def check_columns(*matrices: Tensor) -> None:
    for matrix in matrices:
        assert matrix.stride(1) == 1 or matrix.shape[1] == 1, "columns that do not lie next to each other"


def _block(vocab: int) -> int:
    largest = INTERPRETED_BLOCK if interpreted() and vocab > 2 * MAX_BLOCK else MAX_BLOCK
    return min(largest, max(128, 1 << (vocab - 1).bit_length()))


def _num_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)
