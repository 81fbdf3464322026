"""What the machine does at best: copies, matrix products and, on a CPU, exponentials. Argument: the task as JSON.

Prints a line of JSON with the ceilings and what they were measured on. Best of several, each of some milliseconds.
"""

import json
import sys
import time
from collections.abc import Callable

import torch

from benchmarks.machine import describe

COPY_BYTES = {"cpu": 2**28, "cuda": 2**32}
GEMMS = {"cpu": ((2048, 2048, 2048), (512, 1024, 32_768)), "cuda": ((8192, 8192, 8192), (2048, 4096, 131_072))}
EXP_ROWS, EXP_ENTRIES = 16, 2**17  # with the result 1 MiB: in the cores' caches


def main() -> None:
    task = json.loads(sys.argv[1])
    torch.set_num_threads(task["threads"])
    machine = describe()
    if task["device"] == "cuda":
        machine["gpu"] = torch.cuda.get_device_name()
    print(json.dumps({"machine": machine, "ceilings": measure(task["device"], task["dtypes"], task["small"])}))


def measure(device: str, dtypes: list[str], small: bool = False) -> dict[str, float]:
    """copy_bytes_s, gemm_DTYPE_flop_s and, on a CPU, exp_s: bytes, floating-point operations and exponentials a second."""
    gemms = ((64, 64, 64),) if small else GEMMS[device]
    source = torch.randint(256, (2**16 if small else COPY_BYTES[device],), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    found = {"copy_bytes_s": 2 * source.nbytes / _best(lambda: target.copy_(source), device)}
    del source, target
    for dtype in dtypes:
        found[f"gemm_{dtype}_flop_s"] = max(_gemm(shape, getattr(torch, dtype), device) for shape in gemms)
    if device == "cpu":
        values = -torch.rand(EXP_ROWS, EXP_ENTRIES // EXP_ROWS) * 10
        out, times = torch.empty_like(values), 100
        # softmax takes an exponential an entry, too, and has another one
        ways = (lambda: torch.exp(values, out=out), lambda: torch.softmax(values, -1, out=out))
        seconds = min(_best(lambda way=way: [way() for _ in range(times)], device) for way in ways)
        found["exp_s"] = times * EXP_ENTRIES / seconds
    return found


def _gemm(shape: tuple[int, int, int], dtype: torch.dtype, device: str) -> float:
    """Floating-point operations a second of x @ w.T, as of hidden states and a head."""
    n, hidden, vocab = shape
    x, w = (torch.randn(size, hidden, device=device).to(dtype) for size in (n, vocab))
    out = torch.empty(n, vocab, dtype=dtype, device=device)
    return 2 * n * hidden * vocab / _best(lambda: torch.mm(x, w.t(), out=out), device)


def _best(call: Callable[[], object], device: str, repeats: int = 10) -> float:
    """The least seconds of a call, without the first."""
    seconds = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        call()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])


if __name__ == "__main__":
    main()
