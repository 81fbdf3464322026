"""Pools of prompts as JSON lines: what a teacher wrote, or what was imported, frozen before training begins.

One row a prompt, which `datasets.load_dataset` reads and prompt source `dataset` takes with `columns.prompt=prompt`:
`{"id": "math-0", "prompt": "...", "domain": "math", "attempt": 0, "num_tokens": 57, "provenance": {...}}`
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

from opd.data import json_lines, own_words
from opd.errors import UserError
from opd.files import explain_unwritable, write_text
from opd.records import DEFAULT_DOMAIN

NAMES = ("id", "prompt", "domain", "attempt", "num_tokens", "provenance")
DOMAIN = re.compile(r"[\w.-]+")


@dataclass(frozen=True)
class Row:
    """One prompt.

    Example: `Row("math-0", "What is 2 + 2?", "math", provenance={"teacher": "tiny:teacher"})`
    """

    id: str
    prompt: str | Sequence[Mapping[str, Any]]  # text, or chat messages
    domain: str = DEFAULT_DOMAIN  # the name of the teacher that scores it
    attempt: int = 0  # unusable drafts before this one
    num_tokens: int | None = None  # of all that the teacher wrote for it; None where no teacher did
    provenance: Mapping[str, Any] = field(default_factory=dict)  # who wrote it, how; what a file of several pools keeps
    further: Mapping[str, Any] = field(default_factory=dict)  # other columns, such as `answer`

    @property
    def text(self) -> str:
        """The problem's own words: the text, or what users say in the messages."""
        return own_words(self.prompt)

    @property
    def columns(self) -> dict[str, Any]:
        """The row as it stands in the file."""
        return {**{name: getattr(self, name) for name in NAMES}, **self.further}


def read_pool(path: Path, field: str) -> list[Row]:
    """The rows of a pool, in order.

    Raises `UserError` naming `field`, the file and the line: it cannot be read, is empty, or is no pool.
    """
    if not path.is_file():
        raise UserError(f"{field}: no such file {str(path)!r}; opd prompts author or import writes one")
    fix = "make a pool of any JSON lines with opd prompts import"
    rows = [row_of(content, f"{field}: {where} of {path}", fix) for where, content in json_lines(path, field)]
    if not rows:
        raise UserError(f"{field}: {path} holds no prompts")
    return rows


def write_pool(path: Path, rows: Iterable[Row]) -> None:
    """Replaces `path` atomically. Raises `UserError` where it cannot be written."""
    with explain_unwritable(path.parent):
        write_text(path, "".join(json.dumps(row.columns, ensure_ascii=False) + "\n" for row in rows))


def pool_digest(rows: Iterable[Row]) -> str:
    """32 hex digits (BLAKE2b-16) over all of each row that training may read: id, domain, prompt and further columns."""
    digest = blake2b(digest_size=16)
    for row in rows:
        digest.update(json.dumps([row.id, row.domain, row.prompt, row.further], sort_keys=True).encode() + b"\n")
    return digest.hexdigest()


def check_out(
    out: Path, source: Path | None = None, *, overwrite: bool, resume: bool | None = None, beside: Sequence[str] = ()
) -> list[Path]:
    """Refuses to write over what is read, or over what is not to be touched; returns those of the files that exist.

    `resume` is None where a command cannot go on. `beside`: the suffixes of further files that are written. Raises
    `UserError`.
    """
    if out.suffix != ".jsonl" or out.is_dir():
        raise UserError(f"--out: {out}{' is a folder' if out.is_dir() else ''}: name a file that ends in .jsonl")
    there = [file for file in (out, *map(out.with_suffix, beside)) if file.exists()]
    for file in there:
        if source is not None and source.exists() and file.samefile(source):
            raise UserError(f"--out: {file} is what is read and would be overwritten; name another file")
    if there and not (overwrite or resume):
        go_on = "" if resume is None else "continue it with --resume or "
        raise UserError(f"--out: {there[0]} exists; {go_on}replace it with --overwrite")
    return there


def check_domain(domain: Any, where: str) -> None:
    """Raises `UserError` beginning with `where` for what cannot name a teacher."""
    if not isinstance(domain, str) or not DOMAIN.fullmatch(domain):
        raise UserError(f"{where} is {domain!r}: it names a teacher; use letters, digits and . _ -")


def row_of(content: Mapping[str, Any], where: str, fix: str) -> Row:
    """The row that a JSON object is. Raises `UserError` beginning with `where`; `fix` is what to do about other files."""
    for name in ("id", "prompt"):
        if name not in content:
            raise UserError(f"{where} has no {name!r}; {fix}")
    check_prompt(content["prompt"], where, "prompt")
    mine = {name: content[name] for name in NAMES if content.get(name) is not None}
    for name, kind in (("id", str), ("attempt", int), ("num_tokens", int), ("provenance", dict)):
        if name in mine and (not isinstance(mine[name], kind) or mine[name] == ""):
            raise UserError(f"{where}: {name!r} is {mine[name]!r}, which a pool does not have; {fix}")
    check_domain(mine.get("domain", DEFAULT_DOMAIN), f"{where}: 'domain'")
    _check_provenance(mine.get("provenance", {}), where, fix)
    return Row(**mine, further={name: value for name, value in content.items() if name not in NAMES})


def check_prompt(value: Any, where: str, column: str) -> None:
    """Raises `UserError` beginning with `where` unless it is text that says something, or chat messages that do."""
    if isinstance(value, str):
        said = [value]
    elif isinstance(value, list) and all(map(_is_message, value)):
        said = [message.get("content") or "" for message in value]
    else:
        said = []
    if not any(map(str.strip, said)):
        raise UserError(f"{where} needs non-empty text, or chat messages of which each has text as content, in {column!r}")


def _is_message(value: Any) -> bool:
    """Whether it has text, which can be compared with others; beside calls of tools there may be none."""
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        return False
    content = value.get("content")
    return isinstance(content, str) or (content is None and bool(value.get("tool_calls")))


def _check_provenance(provenance: Mapping[str, Any], where: str, fix: str) -> None:
    """What is told of it must be there in the form in which this package writes it."""
    chosen = provenance.get("selected", [])
    if not isinstance(provenance.get("sampling", {}), dict):
        raise UserError(f"{where}: the provenance's 'sampling' is not a JSON object; {fix}")
    if not isinstance(chosen, list) or not all(isinstance(one, dict) for one in chosen):
        raise UserError(f"{where}: the provenance's 'selected' is not a list of JSON objects; {fix}")
