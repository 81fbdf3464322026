"""Did a response fall into a loop?"""

from collections.abc import Sequence

import numpy as np

from opd.records import Array

REPEATS = 4  # times that a block follows itself
MIN_TOKENS = 32  # that the repetitions span: less is a matrix row, a decimal expansion or a rule of a table


def is_repetitive(ids: Sequence[int] | Array) -> bool:
    """Whether a response ends in one block of tokens repeated back to back, to the letter.

    The block may be of any length and its last repetition cut short; it occurs at least four times over at least 32 tokens.
    A loop that the model left again does not count, nor does one that changes in each round, such as a growing list. One
    token after the loop, such as EOS, is ignored. Time is all but linear in the number of tokens: where many periods fit
    for long, a shorter one fits as well (Fine and Wilf 1965), and that ends the search.
    """
    backwards = np.asarray(ids)[::-1].tolist()
    return _starts_with_loop(backwards) or _starts_with_loop(backwards[1:])


def _starts_with_loop(ids: list[int]) -> bool:
    for period in range(1, len(ids) // REPEATS + 1):
        length = period
        while length < len(ids) and ids[length] == ids[length - period]:
            length += 1
        if length >= max(MIN_TOKENS, REPEATS * period):
            return True
    return False
