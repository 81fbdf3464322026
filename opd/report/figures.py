"""Figures with matplotlib: one panel each, in the width of a paper's column, so that they are readable on a phone too."""

import io
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from opd.report.comparison import Spending, Standing
from opd.report.curves import AXES, Line, Panel
from opd.report.style import GRID, INK, MUTED, PAPER, style
from opd.report.text import one_line

WIDTH_IN, PLOT_IN, POINTS_IN = 3.9, 2.55, 72
LEFT_IN, RIGHT_IN, TOP_IN, BOTTOM_IN, ROW_IN = 0.58, 0.12, 0.1, 0.46, 0.15
NAMES_IN = 0.95  # right of the axes, where lines are labelled there
FEW_LINES = 6  # whose bands can be told apart
DOTS_PER_IN = 220
LOOKS: Any = {
    "font.size": 8.5,
    "axes.labelsize": 8.5,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.facecolor": PAPER,
    "figure.facecolor": PAPER,
    "savefig.facecolor": PAPER,
    "text.color": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "axes.linewidth": 0.7,
    "lines.linewidth": 1.5,
    "legend.frameon": False,
    "text.parse_math": False,  # a name may hold a dollar sign
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "opd",  # the same figure is the same file
}


@dataclass(frozen=True)
class Drawing:
    """A figure as files. `legend_in`: the height of the legend at the bottom, which a page with its own leaves out."""

    name: str
    title: str
    svg: str
    png: bytes
    legend_in: float


@contextmanager
def _looks() -> Iterator[None]:
    with mpl.rc_context(LOOKS), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # names in scripts that the font lacks
        yield


def draw_curves(panel: Panel, axis: str, names: Sequence[str]) -> Drawing:
    """A panel against one of `AXES`, with the groups' names in a legend below it."""
    with _looks():
        labels, legend_in = _labels([line.place for line in panel.lines], names)
        figure, axes = _axes(PLOT_IN, legend_in, right_in=NAMES_IN if len(labels) < len(panel.lines) else RIGHT_IN)
        factor, unit = _scale(panel, axis)
        tall = 100.0 if panel.percent else 1.0
        for line in panel.lines:
            _draw_line(axes, panel, line, line.x[axis] / factor, tall)
        for label, level in panel.levels:
            _draw_level(axes, label, tall * level)
        if panel.logarithmic:
            _logarithmic(axes)
        _label_at_lines(axes, panel, tall, names)
        axes.set_xlabel(f"{AXES[axis]}{unit}")
        axes.set_ylabel(_label(panel))
        axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
        _legend(figure, labels)
        return _saved(figure, f"{panel.name}-by-{axis}", f"{panel.title} against {AXES[axis]}", legend_in)


def draw_spendings(metric: str, rows: Sequence[tuple[int, Spending]], names: Sequence[str], goal: float | None) -> Drawing:
    """A mark a group: its mean score against the tokens it sampled; lines span its runs. `rows` are (place, spending)."""
    with _looks():
        labels, legend_in = _labels([place for place, _ in rows], names)
        figure, axes = _axes(PLOT_IN, legend_in)
        factor, unit = _tokens(max(float(row.sampled_tokens.max()) for _, row in rows))
        for place, row in rows:
            look, x, y = style(place), row.sampled_tokens / factor, 100 * row.scores
            ends = ([x.min(), x.max()], [y.mean()] * 2), ([x.mean()] * 2, [y.min(), y.max()])
            for name, (across, up) in zip(("tokens", "scores"), ends):
                axes.plot(across, up, color=look.colour, linewidth=1.0, gid=f"group-{place}-{name}")
            axes.plot(x.mean(), y.mean(), look.mark, color=look.colour, markersize=6, gid=f"group-{place}-dot", zorder=3)
            if look.labelled:
                axes.annotate(
                    one_line(names[place], 16), (x.mean(), y.mean()), xytext=(4, 3), textcoords="offset points",
                    fontsize=6.5, color=MUTED, gid=f"group-{place}-name",
                )  # fmt: skip
        if goal is not None:
            _draw_level(axes, "teacher", 100 * goal)
        axes.set_xlim(left=0)
        axes.set_xlabel(f"{AXES['tokens']}{unit}")
        axes.set_ylabel(f"held-out {metric} (%)")
        axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
        _legend(figure, labels)
        return _saved(figure, "final-score-by-tokens", f"Held-out {metric} against {AXES['tokens']}", legend_in)


