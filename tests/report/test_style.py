"""Colours have enough contrast with their ground, light and dark (WCAG 2.2: 4.5 for text, 3 for lines)."""

import re
from pathlib import Path

import pytest

import opd.report
from opd.report.style import COLOURS, GREY, INK, MUTED, PAPER

CSS = (Path(opd.report.__file__).parent / "page.css").read_text()
PAIRS = {name: (light, dark) for name, light, dark in re.findall(r"--([\w-]+): light-dark\((#\w+), (#\w+)\);", CSS)}
SHARES = sorted({int(share) for share in re.findall(r"color-mix\(in srgb, var\(--(?:more|less)\) (\d+)%", CSS)})


def rgb(colour: str) -> list[float]:
    return [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]


def luminance(channels: list[float]) -> float:
    linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: list[float], other: list[float]) -> float:
    low, high = sorted([luminance(one), luminance(other)])
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_text_and_lines_stand_out_from_the_page(theme):
    paper = rgb(PAIRS["paper"][theme])
    assert all(contrast(rgb(PAIRS[name][theme]), paper) >= 4.5 for name in ("ink", "muted", "accent"))
    assert contrast(rgb(PAIRS["ink"][theme]), rgb(PAIRS["panel"][theme])) >= 4.5
    series = [f"series-{place}" for place in range(len(COLOURS))]
    assert all(contrast(rgb(PAIRS[name][theme]), paper) >= 3 for name in (*series, "grey"))


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_coloured_tokens_are_readable(theme):
    assert len(SHARES) == 4
    ink, paper = rgb(PAIRS["ink"][theme]), rgb(PAIRS["paper"][theme])
    for name in ("more", "less"):
        for share in SHARES:
            ground = [share / 100 * a + (1 - share / 100) * b for a, b in zip(rgb(PAIRS[name][theme]), paper)]
            assert contrast(ink, ground) >= 4.5


def test_files_have_the_pages_light_colours():
    assert [PAIRS[f"series-{place}"][0] for place in range(len(COLOURS))] == list(COLOURS)
    assert (PAIRS["grey"][0], PAIRS["muted"][0], PAIRS["ink"][0]) == (GREY, MUTED, INK)
    assert contrast(rgb(PAPER), rgb("#ffffff")) < 1.01
