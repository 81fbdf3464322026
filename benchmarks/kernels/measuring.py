"""Time and memory of a call."""

import ctypes
import gc
import resource
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

MIB = 2**20
FLUSH_BYTES = 256 * MIB  # more than any GPU's L2 cache


def clear(leaves: Sequence[Tensor]) -> None:
    """Drops gradients and gives what the allocator kept back to the system."""
    for leaf in leaves:
        leaf.grad = None
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    else:
        ctypes.CDLL(None).malloc_trim(0)


def timed(call: Callable[[], object]) -> tuple[float, float]:
    """(wall seconds, CPU seconds of all threads) of one call, which has ended on the device, too."""
    cpu, wall = _cpu_seconds(), time.perf_counter()
    call()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter() - wall, _cpu_seconds() - cpu


def peak_bytes(call: Callable[[], object], device: str) -> int:
    """The most memory in use while the call runs, less what was in use before."""
    if device == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from what is resident now
    before = _status("VmRSS")
    call()
    return _status("VmHWM") - before


def device_seconds(call: Callable[[], object], leaves: Sequence[Tensor], repeats: int) -> list[float]:
    """Seconds of each call between CUDA events, with the L2 cache flushed before each."""
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
    seconds = []
    for _ in range(repeats):
        for leaf in leaves:
            leaf.grad = None
        flush.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        seconds.append(start.elapsed_time(end) / 1e3)
    return seconds


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _status(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024