def draw_scores(suite: str, title: str, unit: str, rows: Sequence[tuple[int, Standing]], goal: float | None) -> Drawing:
    """Each group's score with its interval; `rows` are (place among the groups, standing)."""
    with _looks():
        names = [one_line(standing.group.name, 22) for _, standing in rows]
        left = 0.35 + 0.067 * max(map(len, names))
        figure, axes = _axes(0.55 + 0.22 * len(rows), 0.0, left)
        for height, (place, standing) in enumerate(rows):
            score, look = standing.score, style(place)
            assert score is not None
            if math.isfinite(score.low):
                axes.plot(
                    [100 * score.low, 100 * score.high], [height] * 2, color=look.colour, gid=f"group-{place}-span{height}"
                )
            axes.plot(
                100 * score.value, height, look.mark, color=look.colour, markersize=5.5, gid=f"group-{place}-dot{height}"
            )
        if goal is not None:
            axes.axvline(100 * goal, color=MUTED, linewidth=1.0, linestyle=(0, (1, 1.5)))
            axes.annotate("teacher", (100 * goal, -0.75), ha="right", va="center", color=MUTED, fontsize=8, rotation=0)
        axes.set_ylim(len(rows) - 0.4, -1.05)
        axes.set_yticks(range(len(rows)), names)
        axes.tick_params(axis="y", length=0)
        axes.grid(False, axis="y")
        axes.set_xlabel(unit)
        axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
        return _saved(figure, f"{suite}-scores", title, 0.0)


def draw_histogram(
    name: str, title: str, unit: str, edges: Sequence[float], rows: Sequence[tuple[int, np.ndarray]], names: Sequence[str]
) -> Drawing:
    """Shares of each group in the bins between `edges`; `rows` are (place among the groups, shares [len(edges) - 1])."""
    with _looks():
        labels, legend_in = _labels([place for place, _ in rows], names)
        figure, axes = _axes(0.6 * PLOT_IN, legend_in)
        for place, shares in rows:
            look = style(place)
            axes.stairs(
                100 * shares, edges, color=look.colour, linestyle=(0, look.dash) if look.dash else "-", linewidth=1.5,
                gid=f"group-{place}-bins",
            )  # fmt: skip
        axes.set_ylim(bottom=0)
        axes.set_xlabel(unit)
        axes.set_ylabel("prompts (%)")
        axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
        _legend(figure, labels)
        return _saved(figure, name, title, legend_in)


def _axes(plot_in: float, legend_in: float, left_in: float = LEFT_IN, right_in: float = RIGHT_IN) -> tuple[Figure, Axes]:
    """Axes with room for their labels, above `legend_in` inches."""
    height = TOP_IN + plot_in + BOTTOM_IN + legend_in
    figure = Figure(figsize=(WIDTH_IN, height))
    box = (left_in / WIDTH_IN, (legend_in + BOTTOM_IN) / height, 1 - (left_in + right_in) / WIDTH_IN, plot_in / height)
    return figure, figure.add_axes(box)


def _labels(places: Sequence[int], names: Sequence[str]) -> tuple[dict[int, str], float]:
    """The names that the legend has, by the groups' places, and its height in inches; grey groups are named elsewhere."""
    labels = {place: one_line(names[place], 26) for place in places if not style(place).labelled}
    return labels, ROW_IN * math.ceil(len(labels) / _num_columns(labels)) + 0.06


def _num_columns(labels: Mapping[int, str]) -> int:
    return 1 if max(map(len, labels.values()), default=0) > 22 else 2


def _legend(figure: Figure, labels: Mapping[int, str]) -> None:
    figure.legend(
        list(map(_handle, labels)), list(labels.values()), loc="lower left", ncols=_num_columns(labels),
        bbox_to_anchor=(LEFT_IN / WIDTH_IN - 0.03, -0.005), handlelength=2.6, borderpad=0.1, labelspacing=0.35,
        columnspacing=1.4, fontsize=8,
    )  # fmt: skip


