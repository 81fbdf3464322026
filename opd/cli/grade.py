"""`opd grade`."""

import json
import os
import sys
from pathlib import Path
from typing import Annotated

import typer


def add_to(app: typer.Typer) -> None:
    app.command("grade")(grade)


def grade(
    file: Annotated[
        Path, typer.Argument(metavar="FILE.jsonl", help="JSON lines with responses and correct answers; - reads stdin.")
    ],
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
    from opd.eval.grading_file import Columns, grade_file, read_items, read_rows, summary

    _check_output(file, out)
    columns = Columns(response, answer)
    rows = read_rows(file)
    num_rows = sum(1 for _ in read_items(rows, columns, need_answer=reward is None))  # mistakes show before any grading
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
        for row, found in grade_file(rows, columns, grader):
            line = json.dumps(row)
            if out is None:
                _print(line)
            else:
                lines.append(line + "\n")
            grades.append(found)
            bar.advance(task)
    if out is None:
        print(json.dumps(summary(grades)), file=sys.stderr)
    else:
        _write(out, "".join(lines))
        _print(json.dumps(summary(grades)))


def _check_output(file: Path, out: Path | None) -> None:
    from opd.errors import UserError

    if sys.stdout is None:
        raise UserError("standard output is closed; redirect it to a file or to /dev/null")
    if out is not None and out.is_dir():
        raise UserError(f"--out {out} is a folder; name a file")
    if out is not None and file.exists() and out.exists() and out.samefile(file):
        raise UserError(f"--out {out} is the file to grade, which would be lost; name another file")


def _write(out: Path, text: str) -> None:
    from opd.files import explain_unwritable, write_text

    with explain_unwritable(out):
        if out.exists() and not out.is_file():  # a device or a pipe, which nothing must replace
            out.write_text(text, encoding="utf-8")
        else:
            write_text(out, text)


def _print(line: str) -> None:
    from opd.errors import UserError

    try:
        print(line, flush=True)
    except OSError as error:  # a full disk, or a reader that has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter fails again when it ends
        raise UserError(f"standard output cannot be written: {error.strerror}; use --out FILE") from None
