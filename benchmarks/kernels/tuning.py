"""How fast each Triton kernel is at other tile sizes and numbers of warps than the toolkit's own. CUDA only.

    python -m benchmarks.kernels.tuning [--rows N] [--vocab V] [--budget SECONDS] [--out FILE.json]

Every configuration of a fixed list, on random bf16 logits, the L2 cache flushed before each of 20 calls. Prints medians, the
bandwidth of the least bytes that the call moves, and the compiler's registers and spilled registers a thread.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import torch

from benchmarks.kernels.measuring import device_seconds, timed
from opd.kernels import grid
from opd.kernels.divergence import divergence_grad, divergence_stats
from opd.kernels.gather import gather_grad, gather_stats
from opd.kernels.head import LogitForm

BLOCKS, WARPS, REPEATS = (2048, 4096, 8192, 16_384), (4, 8, 16), 20
Row = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> None:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("benchmarks.kernels.tuning", description=__doc__, formatter_class=form)
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds after which no configuration is begun")
    parser.add_argument("--out", type=Path, help="also write JSON here")
    options = parser.parse_args(arguments)
    rows, end = [], time.monotonic() + options.budget
    calls = kernels(options.rows, options.vocab, "cuda" if torch.cuda.is_available() else "cpu")
    print(f"{'kernels':18} {'block':>6} {'warps':>5} {'median ms':>10} {'GB/s':>8} {'registers':>9} {'spills':>6}")
    for (block, warps), (name, (call, moved)) in product(product(BLOCKS, WARPS), calls.items()):
        if time.monotonic() > end:
            break
        row = {"kernels": name, "block": block, "warps": warps} | measure(call, moved, block, warps)
        rows.append(row)
        figures = f"{row['median_s'] * 1e3:10.3f} {row['bytes_s'] / 1e9:8.0f} {row['registers']!s:>9} {row['spills']!s:>6}"
        print(f"{name:18} {block:6} {warps:5} {figures}", flush=True)
    if options.out:
        options.out.write_text(json.dumps(rows, indent=1) + "\n")


def kernels(num_rows: int, vocab: int, device: str) -> dict[str, tuple[Callable[[], object], int]]:
    """By name a call, and the bytes that it must move."""
    student, teacher = (torch.randn(num_rows, vocab, device=device).to(torch.bfloat16) for _ in range(2))
    out, form = torch.empty_like(student), LogitForm()
    ids = torch.randint(vocab, (num_rows, 1), device=device)
    upstream = torch.rand(num_rows, device=device)
    stats, row_stats = divergence_stats(student, teacher), gather_stats(student, ids)
    size = student.nbytes
    how = ("reverse_kl", 0.5, form, form)
    return {
        "divergence stats": (lambda: divergence_stats(student, teacher), 2 * size),
        "divergence grad": (lambda: divergence_grad(student, teacher, stats, upstream, *how, out=out), 3 * size),
        "gather stats": (lambda: gather_stats(student, ids), size),
        "gather grad": (lambda: gather_grad(student, ids, row_stats, upstream[:, None], out=out), 2 * size),
    }


def measure(call: Callable[[], object], moved: int, block: int, warps: int) -> Row:
    """Figures of one call in one configuration."""
    with configured(block, warps) as compiled:
        call()
        seconds = device_seconds(call, (), REPEATS) if torch.cuda.is_available() else [timed(call)[0]]
    median = statistics.median(seconds)
    most = {name: [getattr(kernel, field, None) for kernel in compiled] for name, field in FIELDS.items()}
    resources = {name: max((value for value in found if value is not None), default=None) for name, found in most.items()}
    return {"median_s": median, "bytes_s": moved / median, **resources}


FIELDS = {"registers": "n_regs", "spills": "n_spills"}


@contextmanager
def configured(block: int, warps: int) -> Iterator[list[Any]]:
    """Kernels are launched with tiles of `block` columns and `warps` warps; yields what the launches return."""
    launch, own, compiled = grid.Grid.launch, grid.MAX_BLOCK, []

    class Warped:
        def __init__(self, kernel: Any) -> None:
            self.kernel = kernel

        def __getitem__(self, programs: Any) -> Callable[..., None]:
            return lambda *args, **options: compiled.append(self.kernel[programs](*args, **options | {"num_warps": warps}))

    grid.Grid.launch = lambda self, kernel, *args, **options: launch(self, Warped(kernel), *args, **options)  # type: ignore
    grid.MAX_BLOCK = block
    try:
        yield compiled
    finally:
        grid.Grid.launch, grid.MAX_BLOCK = launch, own  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
