"""Draws a report of `benchmarks.kernels`: time and memory of each provider, a row of panels a case.

python -m benchmarks.kernels.plot FILE.json FILE.svg
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from opd.report.figures import LOOKS
from opd.report.style import COLOURS, INK, MUTED

OURS, OTHERS = COLOURS[0], COLOURS[1]
WIDTH_IN, BAR_IN, MARGIN_IN = 7.8, 0.19, 0.62


def draw(report: Mapping[str, Any], path: Path) -> None:
    """Writes an SVG. Bars are medians and peaks, whiskers run from the fastest call to the median; providers that failed are
    named with what they said."""
    groups = {case["name"]: [row for row in report["rows"] if row["case"] == case["name"]] for case in report["cases"]}
    groups = {name: rows for name, rows in groups.items() if rows}
    heights = [BAR_IN * len(rows) + MARGIN_IN for rows in groups.values()]
    with mpl.rc_context(LOOKS):
        figure = Figure(figsize=(WIDTH_IN, sum(heights)), layout="constrained")
        panels = figure.subplots(len(groups), 2, squeeze=False, height_ratios=heights)
        for (name, rows), (left, right) in zip(groups.items(), panels):
            times = [row.get("wall_median_s", 0.0) * 1e3 for row in rows]
            _bars(left, rows, times, f"{name}: ms a call")
            left.errorbar(
                times,
                range(len(rows)),
                xerr=[[t - row.get("wall_min_s", 0.0) * 1e3 for t, row in zip(times, rows)], [0.0] * len(rows)],
                fmt="none",
                ecolor=INK,
                elinewidth=0.8,
            )
            floors = [row["floor_s"] * 1e3 for row in rows if "floor_s" in row]
            if floors:
                left.axvline(floors[0], color=INK, linewidth=1, linestyle=(0, (3, 2)))
                left.annotate(
                    "floor", (floors[0], 1), xycoords=("data", "axes fraction"), fontsize=7, va="bottom", ha="center"
                )
            _bars(right, rows, [row.get("peak_mib", 0.0) for row in rows], "MiB beyond the inputs")
            right.set_yticklabels([])
        figure.savefig(path, format="svg", metadata={"Date": None})


def _bars(axes: Axes, rows: Sequence[Mapping[str, Any]], values: Sequence[float], label: str) -> None:
    colours = [OURS if row["provider"].startswith("ours") else OTHERS for row in rows]
    axes.barh(range(len(rows)), values, color=colours, height=0.7)
    axes.set_yticks(range(len(rows)), [row["provider"] for row in rows])
    axes.invert_yaxis()
    axes.set_xlabel(label)
    axes.set_xlim(0, 1.18 * max([*values, 1e-9]))
    axes.grid(axis="y", visible=False)
    for place, (row, value) in enumerate(zip(rows, values)):
        text = "failed" if "failed" in row else f"{value:,.3g}" if value < 1000 else f"{value:,.0f}"
        axes.annotate(text, (value, place), (3, 0), textcoords="offset points", va="center", fontsize=7, color=MUTED)


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
