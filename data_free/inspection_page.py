"""The facts about pools as one page that needs nothing else: no network, no scripts."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from opd.data_free.inspection_tables import Facts, findings, tables
from opd.report.figures import draw_histogram
from opd.report.page import environment, figure_part, frame
from opd.report.style import NUM_STYLES
from opd.report.text import one_line, plural

NUM_BINS = 24


def render(facts: Facts, lengths: Mapping[str, Sequence[int]], unit: str) -> str:
    """The HTML. `lengths` are of each pool's prompts in `unit`, words or tokens."""
    names = list(facts)
    sizes = f"{names[0]} and {len(names) - 1} more" if len(names) > 1 else names[0]
    return (
        environment(Path(__file__).parent)
        .get_template("inspection.html.jinja")
        .render(
            **frame(names),
            heading=f"Prompts of {sizes}",
            facts=[
                plural(len(names), "pool"),
                plural(sum(pool["num_prompts"] for pool in facts.values()), "prompt"),
            ],
            findings=findings(facts),
            tables=tables(facts),
            figures={"lengths": _lengths(names, lengths, unit), "solvability": _agreement(names, facts)},
            examples={name: pool["examples"] for name, pool in facts.items() if pool["examples"]},
        )
    )


def _lengths(names: Sequence[str], lengths: Mapping[str, Sequence[int]], unit: str) -> dict[str, Any]:
    longest = max(max(found) for found in lengths.values())
    edges = np.unique(np.linspace(0, longest + 1, NUM_BINS + 1).round())
    return _histogram(names, "lengths", f"Length in {unit}", unit, edges, lengths)


def _agreement(names: Sequence[str], facts: Facts) -> dict[str, Any] | None:
    asked = {name: pool["solvability"] for name, pool in facts.items() if "solvability" in pool}
    if not asked:
        return None
    counts = {name: list(one["histogram"].values()) for name, one in asked.items()}
    votes = {name: np.repeat(np.arange(len(found)), found) for name, found in counts.items()}
    samples = max(one["samples"] for one in asked.values())
    unit = f"of {samples} samples with the most frequent answer"
    return _histogram(names, "agreement", "Agreement of the teacher", unit, np.arange(samples + 2) - 0.5, votes)


def _histogram(
    names: Sequence[str], name: str, title: str, unit: str, edges: np.ndarray, values: Mapping[str, Any]
) -> dict[str, Any]:
    """Pools that have no look of their own are in the tables alone."""
    shares = {pool: np.histogram(found, edges)[0] / len(found) for pool, found in values.items()}
    rows = [(names.index(pool), found) for pool, found in shares.items() if names.index(pool) < NUM_STYLES]
    said = "; ".join(f"{one_line(names[place], 40)} median {np.median(values[names[place]]):g}" for place, _ in rows)
    drawing = draw_histogram(name, title, unit, edges.tolist(), rows, names)
    return figure_part(drawing, title, f"{said} ({unit}).")
