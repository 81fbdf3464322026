"""`opd grade`."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer


def add_to(app: typer.Typer) -> None:
    app.command("grade")(grade)


def grade(
    file: Annotated[Path, typer.Argument(metavar="FILE.jsonl", help="JSON lines with responses and correct answers.")],
    out: Annotated[Path | None, typer.Option(help="File for the lines; then only the summary is printed.")] = None,
    response: Annotated[str, typer.Option(help="Column of the response.")] = "response",
    answer: Annotated[
        str, typer.Option(help="Column of the answer: text, a number, or a list of which any will do.")
    ] = "answer",
    time_limit: Annotated[float, typer.Option(min=0.1, help="Seconds to grade one answer.")] = 5.0,
    reward: Annotated[str | None, typer.Option(help="FILE.py:FUNCTION, a verifier of your own.")] = None,
) -> None:
    """Grade responses: one JSON line a row (verdict, extracted answer), and a summary on stderr.

    A row with "finish": "length" or "truncated": true counts as truncated where no answer is found in it.
    """
    from rich.console import Console
    from rich.progress import Progress

    from opd.errors import UserError
    from opd.eval.grading import Grader
    from opd.eval.grading_file import Columns, grade_file, read_items, summary
    from opd.files import explain_unwritable, write_text

    columns = Columns(response, answer)
    num_rows = sum(
        1 for _ in read_items(file, columns, need_answer=reward is None)
    )  # mistakes show before anything is graded
    if not num_rows:
        raise UserError(f"{file} holds no rows")
    console = Console(stderr=True)
    shown = console.is_terminal and (out is not None or not sys.stdout.isatty())
    grades, lines = [], []
    with (
        Grader(time_limit, verifier=reward) as grader,
        Progress(console=console, disable=not shown, redirect_stdout=False) as bar,
    ):
        task = bar.add_task("grading", total=num_rows)
        for row, found in grade_file(file, columns, grader):
            line = json.dumps(row)
            if out is None:
                print(line, flush=True)
            else:
                lines.append(line + "\n")
            grades.append(found)
            bar.advance(task)
    if out is not None:
        with explain_unwritable(out):
            write_text(out, "".join(lines))
    print(json.dumps(summary(grades)), file=sys.stderr if out is None else sys.stdout)
