"""Pools for other toolkits, and prompts from them.

`trl` is TRL's conversational prompt-only format, `jsonl` one plain problem a row. Both are read back as they were written.
"""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from opd.data import json_lines
from opd.data_free.pool import Row, check_domain, check_out, check_prompt, read_pool, row_of, write_pool
from opd.errors import UserError
from opd.files import explain_unwritable, write_text
from opd.records import DEFAULT_DOMAIN
from opd.spelling import nearest

Format = Literal["trl", "jsonl"]
COLUMNS = ("prompt", "problem")  # where a prompt may be, unless one is named
FURTHER = ("answer", "tools")  # what prompt sources read besides


def export_pool(pool: Path, out: Path, to: Format, *, overwrite: bool = False) -> dict[str, Any]:
    """Writes the pool's prompts in another form, without provenance. Raises `UserError`."""
    rows = read_pool(pool, "POOL")
    check_out(out, pool, overwrite=overwrite)
    with explain_unwritable(out.parent):
        write_text(out, "".join(json.dumps(exported(row, to), ensure_ascii=False) + "\n" for row in rows))
    return {"num_prompts": len(rows), "format": to}


def exported(row: Row, to: Format) -> dict[str, Any]:
    """One row of that form."""
    named = {"id": row.id, "domain": row.domain, **{name: row.further[name] for name in FURTHER if name in row.further}}
    if to == "jsonl":
        return {"id": row.id, "problem": row.prompt, **named}
    messages = [{"role": "user", "content": row.prompt}] if isinstance(row.prompt, str) else row.prompt
    return {"prompt": messages, **named}


def import_pool(
    file: Path,
    out: Path,
    *,
    column: str | None = None,
    domain: str | None = None,
    renumber: bool = False,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Writes a pool of the prompts in JSON lines, with ids of their own with `renumber`. Raises `UserError` naming the line
    where one is no prompt or has an id again."""
    if not file.is_file():
        raise UserError(f"FILE: no such file {str(file)!r}; name JSON lines with one prompt each")
    check_out(out, file, overwrite=overwrite)
    rows: dict[str, Row] = {}
    counts: Counter[str] = Counter()
    for index, (line, content) in enumerate(json_lines(file, "FILE")):
        where = f"FILE: {line} of {file}"
        row = imported(content, where, index, {"imported": file.name}, column, domain)
        if renumber:
            row = replace(row, id=f"{row.domain}-{counts[row.domain]}")
            counts[row.domain] += 1
        if row.id in rows:
            raise UserError(
                f"{where} has the id {row.id!r}, as an earlier line has; give all of them new ids with --renumber"
            )
        rows[row.id] = row
    if not rows:
        raise UserError(f"FILE: {file} holds no prompts")
    write_pool(out, rows.values())
    return {"num_prompts": len(rows), "domains": sorted({row.domain for row in rows.values()})}


def imported(
    content: Mapping[str, Any],
    where: str,
    index: int,
    provenance: Mapping[str, Any],
    column: str | None = None,
    domain: str | None = None,
) -> Row:
    """The row that a JSON object is, the `index`-th of its file; one that has a provenance keeps it, and all else that it
    has. Raises `UserError` beginning with `where`."""
    names = COLUMNS if column is None else (column,)
    found = next((name for name in names if name in content), None)
    if found is None:
        asked = " or ".join(map(repr, names))
        raise UserError(f"{where} has no column {asked}{nearest(names[0], content)}; name it with --prompt")
    prompt = content[found]
    check_prompt(prompt, where, found)
    if isinstance(prompt, list) and len(prompt) == 1 and prompt[0].keys() == {"role", "content"}:
        (message,) = prompt
        prompt = message["content"] if message["role"] == "user" else prompt
    if domain is None and content.get("domain") not in (None, ""):
        domain = content["domain"]
        check_domain(domain, f"{where}: 'domain'")
    domain = domain or DEFAULT_DOMAIN
    name = content["id"] if content.get("id") is not None else f"{domain}-{index}"
    if not isinstance(name, str | int) or isinstance(name, bool) or name == "":
        raise UserError(f"{where}: 'id' is {name!r}; write text, or leave the column out")
    mine = {"id": str(name), "prompt": prompt, "domain": domain}
    if content.get("provenance") is not None:
        rest = {name: value for name, value in content.items() if name != found}
        return row_of({**rest, **mine}, where, "leave the column 'provenance' out")
    further = {name: content[name] for name in FURTHER if content.get(name) is not None}
    return Row(**mine, provenance=provenance, further=further)
