"""The command `python -m benchmarks.kernels`: processes in turns, round after round. Prints a table."""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import benchmarks.kernels
from benchmarks.kernels.cases import Case, cpu_cases, cuda_cases, small_cases
from benchmarks.kernels.providers import PROVIDERS, of_kind
from benchmarks.kernels.summary import Row, contenders, judge, summarise, table

ROOT = Path(__file__).parents[2]
Results = dict[str, dict[str, list[Row]]]  # of each case's name, of each provider's


def main(arguments: Sequence[str] | None = None) -> None:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("benchmarks.kernels", description=benchmarks.kernels.__doc__, formatter_class=form)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--suite", nargs="+", choices=list(cpu_cases()), help="default: all")
    parser.add_argument("--provider", nargs="+", choices=list(PROVIDERS), help="default: all")
    parser.add_argument("--rounds", type=int, default=3, help="processes of each provider and case")
    parser.add_argument("--repeats", type=int, help="timed calls of a process; default: 3, on CUDA 20")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of a process")
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds after which no process is started")
    parser.add_argument("--peer-python", default=sys.executable, help="the interpreter of all processes")
    parser.add_argument("--small", action="store_true", help="shapes for trying the benchmark itself")
    parser.add_argument("--out", type=Path, help="also write JSON here")
    parser.add_argument("--plot", type=Path, help="also draw an SVG here")
    options = parser.parse_args(arguments)
    options.repeats = options.repeats or (20 if options.device == "cuda" else 3)
    suites = small_cases() if options.small else cuda_cases() if options.device == "cuda" else cpu_cases()
    cases = [case for name in options.suite or suites for case in suites.get(name, ())]
    with tempfile.TemporaryDirectory() as options.cache:  # so that first calls do compile
        report = measure(cases, options)
    print(table(report["rows"], report["targets"]))
    if options.out:
        options.out.write_text(json.dumps(report, indent=2) + "\n")
    if options.plot:
        from benchmarks.kernels.plot import draw

        draw(report, options.plot)


def measure(cases: Sequence[Case], options: argparse.Namespace) -> dict[str, Any]:
    """The report: machine, ceilings, rows, targets."""
    options.end = time.monotonic() + options.budget
    results: Results = {case.name: {} for case in cases}
    dtypes = sorted({case.dtype for case in cases})
    machine, ceilings = {}, {}
    for number in range(options.rounds):
        record = process("ceilings", {"dtypes": dtypes}, options)[0]
        machine = record["machine"]
        ceilings = {name: max(value, ceilings.get(name, 0.0)) for name, value in record["ceilings"].items()}
        for provider, together in turns(cases, results, number, options):
            if time.monotonic() > options.end:
                break
            task = {"provider": provider, "cases": [asdict(case) for case in together], "seed": number, "check": number == 0}
            for row in process("worker", task | {"repeats": options.repeats}, options):
                results[row["case"]].setdefault(provider, []).append(row)
    rows = [
        summarise(case, provider, found, options.device, ceilings)
        for case in cases
        for provider, found in results[case.name].items()
    ]
    settings = {name: getattr(options, name) for name in ("device", "rounds", "repeats", "threads", "small")}
    shapes = [asdict(case) for case in cases]
    judged = [] if options.small else judge(rows)
    return {"machine": machine, "settings": settings, "ceilings": ceilings, "cases": shapes, "rows": rows, "targets": judged}


def turns(
    cases: Sequence[Case], results: Results, number: int, options: argparse.Namespace
) -> list[tuple[str, Sequence[Case]]]:
    """The processes of a round: (provider, cases). On a CPU each case has its own; a GPU's memory is counted exactly."""
    names = {case.name: of_kind(case.kind, options.device) for case in cases}
    if options.provider:
        names = {case: [name for name in found if name in options.provider] for case, found in names.items()}
    if number > 0:
        names = {case: contenders(found, results[case]) for case, found in names.items()}
    if options.device == "cpu":
        return [(name, (case,)) for case in cases for name in names[case.name]]
    together = {name: [case for case in cases if name in names[case.name]] for name in PROVIDERS}
    return [(name, found) for name, found in together.items() if found]


def process(module: str, task: dict[str, Any], options: argparse.Namespace) -> list[dict[str, Any]]:
    """What a process of this package prints. One that dies, or runs past the budget, fails its remaining cases."""
    task = task | {"device": options.device, "threads": options.threads, "small": options.small}
    command = [options.peer_python, "-m", f"benchmarks.kernels.{module}", json.dumps(task)]
    env = os.environ | {"OMP_NUM_THREADS": str(options.threads), "TORCHINDUCTOR_CACHE_DIR": options.cache}
    seconds = None if options.end == float("inf") else max(1.0, options.end - time.monotonic())
    with tempfile.TemporaryFile("w+") as said, tempfile.TemporaryFile("w+") as complaints:
        try:
            code = subprocess.run(command, stdout=said, stderr=complaints, cwd=ROOT, env=env, timeout=seconds).returncode
        except subprocess.TimeoutExpired:
            code = "the time was up"
        said.seek(0)
        complaints.seek(0)
        found = [json.loads(line) for line in said if line.startswith("{") and line.endswith("}\n")]
        reason = (complaints.read().strip().splitlines() or [""])[-1][:200]
    if module == "ceilings" and not found:
        raise SystemExit(f"the ceilings could not be measured: {reason or code}")
    if code:
        missing = [case["name"] for case in task.get("cases", ())[len(found) :]]
        reason = code if isinstance(code, str) else reason or f"exit status {code}"
        found += [{"case": name, "provider": task["provider"], "failed": reason} for name in missing]
    return found


if __name__ == "__main__":
    main()
