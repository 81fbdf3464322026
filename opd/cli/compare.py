"""`opd compare`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from opd.report.contents import Contents

PLAIN_WIDTH = 200  # characters, where the output is no terminal


def add_to(app: typer.Typer) -> None:
    app.command("compare")(compare)


def compare(
    paths: Annotated[list[Path], typer.Argument(metavar="PATH", help="Runs, folders of opd eval, or folders above them.")],
    out: Annotated[Path, typer.Option(help="Folder for report.html, tables/ and figures/.")] = Path("report"),
    suite: Annotated[list[str] | None, typer.Option(help="Only this suite; may be repeated. Default: all.")] = None,
    baseline: Annotated[str | None, typer.Option(help="Group that others are tested against. Default: the first.")] = None,
    teacher: Annotated[Path | None, typer.Option(help="The teacher's results: goal of the recovery.")] = None,
    reference: Annotated[str | None, typer.Option(help="Group that is the goal of the recovery instead.")] = None,
    target: Annotated[
        float | None, typer.Option(help="Accuracy whose cost is shown, 0 to 1. Default: 90 % of the best group's last.")
    ] = None,
    metric: Annotated[str, typer.Option(help="accuracy, pass@K or maj@K.")] = "accuracy",
    no_html: Annotated[bool, typer.Option("--no-html", help="Tables only; needs no extra packages.")] = False,
) -> None:
    """Compare runs: tables with intervals and tests, figures, and one page.

    Runs named seed-* are the seeds of the group that their folder names; any other run is a group of its own.
    """
    from opd.report.compare import Options, write_page, write_tables
    from opd.report.compare import compare as run

    found = run(paths, Options(suite or (), baseline, teacher, reference, target, metric))
    _print(found)
    write_tables(found, out)
    written = out / "tables" if no_html else write_page(found, out)
    typer.echo(f"written: {written}")


def _print(found: "Contents") -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    if not console.is_terminal:
        console = Console(width=PLAIN_WIDTH)
    for table in found.tables:
        if not table.rows:
            continue
        shown = Table(title=Text(table.title), title_justify="left", box=box.SIMPLE_HEAD, caption_justify="left")
        for column in table.columns:
            justify = "left" if column.kind == "text" else "right"
            shown.add_column(Text(column.title), justify=justify, overflow="fold")
        for row in table.shown():
            shown.add_row(*map(Text, row))
        console.print(shown)
        if table.note:
            console.print(Text(table.note, style="dim"))
    for heading, lines in (("Findings", found.findings), ("Notes", found.notes)):
        if lines:
            console.print(Text(f"\n{heading}", style="bold"))
            for line in lines:
                console.print(Text(f"- {line}"))
