"""Reflection phrases among tokens."""

import numpy as np
import pytest

from opd.strategies.reflection import reflections


def by_characters(text: str) -> list[int]:
    """Where phrases begin, with a token a byte."""
    return np.flatnonzero(reflections([bytes([byte]) for byte in text.encode()])).tolist()


@pytest.mark.parametrize(
    "phrase",
    [
        *("wait", "actually", "hmm", "let me reconsider", "let me rethink", "let me check", "let me verify"),
        *("i made an error", "i made a mistake", "that's wrong", "that\u2019s wrong", "that is wrong", "incorrect"),
        *("reconsider", "rethink", "re-examine", "double-check", "double check", "going back", "revisit"),
        *("on second thought", "Wait", "HMMMM"),
    ],
)
def test_each_phrase_counts_once_where_it_begins(phrase):
    assert by_characters(phrase) == [0]
    assert by_characters(f"so 4. {phrase}, no") == [6]
    assert reflections([f"so {phrase} no".encode()]).tolist() == [1.0]


@pytest.mark.parametrize("text", ["", "await", "waiter", "a hm", "factually", "so let me see", "correct", "the double"])
def test_other_words_do_not(text):
    assert by_characters(text) == []


def test_a_phrase_over_several_tokens_counts_in_the_first():
    assert reflections([b"x", b" wa", b"it", b" wait, w", b"ait"]).tolist() == [0, 1, 0, 2, 0]
    assert reflections([b"", b"let", b"", b" me recon", b"sider"]).tolist() == [0, 1, 0, 0, 0]
    assert reflections([]).tolist() == []
    assert reflections([b"hmm"]).dtype == np.float32
