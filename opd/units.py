"""The units of a rollout: turns, or the chunks of a single answer."""

from collections.abc import Sequence

import numpy as np

from opd.records import Array, Turn, Unit

NONE = np.zeros(0, np.float32)


def units_of(turns: Sequence[Turn], chunk: int | None) -> tuple[Unit, ...]:
    """A unit a turn or, with `chunk`, one for every so many tokens of the only turn (the last may have fewer).

    Tokens without a log-prob of the teacher do not count.
    """
    units: tuple[Unit, ...] = ()
    for turn in turns:
        logps, length = NONE if turn.teacher_logps is None else turn.teacher_logps, len(turn.sampled_ids)
        units += chunk_units(logps, length, chunk or length, turn.num_reused)
    return units


def chunk_units(logps: Array, length: int, chunk: int, num_reused: int = 0) -> tuple[Unit, ...]:
    """The chunks of a turn of `length` tokens, of which `logps` [m <= length] are known, NaN where not judged."""
    return tuple(_unit(logps[start : start + chunk], start < num_reused) for start in range(0, length, chunk))


def _unit(logps: Array, reused: bool) -> Unit:
    known = logps[~np.isnan(logps)]
    return Unit(float(known.sum(dtype=np.float64)), len(known), reused)
