"""Reading bytes of which some are no characters."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opd.alignment import utf8

PIECES = st.sampled_from(
    [b"a", b"\xc3", b"\xa9", "é".encode(), "☃".encode(), "😀".encode(), b"\xf0\x9f", b"\x80", b"\xff", b"\xed\xa0\x80"]
)


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(data=st.one_of(st.binary(max_size=20), st.lists(PIECES, max_size=8).map(b"".join)))
def test_reads_as_python_replaces(data):
    read = utf8.read(data)
    assert read.text == data[: read.size].decode(errors="replace")
    assert len(data) - read.size <= 3
    if read.size < len(data):  # a last character that more bytes would finish
        assert utf8.read(data[read.size :]).text == ""
    assert utf8.read(data, final=True).text == data.decode(errors="replace")
    starts = read.char_starts(np.frombuffer(data, np.uint8))
    assert len(starts) == len(read.text) + 1
    for character, start, end in zip(read.text, starts, starts[1:]):
        assert data[start:end].decode(errors="replace") == character


@pytest.mark.parametrize("size", range(1, 4))
def test_an_unfinished_character_is_left_out(size):
    read = utf8.read(b"ab" + "😀".encode()[:size])
    assert (read.text, read.size, read.invalid) == ("ab", 2, ())
    read = utf8.read(b"ab" + "😀".encode()[:size] + b"c")
    assert (read.text, read.size, read.invalid) == ("ab\ufffdc", 3 + size, ((2, 2 + size),))
