"""Where a response turns back on itself: the phrases whose rate shows whether a student still checks its reasoning.

The list is that of Negative Self-Distillation (arXiv 2609.11699). More of them is no proof of better reasoning.
"""

import re
from collections.abc import Sequence

import numpy as np

from opd.records import Array

PHRASES = re.compile(
    rb"\b(?:wait|actually|hm{2,}|let me (?:reconsider|rethink|check|verify)|i made (?:an error|a mistake)"
    rb"|that(?:'|\xe2\x80\x99)s wrong|that is wrong|incorrect|reconsider|rethink|re-examine|double[- ]check"
    rb"|going back|revisit|on second thought)\b",
    re.IGNORECASE,
)


def reflections(pieces: Sequence[bytes]) -> Array:
    """[n] float32: how many of the phrases begin in each of the n tokens, given as what each adds to the text.

    A phrase counts once: `let me reconsider` is not a `reconsider` as well.
    """
    found = np.zeros(len(pieces), np.float32)
    ends = np.cumsum([len(piece) for piece in pieces])
    starts = [match.start() for match in PHRASES.finditer(b"".join(pieces))]
    np.add.at(found, np.searchsorted(ends, starts, side="right"), 1.0)
    return found
