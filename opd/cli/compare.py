"""`opd compare`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from opd.report.contents import Contents


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
    from rich.text import Text

    from opd.cli.tables import print_tables, wide_console

    console = wide_console()
    print_tables(console, found.tables)
    for heading, lines in (("Findings", found.findings), ("Notes", found.notes)):
        if lines:
            console.print(Text(f"\n{heading}", style="bold"))
            for line in lines:
                console.print(Text(f"- {line}"))
