"""How groups look in every figure: six colours that colour-blind readers tell apart, two dashes, a mark for each group."""

from dataclasses import dataclass

COLOURS = ("#0068a8", "#c2410c", "#00795c", "#a83c82", "#6a5a00", "#4b3fb5")  # each 4.5:1 or more on white
INK, MUTED, GRID, PAPER = "#1a1a1b", "#5a5a5b", "#dededf", "#fffffe"
GREY = "#8a8a8b"  # groups beyond the twelfth, which are labelled at their line
DASHES = ((), (4.5, 1.8))
MARKS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p", "h", "*")
NUM_STYLES = len(MARKS)  # groups that are told apart by their look

VARIABLES = {colour: f"var(--series-{place})" for place, colour in enumerate(COLOURS)}
VARIABLES |= {INK: "var(--ink)", MUTED: "var(--muted)", GRID: "var(--grid)", PAPER: "var(--paper)", GREY: "var(--grey)"}


@dataclass(frozen=True)
class Style:
    colour: str
    dash: tuple[float, ...]
    mark: str
    labelled: bool  # at the line itself, because the colour says nothing


def style(place: int) -> Style:
    """Of the group at `place`."""
    if place >= NUM_STYLES:
        return Style(GREY, (), MARKS[place % NUM_STYLES], labelled=True)
    return Style(COLOURS[place % len(COLOURS)], DASHES[place // len(COLOURS)], MARKS[place], labelled=False)
