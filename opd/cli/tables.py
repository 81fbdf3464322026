"""Tables on the terminal."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from opd.report.tables import Table

PLAIN_WIDTH = 200  # characters, where the output is no terminal


def wide_console() -> "Console":
    """Standard output, wide enough for tables in a file too."""
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=PLAIN_WIDTH)


def print_tables(console: "Console", tables: Sequence["Table"]) -> None:
    """Those that have rows, each with its note."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    for table in tables:
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
