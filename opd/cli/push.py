"""`opd push`."""

import sys
from pathlib import Path
from typing import Annotated

import typer


def add_to(app: typer.Typer) -> None:
    app.command("push")(push)


def push(
    path: Annotated[Path, typer.Argument(help="A checkpoint's folder, or a run's directory for its last checkpoint.")],
    repo: Annotated[str, typer.Option(help="The repository on the Hugging Face hub: OWNER/NAME.")],
    private: Annotated[bool, typer.Option("--private", help="Make a new repository private.")] = False,
    revision: Annotated[str | None, typer.Option(help="Branch, created if need be. Default: main.")] = None,
    message: Annotated[str | None, typer.Option(help="Of the commit.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List what would be uploaded.")] = False,
) -> None:
    """Upload a checkpoint, without what only training needs, to the Hugging Face hub."""
    from opd import push as hub

    folder = hub.find_model(path)
    files = hub.files_to_push(folder)
    if base := hub.local_base(folder):
        warning = f"adapter_config.json names its base as {base}, which others do not have; set a hub id there"
        print(f"warning: {warning}", file=sys.stderr)
    if dry_run:
        for name, size in files.items():
            print(f"{size:>15,}  {name}")
        print(f"{sum(files.values()):>15,}  bytes in {len(files)} files, from {folder} to {repo}")
        return
    print(hub.push(folder, repo, private=private, revision=revision, message=message))
