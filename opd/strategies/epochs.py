"""Epochs without state: which rows of a set a step gets, in one seeded permutation an epoch."""

import numpy as np


def drawn(size: int, seed: int, step: int, attempt: int, count: int) -> list[int]:
    """The rows, from 0 to `size` - 1, of `step`'s `count` prompts. Every row comes once before any comes twice.

    A pure function of its arguments, so that a resumed run gets the same ones; another `attempt` at a step gets others.
    """
    places = np.arange(step * count, (step + 1) * count)
    rows: list[int] = []
    for epoch in np.unique(places // size):
        order = np.random.default_rng([seed, attempt, int(epoch)]).permutation(size)
        rows += [int(order[place % size]) for place in places[places // size == epoch]]
    return rows
