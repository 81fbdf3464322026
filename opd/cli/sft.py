"""`opd sft`."""

import json
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from opd.cli.recipes import Overrides
from opd.errors import UserError


def add_to(app: typer.Typer) -> None:
    app.command("sft")(sft)


def sft(
    recipe: Annotated[str, typer.Argument(help="A shipped recipe (see opd ls sft) or the path of a YAML file.")],
    out: Annotated[Path, typer.Option(help="The run's directory.")],
    overrides: Overrides = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint of the directory.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the run in the directory.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything cheap and print the plan.")] = False,
) -> None:
    """Fine-tune a student on answers (see opd prompts answer), as a cold start: OUT/final is a model for opd train."""
    from opd.sft.config import check_files, load_sft_config

    if resume and overwrite:
        raise UserError("--resume and --overwrite exclude each other")
    config = load_sft_config(recipe, overrides or [])
    check_files(config)
    if dry_run:
        from opd.sft.plan import plan

        print(plan(config, out))
        return
    from opd.sft.run import fine_tune

    try:
        summary = fine_tune(config, out, resume=resume, overwrite=overwrite)
    except KeyboardInterrupt:
        print("interrupted; go on from the last checkpoint with --resume", file=sys.stderr)
        raise typer.Exit(130) from None
    if int(os.environ.get("RANK", "0")) == 0:
        print(json.dumps(summary, indent=2))
