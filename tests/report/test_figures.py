"""Figures as files, and as parts of the page."""

import re
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from opd.eval.statistics import Interval
from opd.report.comparison import Spending, Standing
from opd.report.curves import AXES, Line, Panel
from opd.report.figures import draw_curves, draw_scores, draw_spendings
from opd.report.inline import inline, swatch
from opd.report.loading import Group
from opd.report.style import COLOURS, NUM_STYLES, VARIABLES, style

SVG = "{http://www.w3.org/2000/svg}"
HOSTILE = ["<script>alert(1)</script>", "a$_{b$", "_hidden", "日本 \u202e"]


def line(place: int, y=(2.0, 1.0, 0.5)) -> Line:
    mean = np.array(y) + 0.01 * place
    x = np.arange(len(y), dtype=float)
    return Line(place, {"steps": x, "tokens": 4e5 * x, "time": 100 * x}, mean, mean - 0.1, mean + 0.1)


def panel(number: int, **more) -> Panel:
    return Panel("loss", "Training loss", [line(place) for place in range(number)], "", **more)


def texts(svg: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(svg).iter(f"{SVG}text")]


@pytest.mark.parametrize(
    ("axis", "label"),
    [("steps", "training steps"), ("tokens", "sampled tokens (thousands)"), ("time", "wall time of training (minutes)")],
)
def test_axes_are_labelled_with_their_units(axis, label):
    assert set(AXES) == {"steps", "tokens", "time"}
    drawing = draw_curves(Panel("kl", "Forward KL in training", [line(0)], "nats/token"), axis, ["g"])
    assert {label, "forward KL (nats/token)", "g"} <= set(texts(drawing.svg))
    assert drawing.png.startswith(b"\x89PNG")
    assert drawing.name == f"kl-by-{axis}"


def test_fractions_are_in_percent():
    drawing = draw_curves(
        Panel("a", "Held-out accuracy", [line(0, [0.2, 0.8])], "%", marked=True, levels=[("teacher", 0.9)]), "steps", ["g"]
    )
    assert {"held-out accuracy (%)", "teacher"} <= set(texts(drawing.svg))
    ticks = [float(text) for text in texts(drawing.svg) if re.fullmatch(r"\d+(\.\d+)?", text)]
    assert max(ticks) > 60


def test_hostile_names_are_text():
    drawing = draw_curves(panel(4), "steps", HOSTILE)
    assert {"<script>alert(1)</script>", "a$_{b$", "_hidden", "日本 \\u202e"} <= set(texts(drawing.svg))


def test_names_beyond_the_colours_stand_at_their_lines():
    names = [f"group-{place}" for place in range(NUM_STYLES + 3)]
    drawing = draw_curves(panel(len(names)), "steps", names)
    legend = next(e for e in ElementTree.fromstring(drawing.svg).iter() if e.get("id") == "legend_1")
    assert [element.text for element in legend.iter(f"{SVG}text")] == names[:NUM_STYLES]
    beside = ElementTree.fromstring(drawing.svg).findall(f".//{SVG}g[@id='group-{NUM_STYLES}-name']//{SVG}text")
    assert [element.text for element in beside] == [names[NUM_STYLES]]


def test_each_of_the_first_groups_looks_different():
    looks = {(style(place).colour, style(place).dash) for place in range(NUM_STYLES)}
    assert len(looks) == len({style(place).mark for place in range(NUM_STYLES)}) == NUM_STYLES
    assert len(COLOURS) >= 6
    assert all(swatch(place).startswith("M") for place in range(NUM_STYLES))


def test_scores_show_intervals_and_values_without_them():
    groups = [
        Standing(Group(name, []), [], Interval(0.5, low, 0.6), 9) for name, low in (("with", 0.4), ("without", np.nan))
    ]
    drawing = draw_scores("s", "Accuracy", "accuracy (%)", list(enumerate(groups)), 0.9)
    assert {"with", "without", "accuracy (%)", "teacher"} <= set(texts(drawing.svg))
    ids = {element.get("id") for element in ElementTree.fromstring(drawing.svg).iter()}
    assert {"group-0-span0", "group-0-dot0", "group-1-dot1"} <= ids
    assert "group-1-span1" not in ids


def test_scores_against_tokens_have_a_mark_a_group_and_name_what_has_no_colour():
    tokens, scores = np.array([1e6, 3e6]), np.array([0.4, 0.8])
    rows = [(place, Spending(Group("", []), (1 + place) * tokens, scores)) for place in (0, 1, 13)]
    names = [f"name-{place}" for place in range(14)]
    drawing = draw_spendings("pass@4", rows, names, 0.9)
    root = ElementTree.fromstring(drawing.svg)
    ids = {element.get("id") for element in root.iter()}
    assert {f"group-{place}-{what}" for place in (0, 1, 13) for what in ("dot", "tokens", "scores")} <= ids
    assert {"held-out pass@4 (%)", "sampled tokens (millions)", "teacher", "name-13"} <= set(texts(drawing.svg))
    legend = next(element for element in root.iter() if element.get("id") == "legend_1")
    assert [element.text for element in legend.iter(f"{SVG}text")] == ["name-0", "name-1"]
    assert drawing.name == "final-score-by-tokens"


def test_a_figure_inside_the_page_takes_the_colours_of_the_page():
    drawing = draw_curves(panel(2), "steps", ["a", "b"])
    assert all(colour in drawing.svg for colour in COLOURS[:2])
    text = inline(drawing, 'Last values: "a" 0.5.')
    root = ElementTree.fromstring(text)
    assert not any(colour in text for colour in VARIABLES)
    assert "var(--series-0)" in text
    assert "font-family" not in text
    assert "text-anchor" in text
    assert (root.get("role"), root.get("width")) == ("img", None)
    assert root.get("aria-label") == 'Training loss against training steps. Last values: "a" 0.5.'
    assert not list(root.iter(f"{SVG}style"))


def test_ids_are_the_figures_own_and_groups_have_classes():
    drawing = draw_curves(panel(2), "steps", ["a", "b"])
    root = ElementTree.fromstring(inline(drawing, ""))
    ids = {value for element in root.iter() if (value := element.get("id"))}
    assert all(value.startswith("loss-by-steps-") for value in ids)
    used = re.findall(r"#([\w.-]+)", inline(drawing, ""))
    assert used
    assert set(used) <= ids
    assert {element.get("class") for element in root.iter()} == {None, "group-0", "group-1"}


def test_the_page_has_a_legend_of_its_own():
    drawing = draw_curves(panel(2), "steps", ["a", "b"])
    text = inline(drawing, "")
    assert "b" not in texts(text)
    height = float(text.split('viewBox="')[1].split('"')[0].split()[3])
    whole = float(drawing.svg.split('viewBox="')[1].split('"')[0].split()[3])
    assert height == pytest.approx(whole - 72 * drawing.legend_in, abs=0.01)
    assert drawing.legend_in > 0.1


def test_figures_are_the_same_every_time(tmp_path: Path):
    first, second = (draw_curves(panel(2), "steps", ["a", "b"]) for _ in range(2))
    assert first == second
