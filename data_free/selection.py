"""Pools of some rows of another: without duplicates, or without the problems of evaluation suites."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any, Literal

from opd.data_free.inspection import Problems, duplicates
from opd.data_free.pool import Row
from opd.eval.overlap import sharing

Dedup = Literal["exact", "near"]


@dataclass(frozen=True)
class Dropped:
    """A row that is left out. `because`: the kind of reason; `of`: the id of the earlier row, or of the suite's problem."""

    id: str
    because: str
    of: str


def select(rows: Sequence[Row], dedup: Dedup | None, suites: Mapping[str, Problems]) -> tuple[list[Row], list[Dropped]]:
    """The rows that stay, in order and with `selected` in their provenance, and those that do not.

    A row goes if it shares 13 words with a problem of a suite (or holds it, where it has fewer), or says the same as an
    earlier one that stays. Neither depends on later rows, so that a filtered pool of the first rows is the first part of the
    filtered pool. A row that a suite drops is none that others repeat.
    """
    dropped: dict[int, Dropped] = {}
    for suite, problems in suites.items():
        for place, shared in enumerate(sharing([row.text for row in rows], problems)):
            if shared:
                dropped.setdefault(place, Dropped(rows[place].id, f"overlaps with {suite}", shared[0]))
    left = [place for place in range(len(rows)) if place not in dropped]
    for group in duplicates([rows[place] for place in left], near=dedup == "near") if dedup else ():
        first, *repeats = (left[at] for at in group)
        for place in repeats:
            dropped[place] = Dropped(rows[place].id, f"{dedup} duplicate", rows[first].id)
    how = {"dedup": dedup, "decontaminate": list(suites)}
    kept = [row for place, row in enumerate(rows) if place not in dropped]
    return [selected(row, "filter", how) for row in kept], [dropped[place] for place in sorted(dropped)]


def selected(row: Row, by: str, how: Mapping[str, Any]) -> Row:
    """The row with one more entry in its provenance: which command chose it, and by what."""
    before = row.provenance.get("selected", [])
    chosen = [*before, {"by": by, **how, "opd": version("opd")}]
    return replace(row, provenance={**row.provenance, "selected": chosen})
