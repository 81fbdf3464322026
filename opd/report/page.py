"""The page: one file that needs nothing else, neither a network nor scripts; its controls are forms and CSS."""

import hashlib
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from opd.report.contents import MEAN, SPENDINGS, Contents
from opd.report.curves import AXES, DIVERGENCES, Panel, samples_of
from opd.report.figures import Drawing
from opd.report.inline import inline, swatch
from opd.report.results import HELDOUT, HELDOUT_AGAIN, title, whole_of
from opd.report.rollouts import Gallery
from opd.report.style import NUM_STYLES, VARIABLES, style
from opd.report.tables import Column, Table
from opd.report.text import duration, nats, one_line, quantity, visible

MAX_HEADING = 4  # groups that the heading names
MAX_NAMED = 12  # groups whose values the words for a figure give


def render(
    found: Contents,
    curves: Mapping[tuple[str, str], tuple[Panel, Drawing]],
    scores: Mapping[str, Drawing],
    tokens: Drawing | None,
    gallery: Gallery,
) -> str:
    """The HTML. `curves` are by (panel, axis), `scores` by suite; `tokens` shows what the groups sampled."""
    tables = {table.name: table for table in found.tables}
    names = [group.name for group in found.styled]
    return (
        environment()
        .get_template("page.html.jinja")
        .render(
            **frame(names),
            heading=_heading(names),
            facts=_facts(found),
            sections=[_section(number, suite, found, tables, scores) for number, suite in enumerate(found.scores)],
            mean=tables.get(MEAN),
            tokens=None if tokens is None else {"figure": _spendings(tokens, tables[SPENDINGS]), "table": tables[SPENDINGS]},
            cost=tables.get("cost"),
            settings=tables.get("settings"),
            runs=tables["runs"],
            findings=found.findings,
            notes=found.notes,
            curves=[_curve(panel, axis, drawing, names) for (_, axis), (panel, drawing) in curves.items()],
            several_losses=sum(name.removeprefix("training-") in DIVERGENCES for name in {name for name, _ in curves}) > 1,
            axes=AXES,
            gallery=gallery,
        )
    )


def environment(*folders: Path) -> Environment:
    """Templates of these folders, which may extend `frame.html.jinja` and use `parts.html.jinja`."""
    found = Environment(
        loader=FileSystemLoader([*folders, Path(__file__).parent]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    found.filters |= {"line": one_line, "visible": visible, "bounds": _bounds, "shade": _shade}
    return found


def frame(names: Sequence[str]) -> dict[str, Any]:
    """What every page is rendered with, beside `heading` and `facts`; `names` are those of the groups, which get a look."""
    return {
        "places": {name: place for place, name in enumerate(names)},
        "marks": [_mark(place) for place in range(len(names))],
        "id_of": lambda table: hashlib.sha256(table.name.encode()).hexdigest()[:8],
        "version": version("opd"),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }


def _heading(names: Sequence[str]) -> str:
    if len(names) > MAX_HEADING:
        return f"Comparison of {len(names)} groups"
    *others, last = (one_line(name, 32) for name in names)
    return f"{', '.join(others)} and {last}" if others else last


def _facts(found: Contents) -> list[str]:
    runs = sum(len(group.runs) for group in found.groups)
    facts = [f"{runs} runs", f"metric: {found.question.metric.name}"]
    facts.append(f"baseline: {one_line(found.question.baseline.name)}")
    teacher, reference = found.question.teacher, found.question.reference
    facts += [f"teacher: {one_line(teacher.path.name)}"] if teacher else []
    return [*facts, f"reference: {one_line(reference.name)}"] if reference else facts


def _mark(place: int) -> dict[str, Any]:
    look = style(place)
    return {"colour": VARIABLES[look.colour], "dash": look.dash, "path": swatch(place) if place < NUM_STYLES else ""}


def _section(
    number: int, suite: str, found: Contents, tables: Mapping[str, Table], scores: Mapping[str, Drawing]
) -> dict[str, Any]:
    figure = None
    if drawing := scores.get(suite):
        shown = Column("", "percent").show
        said = [f"{one_line(row.group.name, 40)} {shown(row.score)}" for row in found.scores[suite] if row.score is not None]
        figure = figure_part(drawing, f"{_capitalised(drawing.title)}, 95 % intervals", _listed(said, " (%)"))
    both = {"scores": tables[f"{suite}-scores"], "verdicts": tables[f"{suite}-verdicts"]}
    return {
        "id": f"suite-{number}",
        "title": _capitalised(title(suite)) if whole_of(suite) in (HELDOUT, HELDOUT_AGAIN) else suite,
        "figure": figure,
        **both,
    }


def _curve(panel: Panel, axis: str, drawing: Drawing, names: Sequence[str]) -> dict[str, Any]:
    y = (lambda value: f"{100 * value:.1f}") if panel.percent else nats
    x = {"steps": "{:.0f}".format, "tokens": quantity, "time": duration}[axis]
    data = [(names[line.place], [f"{y(b)} at {x(a)}" for a, b in samples_of(line, axis)]) for line in panel.lines]
    said = [f"{one_line(names[line.place], 40)} {y(line.mean[-1])}" for line in panel.lines]
    unit = f" ({panel.unit})" if panel.unit else ""
    words = f"Last values: {_listed(said, unit)}"
    heading = f"{panel.title}{unit} at {AXES[axis]}"
    width = max(len(points) for _, points in data)
    return figure_part(drawing, panel.title, words) | {"axis": axis, "data": data, "heading": heading, "width": width}


def _spendings(drawing: Drawing, table: Table) -> dict[str, Any]:
    said = [f"{one_line(row[0], 40)} {row[3]} at {row[1]}" for row in table.shown()]
    return figure_part(drawing, "Last evaluation and tokens until then; lines span the runs", _listed(said, " (%)"))


def figure_part(drawing: Drawing, caption: str, words: str) -> dict[str, Any]:
    """What the macro `draw` takes; `words` say what the figure shows."""
    return {"axis": "", "caption": caption, "svg": Markup(inline(drawing, words)), "data": [], "heading": "", "width": 1}


def _listed(said: Sequence[str], unit: str) -> str:
    rest = f"; and {len(said) - MAX_NAMED} more groups" if len(said) > MAX_NAMED else ""
    return f"{'; '.join(said[:MAX_NAMED])}{rest}{unit}."


def _bounds(text: str) -> tuple[str, str]:
    """An estimate and its bounds, apart."""
    head, bracket, tail = text.partition(" [")
    return (head, f"[{tail}") if bracket and tail.endswith("]") else (text, "")


def _shade(level: int) -> str:
    return f"{'m' if level > 0 else 'l'}{abs(level)}" if level else ""


def _capitalised(text: str) -> str:
    return text[:1].upper() + text[1:]
