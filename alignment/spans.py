"""Where two segmentations of one text agree: the finest common refinement of their byte offsets, in numpy.

Units are the stretches between consecutive cuts, and a cut is a byte at which tokens of both sides end (CompassOPD, arXiv
2609.10154, A.4, on bytes instead of decoded strings, so that a split character costs one unit and not the rest).

Shape legend: n student tokens, m teacher tokens, b bytes of the student's text, c its characters, u units, g groups.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from opd.records import Array

SPACE = 0x20


@dataclass(frozen=True, eq=False)
class Placed:
    """Teacher tokens on the bytes of the student's text."""

    tokens_before: Array  # [b + 1] int64: how many teacher tokens end at or before a byte that is a boundary; -1 elsewhere
    bad_tokens: Array  # [m] bool: spell something else than the text does there
    bad_bytes: Array  # [b] bool: no good teacher token spells them
    leads: bool  # the first teacher token is nothing but the space that its tokenizer puts before a text


@dataclass(frozen=True, eq=False)
class Units:
    """The fields of `opd.records.SpanMap` of the same names, for one text."""

    student_ends: Array
    teacher_ends: Array
    num_bytes: Array
    aligned: Array


def place_exact(teacher_ends: Array, size: int) -> Placed:
    """Teacher tokens that spell the text as it is: `teacher_ends` [m] are their offsets in its `size` bytes.

    Bytes after the last one are an unfinished character, which the teacher was not shown.
    """
    shown = teacher_ends[-1] if len(teacher_ends) else 0
    return Placed(
        _boundaries(teacher_ends, np.arange(1, len(teacher_ends) + 1), size),
        np.zeros(len(teacher_ends), bool),
        np.arange(size) >= shown,
        leads=len(teacher_ends) > 1 and not teacher_ends[0],
    )


def place_by_offsets(text: Array, char_starts: Array, spans: Array, spelled: Array, spelled_ends: Array) -> Placed:
    """Teacher tokens whose own bytes differ from the text somewhere, placed by the characters they were made from.

    `text` [b] uint8 is what the student wrote, `char_starts` [c + 1] its characters, `spans` [m, 2] the characters of each
    teacher token, `spelled` uint8 the bytes that the teacher tokens spell, with `spelled_ends` [m]. Tokens whose characters
    overlap form a group. A group is good if it spells the bytes it was made from, with the gap before it where the
    tokenizer drops spaces between words, or without a first space that the tokenizer put there. Inside of good groups each
    token has its place; around a bad one there are boundaries, so that the next one is placed again.
    """
    num_tokens = len(spans)
    if not num_tokens:
        return place_exact(spelled_ends, len(text))
    sizes = np.diff(spelled_ends, prepend=0)
    reach = np.maximum.accumulate(spans[:, 1])
    ahead = np.minimum.accumulate(spans[::-1, 0])[::-1]
    first = np.flatnonzero(np.concatenate([[True], reach[:-1] <= ahead[1:]]))  # [g] the first token of each group
    group = np.repeat(np.arange(len(first)), np.diff(first, append=num_tokens))  # [m]
    start, end = char_starts[np.minimum.reduceat(spans[:, 0], first)], char_starts[np.maximum.reduceat(spans[:, 1], first)]
    gap = start - np.concatenate([[0], end[:-1]])
    length = np.add.reduceat(sizes, first)
    spelled_start = spelled_ends[first] - sizes[first]

    width = end - start
    spaced = (length == width + 1) & (np.append(spelled, 0)[spelled_start] == SPACE)
    absorbs = (gap > 0) & (length == width + gap) & ~(spaced & (text[start - 1] != SPACE))
    drops = spaced & ~absorbs
    origin = np.where(absorbs, start - gap, start) - drops - spelled_start  # of the text, less that of the spelled bytes
    fits = (length == width) | absorbs | drops
    of_byte = np.repeat(group, sizes)
    at = np.arange(len(spelled)) + origin[of_byte]
    differs = (text[np.clip(at, 0, len(text) - 1)] != spelled) & (at >= (origin + drops + spelled_start)[of_byte])
    good = fits & (np.bincount(of_byte, differs, len(first)) == 0)

    start = np.where(good & absorbs, start - gap, start)
    last = np.append(first[1:], num_tokens) - 1
    token_end = np.where(good[group], np.maximum(spelled_ends + origin[group], start[group]), end[group])
    known = good[group]
    known[last] = True  # of a bad group the end is known, its inner boundaries are not
    counts = np.concatenate([first, np.flatnonzero(known) + 1])
    covered = np.zeros(len(text) + 1, np.int64)
    np.add.at(covered, start[good], 1)
    np.add.at(covered, end[good], -1)
    boundaries = _boundaries(np.concatenate([start, token_end[known]]), counts, len(text))
    leads = bool(good[0] and not token_end[0])
    return Placed(boundaries, ~good[group], np.cumsum(covered[:-1]) == 0, leads)


