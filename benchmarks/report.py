"""How long `opd compare` takes over many runs, from the command to the page, on idle and on busy cores.

    python -m benchmarks.report [--groups 10] [--seeds 5] [--steps 400] [--out benchmarks/results/report.json]

The runs are made up (`benchmarks.report_runs`): each has a held-out set of 500 problems that was evaluated five times, and
two suites with 4 samples a problem, evaluated at the start and at the end. Prints JSON.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.machine import describe
from benchmarks.report_runs import write_results, write_run

ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=10)
    parser.add_argument("--seeds", type=int, default=5, help="runs a group")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--problems", type=int, default=500, help="held-out problems")
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        runs, teacher = Path(folder) / "runs", Path(folder) / "teacher"
        for group in range(options.groups):
            for seed in range(options.seeds):
                write_run(
                    runs / f"variant-{group}" / f"seed-{seed}",
                    level=0.6 + 0.3 * group / options.groups,
                    seed=seed,
                    steps=options.steps,
                    every=options.steps // 4,
                    problems=options.problems,
                    kl=("reverse_kl", "forward_kl", "jsd")[group % 3],
                    suites={"gsm8k": 4, "math500": 4},
                )
        write_results(teacher, {"heldout": 0.97, "gsm8k": 0.95}, problems=options.problems)
        read_mib = sum(file.stat().st_size for file in runs.rglob("*") if file.is_file()) / 2**20
        load = os.getloadavg()[0]  # of whatever else runs on this machine
        idle_s, cpu_s, page = compare(runs, teacher, Path(folder) / "report")
        with busy(os.cpu_count() or 1):
            busy_s, _, page = compare(runs, teacher, Path(folder) / "report")
        result = {
            "machine": describe(),
            "load_before": round(load, 1),
            "runs": options.groups * options.seeds,
            "steps": options.steps,
            "heldout_problems": options.problems,
            "read_mib": round(read_mib, 1),
            "page_mib": round(page.stat().st_size / 2**20, 2),
            "cpu_s": round(cpu_s, 2),
            "idle_s": round(idle_s, 2),
            "busy_s": round(busy_s, 2),
        }
    report = json.dumps(result, indent=2)
    print(report)
    if options.out:
        options.out.write_text(report + "\n")


def compare(runs: Path, teacher: Path, out: Path) -> tuple[float, float, Path]:
    """Seconds of the whole command, those that it computed, and the page it wrote."""
    command = [sys.executable, "-m", "opd", "compare", str(runs), "--teacher", str(teacher), "--out", str(out)]
    begin_s, before_s = time.perf_counter(), _children_s()
    subprocess.run(command, env=ONE_THREAD, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - begin_s, _children_s() - before_s, out / "report.html"


def _children_s() -> float:
    """Processor time of the processes that ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


@contextmanager
def busy(cores: int) -> Iterator[None]:
    """Other processes that compute all the time, one a core."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(cores)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


if __name__ == "__main__":
    main()
