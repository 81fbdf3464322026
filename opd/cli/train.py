"""`opd train`."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer

from opd.cli.recipes import Overrides, Recipe
from opd.errors import UserError
from opd.processes import die_with_parent

GRACE_S = 10.0  # after a failure, for the other processes to say what they have to say


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

    try:
        summary = run(config, out, resume=resume, overwrite=overwrite)
    except KeyboardInterrupt:
        print("interrupted; go on from the last checkpoint with --resume", file=sys.stderr)
        raise typer.Exit(130) from None
    if int(os.environ.get("RANK", "0")) == 0:
        print(json.dumps(summary, indent=2))


def _launch(count: int) -> int:
    """This command again in `count` processes that find each other on the loopback address; the first failure ends all.

    The first process speaks for all of them; what the others print is shown when it has nothing to say itself.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that `finally` ends the workers too
    threads = str(max(1, (os.cpu_count() or 1) // count))
    workers: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryFile() as others:
        try:
            for rank in range(count):
                names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
                address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
                variables = {name: str(value) for name, value in {**names, **address}.items()}
                environment = {"OMP_NUM_THREADS": threads, **os.environ, **variables}
                command = [sys.executable, "-m", "opd", *sys.argv[1:]]
                stderr = others if rank else None
                workers.append(subprocess.Popen(command, env=environment, stderr=stderr, preexec_fn=die_with_parent))
            while any(w.poll() is None for w in workers) and not any(w.poll() for w in workers):
                time.sleep(0.1)
            deadline = time.monotonic() + GRACE_S
            while any(w.poll() is None for w in workers) and time.monotonic() < deadline:
                time.sleep(0.1)
        finally:
            for worker in workers:
                worker.terminate()
            for worker in workers:
                worker.wait()
        codes = [worker.returncode for worker in workers]
        if any(codes) and codes[0] != 2:
            others.seek(0)
            sys.stderr.buffer.write(others.read())
        return 2 if codes[0] == 2 else next((abs(code) for code in codes if code), 0)
