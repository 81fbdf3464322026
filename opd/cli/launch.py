"""`opd launch`."""

import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from opd.cli.recipes import Overrides, Recipe
from opd.errors import UserError


def add_to(app: typer.Typer) -> None:
    app.command("launch")(launch)


def launch(
    recipe: Recipe,
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option(help="The run's directory. Default: runs/RECIPE.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint of the directory.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the run in the directory.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the commands and start nothing.")] = False,
    processes: Annotated[int, typer.Option(min=1, help="Training processes on this machine.")] = 1,
    server_devices: Annotated[
        str, typer.Option(help="CUDA devices of the servers, as 1,2: one each, in turn, teachers first.")
    ] = "",
    wait: Annotated[float, typer.Option(min=1, help="Seconds the servers may take to load.")] = 1800,
) -> None:
    """Start the servers a recipe names on this machine, of teachers and of rollouts, train, and stop them."""
    from opd.config import load_config
    from opd.launch import commands_elsewhere, run_beside, running, server_plans
    from opd.locate import check_location
    from opd.validation import check_files

    config = load_config(recipe, overrides or [])
    check_files(config)
    plans = server_plans(config)
    if not plans:
        raise UserError(
            "teachers: the recipe names no server; set teachers.NAME.url=http://127.0.0.1:8400 "
            "or sampler.url=http://127.0.0.1:8500, or use opd train"
        )
    if dry_run:
        print(commands_elsewhere(plans, recipe, overrides or []))
        return
    say("opd launch --dry-run prints the commands that do the same on several machines")
    local = [plan for plan in plans if plan.is_local]
    for plan in local:
        for name in plan.names:
            teacher = config.frozen[name]
            check_location(str(teacher.model), f"teachers.{name}.model")
            if teacher.adapter is not None:
                check_location(teacher.adapter, f"teachers.{name}.adapter")
    out = out or Path("runs") / Path(recipe).with_suffix("").name
    flags = [flag for flag, given in (("--resume", resume), ("--overwrite", overwrite)) if given]
    training = ["train", recipe, *(overrides or []), "--out", str(out), "--processes", str(processes), *flags]
    devices = [device.strip() for device in server_devices.split(",") if device.strip()]
    logs = out.with_name(f"{out.name}-servers")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the servers and the trainer are stopped too
    try:
        with running(local, logs, devices, wait, say) as ended:
            code = run_beside([sys.executable, "-m", "opd", *training], ended, say)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    raise typer.Exit(code)


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
