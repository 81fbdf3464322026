"""Numbers and foreign text as a reader sees them."""

import math
import re

# Controls, and marks that turn the direction of what follows: shown by their code, so that they do nothing.
_INVISIBLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]")


def visible(text: str) -> str:
    """`text` without characters that act instead of being seen: `\\u202e` is shown as its code. Newlines and tabs stay."""
    return _INVISIBLE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def one_line(text: str, limit: int = 120) -> str:
    """`visible` text on one line, cut in the middle where it is longer than `limit`."""
    line = " ".join(visible(text[: 20 * limit]).split())
    return line if len(line) <= limit else f"{line[: limit // 2 - 1]}…{line[-(limit // 2) :]}"


def plural(number: int, what: str) -> str:
    """`1 pool`, `2 pools`."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def quantity(value: float) -> str:
    """A count with three significant digits: 950, 81.7k, 1.20M."""
    for size, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{_three_digits(value / size)}{suffix}"
    return f"{value:.0f}"


def duration(seconds: float) -> str:
    """12.3 s, 4.1 min or 2.0 h."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 3600 else f"{seconds / 3600:.1f} h"


def nats(value: float) -> str:
    """Three significant digits, at most four decimals."""
    return f"{value:.{max(0, min(4, 2 - math.floor(math.log10(abs(value)))))}f}" if value else "0"


def p_value(value: float) -> str:
    return "<0.001" if value < 0.001 else f"{value:.3f}"


def _three_digits(value: float) -> str:
    return f"{value:.2f}" if abs(value) < 10 else f"{value:.1f}" if abs(value) < 100 else f"{value:.0f}"
