"""`opd train`."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from opd.cli.recipes import Overrides, Recipe
from opd.errors import UserError


def add_to(app: typer.Typer) -> None:
    app.command("train")(train)


def train(
    recipe: Recipe,
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option(help="The run's directory. Default: runs/RECIPE.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint of the directory.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the run in the directory.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything cheap and print the plan.")] = False,
    processes: Annotated[int, typer.Option(min=1, help="Training processes on this machine.")] = 1,
) -> None:
    """Distil a student as a recipe says."""
    from opd.config import load_config
    from opd.validation import check_files

    if resume and overwrite:
        raise UserError("--resume and --overwrite exclude each other")
    config = load_config(recipe, overrides or [])
    check_files(config)
    out = out or Path("runs") / Path(recipe).with_suffix("").name
    if dry_run:
        from opd.plan import plan

        print(plan(config, out))
        return
    if processes > 1 and "WORLD_SIZE" not in os.environ:
        sys.exit(_launch(processes))
    from opd.training import train as run

    summary = run(config, out, resume=resume, overwrite=overwrite)
    if int(os.environ.get("RANK", "0")) == 0:
        print(json.dumps(summary, indent=2))


def _launch(count: int) -> int:
    """This command again in `count` processes that find each other on the loopback address; the first failure ends all."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    threads = str(max(1, (os.cpu_count() or 1) // count))
    workers = []
    for rank in range(count):
        variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        environment = {
            "OMP_NUM_THREADS": threads,
            **os.environ,
            **{k: str(v) for k, v in {**variables, **address}.items()},
        }
        workers.append(subprocess.Popen([sys.executable, "-m", "opd", *sys.argv[1:]], env=environment))
    try:
        while any(worker.poll() is None for worker in workers) and not any(worker.poll() for worker in workers):
            time.sleep(0.1)
        failed = [worker.returncode for worker in workers if worker.returncode]
        return failed[0] if failed else 0
    finally:
        for worker in workers:
            worker.terminate()
        for worker in workers:
            worker.wait()
