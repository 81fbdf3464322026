"""`opd align`."""

import json
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from opd.errors import UserError

if TYPE_CHECKING:
    from opd.alignment.aligner import Aligner

SAMPLE = """Tom has 3 apples and buys 12 more. How many has he? 3 + 12 = 15, so the answer is \\boxed{15}.
Let $f(x) = \\frac{x^2 - 1}{2}$; then $f(-3) = 4$, and $1234567 \\cdot 0.5 \\ne 10^{-6}$.
汤姆有三个苹果，又买了十二个。他一共有十五个。 Où est naïve Zoë? 👩‍🔬 😀 ½ ≤ ∞

def total(items):
\treturn sum(i.price * 1.19 for i in items)  # with tax
"""


def add_to(app: typer.Typer) -> None:
    app.command("align")(align)


def align(
    student: Annotated[str, typer.Option(help="Model of the student: a folder, a hub id, or tiny:NAME.")],
    teacher: Annotated[str, typer.Option(help="Model of the teacher, likewise.")],
    text: Annotated[
        Path | None, typer.Option(help="A text in UTF-8 to align on. Default: a few lines of every kind.")
    ] = None,
    special_tokens: Annotated[
        str | None, typer.Option(metavar="JSON", help="As alignment.special_tokens of a recipe, to try it.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures alone, as one JSON object.")] = False,
    lines: Annotated[int, typer.Option(min=0, help="How many lines of the text to show side by side.")] = 6,
) -> None:
    """Show how two tokenizers correspond: special tokens, tokens side by side, and how much of a text is aligned."""
    written = SAMPLE if text is None else _read(text)
    chosen = _chosen(special_tokens)

    import numpy as np

    from opd.alignment.aligner import Aligner
    from opd.tokenization import eos_ids, load_tokenizer

    student_tokenizer, teacher_tokenizer = load_tokenizer(student, "--student"), load_tokenizer(teacher, "--teacher")
    pair = Aligner(
        student_tokenizer,
        teacher_tokenizer,
        student_eos=eos_ids(student, "--student", student_tokenizer),
        teacher_eos=eos_ids(teacher, "--teacher", teacher_tokenizer),
        special_tokens=chosen,
        field="--teacher",
        student_field="--student",
    )
    # of the backend, since transformers warns of a text longer than the model's context
    backend: Any = student_tokenizer.backend_tokenizer
    student_ids = np.array(backend.encode(written, add_special_tokens=False).ids, np.int32)
    if not len(student_ids):
        raise UserError("--student: its tokenizer makes no token of this text; is its tokenizer.json whole?")
    _print(pair, student_ids, len(written.encode()), lines, as_json)


def _print(pair: "Aligner", student_ids: Any, num_written: int, lines: int, as_json: bool) -> None:
    """The alignment of a text of `num_written` bytes; what the student itself cannot write of it is not aligned either."""
    from opd.alignment import side_by_side
    from opd.alignment.coverage import Coverage

    spans = pair.align(student_ids, student_ids[:0])
    coverage = Coverage.of(spans)
    num_bytes = max(coverage.num_bytes, num_written)
    if as_json:
        figures = {
            "byte_coverage": coverage.aligned_bytes / num_bytes,
            "token_coverage": coverage.token_coverage,
            "one_to_one": coverage.one_to_one_share,
            "units": coverage.units,
            "student_tokens": coverage.student_tokens,
            "teacher_tokens": coverage.teacher_tokens,
        }
        print(json.dumps(figures))
        return
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]  # a terminal without the characters of the text
    shown = side_by_side.units(spans, *pair.pieces(spans, student_ids))
    width = shutil.get_terminal_size((100, 24)).columns
    print(*pair.special_lines, "", side_by_side.LEGEND, *side_by_side.lines(shown, lines, width), "", sep="\n")
    print(
        f"{coverage.aligned_bytes / num_bytes:.2%} of {num_bytes} bytes and {coverage.token_coverage:.2%} of "
        f"{coverage.student_tokens} student tokens are aligned, {coverage.one_to_one_share:.2%} with one teacher token each "
        f"({coverage.units} units, {coverage.teacher_tokens} teacher tokens)"
    )


def _chosen(text: str | None) -> dict[str, str]:
    try:
        chosen = json.loads(text or "{}")
    except ValueError as error:
        raise UserError(f"--special-tokens: not JSON: {error}") from None
    if not isinstance(chosen, dict) or not all(isinstance(value, str) for value in chosen.values()):
        raise UserError('--special-tokens: not a JSON object of texts such as {"<think>": "[THINK]"}')
    return chosen


def _read(path: Path) -> str:
    try:
        written = path.read_bytes().decode()
    except OSError as error:
        raise UserError(f"--text {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"--text {path} is not UTF-8: byte {error.start} is {error.object[error.start]:#04x}") from None
    if not written:
        raise UserError(f"--text {path} is empty; give it a few lines such as the student writes")
    return written
