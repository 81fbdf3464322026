"""Whether the kernels compute what they should on this device, forward and backward, against float64 autograd.

    python -m benchmarks.kernels.check [divergence gather topk linear launch] [--device cuda] [--small] [--out FILE.json]

Needs torch and, on CUDA, triton. Prints the worst error of each check as a share of its bound; the exit status is 1 if one
is above it. Bounds: a loss 1e-6 of itself or 3e-7 nats; a gradient in fp32 2e-6 of its largest entry; one in a lower
precision half a unit of its last digit more, a whole one under the interpreter, which truncates. That rounding is to
nearest is checked apart: a bf16 gradient is the fp32 gradient of the same logits, rounded. `--small` leaves out what takes
long under the interpreter or a sanitizer. TRITON_INTERPRET=1 runs the Triton kernels on a CPU.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks.kernels.check_linear import linear
from benchmarks.kernels.check_logits import divergences, gathers, launches, topks
from benchmarks.kernels.finding import Finding, worst

CHECKS: dict[str, Callable[[torch.device, bool], Iterator[Finding]]] = {
    "divergence": divergences,
    "gather": gathers,
    "topk": topks,
    "linear": linear,
    "launch": launches,
}


def main(arguments: Sequence[str] | None = None) -> None:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("benchmarks.kernels.check", description=__doc__, formatter_class=form)
    parser.add_argument("checks", nargs="*", help=f"of {', '.join(CHECKS)}; default: all")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--out", type=Path, help="also write all errors here, as JSON")
    options = parser.parse_args(arguments)
    if unknown := set(options.checks) - set(CHECKS):
        parser.error(f"checks: {', '.join(CHECKS)}, not {', '.join(sorted(unknown))}")
    findings: list[Finding] = []
    for name in options.checks or CHECKS:
        start, found = time.perf_counter(), run(name, options.device, options.small)
        print(f"{name}: {len(found)} cases in {time.perf_counter() - start:.1f} s", flush=True)
        for check, finding in worst(found).items():
            print(
                f"  {'ok  ' if finding.ok else 'FAIL'} {check:28} worst {finding.share:8.3g} of its bound ({finding.case})"
            )
        findings += found
    if options.out:
        options.out.write_text(json.dumps([asdict(finding) for finding in findings], indent=1) + "\n")
    failed = [finding for finding in findings if not finding.ok]
    print(f"{len(findings) - len(failed)} of {len(findings)} within their bounds")
    sys.exit(bool(failed))


def run(name: str, device: str, small: bool = False) -> list[Finding]:
    """All findings of one check, on inputs that are the same every time."""
    torch.manual_seed(0)
    return list(CHECKS[name](torch.device(device), small))


if __name__ == "__main__":
    main()
