"""Suggestions for a misspelt name."""

from collections.abc import Iterable
from difflib import get_close_matches


def nearest(name: str, known: Iterable[str], listed: bool = True) -> str:
    """`"; did you mean 'x'?"` when a known name is close, else, where it is to be `listed`, the list of known names."""
    known = sorted(known)
    close = get_close_matches(name, known, n=1, cutoff=0.6)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; known: {', '.join(known)}" if known and listed else ""
