"""u4, the diversity of texts: the share of distinct ones among their 4-grams, at a fixed number of tokens.

u4 falls with the size of a corpus, so only values at equal `num_tokens` compare.
"""

import math
from collections.abc import Hashable, Iterable, Sequence
from itertools import islice

import numpy as np

from opd.records import Array

Tokens = Sequence[Hashable] | Array  # words, or ids [n]


def distinct_ngrams(sequences: Iterable[Tokens], n: int = 4, num_tokens: int | None = None, seed: int = 0) -> float:
    """Distinct n-grams / all n-grams of token sequences (lists of words or ids, integer arrays), each taken by itself.

    Sequences of fewer than n tokens are skipped. With `num_tokens` exactly so many tokens are looked at: whole sequences in
    a seeded order, the last one cut. NaN where the sequences hold fewer, and where there is no n-gram.
    """
    usable = [sequence for sequence in sequences if len(sequence) >= n]
    if num_tokens is not None:
        if sum(map(len, usable)) < num_tokens:
            return math.nan
        usable = _subsample(usable, num_tokens, seed)
    seen: set[tuple[Hashable, ...]] = set()
    total = 0
    for sequence in usable:
        tokens = sequence.tolist() if isinstance(sequence, np.ndarray) else sequence
        seen.update(zip(*(islice(tokens, start, None) for start in range(n))))
        total += max(0, len(tokens) - n + 1)
    return len(seen) / total if total else math.nan


def _subsample(sequences: Sequence[Tokens], num_tokens: int, seed: int) -> list[Tokens]:
    taken, left = [], num_tokens
    for place in np.random.default_rng(seed).permutation(len(sequences)):
        if left == 0:
            break
        taken.append(sequences[place][:left])
        left -= len(taken[-1])
    return taken


def usable_tokens(sequences: Iterable[Tokens], n: int = 4) -> int:
    """How many tokens `distinct_ngrams` can look at: those of sequences that hold an n-gram."""
    return sum(len(sequence) for sequence in sequences if len(sequence) >= n)