def in_a_row(segments: Sequence[Placed]) -> Placed:
    """Texts one after another, each placed by itself: between two of them is a boundary."""
    if len(segments) == 1:
        return segments[0]
    starts = np.cumsum([0, *(len(segment.bad_tokens) for segment in segments)])
    before = [np.where(part.tokens_before < 0, -1, part.tokens_before + start) for part, start in zip(segments, starts)]
    return Placed(
        np.concatenate([*(part[:-1] for part in before), before[-1][-1:]]),
        np.concatenate([segment.bad_tokens for segment in segments]),
        np.concatenate([segment.bad_bytes for segment in segments]),
        segments[0].leads,
    )


def refine(student_ends: Array, placed: Placed) -> Units:
    """The units of student tokens that end at the bytes `student_ends` [n] and the teacher tokens placed on them.

    Tokens without bytes go with the next token that has some, except that first ones which are nothing but the space that
    either tokenizer puts before a text are a unit. Those at the end are a unit of their own on the
    student's side, which is not aligned, and belong to the last unit on the teacher's. Some student token must have bytes.
    """
    num_teacher = len(placed.bad_tokens)
    sizes = np.diff(student_ends, prepend=0)
    before = placed.tokens_before[student_ends]
    spelling = np.flatnonzero(sizes)
    before[spelling[-1]] = num_teacher
    cuts = spelling[before[spelling] >= 0]
    byte_ends, teacher_ends = student_ends[cuts], before[cuts]
    bad = _counts(placed.bad_bytes, byte_ends) + _counts(placed.bad_tokens, teacher_ends)
    aligned = (bad == 0) & (np.diff(teacher_ends, prepend=0) > 0)
    units = Units(cuts + 1, teacher_ends, np.diff(byte_ends, prepend=0), aligned)
    if placed.leads and not student_ends[0]:
        units = _inserted(units, 0, Units(*map(np.array, (1, 1, 0, True))))
    if units.student_ends[-1] < len(student_ends):
        rest = Units(*map(np.array, (len(student_ends), num_teacher, 0, False)))
        units = _inserted(units, len(units.aligned), rest)
    return units


def _inserted(units: Units, at: int, unit: Units) -> Units:
    return Units(*(np.insert(old, at, new) for old, new in zip(vars(units).values(), vars(unit).values())))


def _boundaries(bytes_at: Array, counts: Array, size: int) -> Array:
    """[size + 1]: the least of `counts` at each byte of `bytes_at`, 0 at the text's beginning, -1 elsewhere."""
    found = np.full(size + 1, -1, np.int64)
    order = np.argsort(-counts, kind="stable")
    found[bytes_at[order]] = counts[order]  # of several the last one stays: the least
    found[0] = 0
    return found


def _counts(flags: Array, ends: Array) -> Array:
    """How many flags are set in each stretch up to `ends`."""
    return np.diff(np.concatenate([[0], np.cumsum(flags)])[ends], prepend=0)
