"""What a figure was measured on."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "transformers", "accelerate", "trl", "liger-kernel", "triton")


def describe() -> dict[str, Any]:
    """Processor, cores, memory and versions."""
    cpu = [line.partition(":")[2].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "cpu": cpu[0] if cpu else platform.processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(memory, 1),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
    }


def peak_rss_gib() -> float:
    """Largest resident size of this process so far."""
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 2**20


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