def _draw_level(axes: Axes, label: str, level: float) -> None:
    axes.axhline(level, color=MUTED, linewidth=1.0, linestyle=(0, (1, 1.5)))
    axes.annotate(label, (0.01, level), xycoords=("axes fraction", "data"), va="bottom", color=MUTED, fontsize=8)


def _draw_line(axes: Axes, panel: Panel, line: Line, x: np.ndarray, tall: float) -> None:
    look = style(line.place)
    if (line.high > line.low).any() and not look.labelled:
        alpha = 0.16 if len(panel.lines) <= FEW_LINES else 0.06
        axes.fill_between(
            x, tall * line.low, tall * line.high, color=look.colour, alpha=alpha, linewidth=0, gid=f"group-{line.place}-band"
        )
    every = 1 if panel.marked else (line.place % 6 + 2, max(1, len(x) // 5))
    axes.plot(
        x, tall * line.mean, color=look.colour, linestyle=(0, look.dash) if look.dash else "-", marker=look.mark,
        markersize=4, markevery=every, gid=f"group-{line.place}-line", zorder=2.5 if look.labelled else 3,
    )  # fmt: skip


def _handle(place: int) -> Line2D:
    look = style(place)
    dash = (0, look.dash) if look.dash else "-"
    return Line2D([], [], color=look.colour, linestyle=dash, marker=look.mark, markersize=4)


def _scale(panel: Panel, axis: str) -> tuple[float, str]:
    """What to divide an axis by, and its unit in brackets."""
    largest = max(float(line.x[axis].max()) for line in panel.lines)
    if axis == "tokens":
        return _tokens(largest)
    if axis == "time":
        return next(
            ((size, f" ({word})") for size, word in ((3600, "hours"), (60, "minutes")) if largest >= 2 * size),
            (1.0, " (seconds)"),
        )
    return 1.0, ""


def _tokens(largest: float) -> tuple[float, str]:
    sizes = ((1e6, " (millions)"), (1e3, " (thousands)"))
    return next(((size, word) for size, word in sizes if largest >= size), (1.0, ""))


def _label(panel: Panel) -> str:
    name = panel.title.removesuffix(" in training")
    details = ", ".join(filter(None, [panel.unit, "log scale" if panel.logarithmic else ""]))
    return f"{name[0].lower() if name[1].islower() else name[0]}{name[1:]}" + (f" ({details})" if details else "")


def _logarithmic(axes: Axes) -> None:
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 3) if _decades(axes) < 3 else (1,)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_locator(NullLocator())


def _decades(axes: Axes) -> float:
    low, high = axes.get_ylim()
    return math.log10(high / low)


def _label_at_lines(axes: Axes, panel: Panel, tall: float, names: Sequence[str]) -> None:
    """Names of the grey lines at their height right of the axes, pushed apart where they would lie on each other."""
    grey = sorted((line for line in panel.lines if style(line.place).labelled), key=lambda line: line.mean[-1])
    if not grey:
        return
    gap = min(7.5 / (PLOT_IN * POINTS_IN), 1 / len(grey))  # as a share of the axes' height
    to_axes = axes.transData + axes.transAxes.inverted()
    heights = [float(to_axes.transform((0.0, tall * line.mean[-1]))[1]) for line in grey]
    for place in range(1, len(grey)):
        heights[place] = max(heights[place], heights[place - 1] + gap)
    ceiling = 1.0
    for place in reversed(range(len(grey))):
        heights[place] = ceiling = min(heights[place], ceiling)
        ceiling -= gap
    for line, height in zip(grey, heights):
        axes.text(
            1.015, height, one_line(names[line.place], 16), transform=axes.transAxes, va="center",
            fontsize=min(6.5, 0.85 * gap * PLOT_IN * POINTS_IN), color=MUTED, gid=f"group-{line.place}-name",
        )  # fmt: skip


def _saved(figure: Figure, name: str, title: str, legend_in: float) -> Drawing:
    svg, png = io.StringIO(), io.BytesIO()
    figure.savefig(svg, format="svg", metadata={"Date": None, "Title": title})
    figure.savefig(png, format="png", dpi=DOTS_PER_IN)
    return Drawing(name, title, svg.getvalue(), png.getvalue(), legend_in)
