"""`opd sweep`."""

import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from opd.errors import UserError

Words = list[str] | None
Common = Annotated[Words, typer.Argument(metavar="[key.sub=value]...", help="For every run; a variant's own win.")]
Sweep = Annotated[str, typer.Argument(help="A shipped sweep (see opd ls sweeps) or the path of a YAML file.")]


def add_to(app: typer.Typer) -> None:
    app.command("sweep")(sweep)


def sweep(
    file: Sweep,
    overrides: Common = None,
    out: Annotated[Path | None, typer.Option(help="Folder of all runs. Default: runs/SWEEP.")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Runs at a time; they share the processor's cores.")] = 1,
    devices: Annotated[str, typer.Option(help="CUDA devices, as 0,1: one a job, in turn.")] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check every run and print them; start nothing.")] = False,
    compare: Annotated[bool, typer.Option("--compare/--no-compare", help="Compare the runs at the end.")] = True,
) -> None:
    """Train a recipe in several variants and seeds, then compare them. The same command goes on where it was stopped."""
    from opd.config import parse_overrides
    from opd.sweep import evaluate_teacher, plan_sweep, run_sweep

    out = out or Path("runs") / Path(file).with_suffix("").name
    runs = plan_sweep(file, parse_overrides(overrides or []), out)
    if dry_run:
        for run in runs:
            print(f"{run.path}  {run.steps} steps{'  (done)' if run.done else ''}")
        return
    from rich.progress import TimeElapsedColumn

    from opd.progress import counting_bar

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the runs are ended too
    with counting_bar(TimeElapsedColumn()) as bar:
        tasks = {run.name: bar.add_task(run.name, total=run.steps, completed=run.steps * run.done) for run in runs}
        try:
            failures = run_sweep(
                runs,
                jobs,
                [d for d in devices.split(",") if d],
                lambda name, steps: bar.update(tasks[name], completed=steps),
            )
        except KeyboardInterrupt:
            print("interrupted; the same command goes on with the sweep", file=sys.stderr)
            raise typer.Exit(130) from None
    if failures:
        raise UserError(f"{len(failures)} of {len(runs)} runs failed; logs are in {out / 'recipes'}; " + "; ".join(failures))
    if compare:
        from opd.cli.compare import compare as compare_runs

        variants = dict.fromkeys(run.path.parent for run in runs)
        compare_runs(list(variants), out=out / "report", teacher=evaluate_teacher(runs, out))
