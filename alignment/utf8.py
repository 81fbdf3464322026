"""The text that bytes spell, when some of them spell none."""

import codecs
from dataclasses import dataclass

import numpy as np

from opd.records import Array


@dataclass(frozen=True, eq=False)
class Reading:
    """Bytes read as UTF-8. Each invalid sequence is one U+FFFD; an unfinished character at the end is left out."""

    text: str
    size: int  # bytes read: all but those of an unfinished last character
    invalid: tuple[tuple[int, int], ...]  # byte ranges that U+FFFD stands for

    def char_starts(self, data: Array) -> Array:
        """[c + 1] int64: the byte at which each character of `text` begins, and `size`; of the bytes [b] uint8 read."""
        begins = (data[: self.size] & 0xC0) != 0x80
        for start, end in self.invalid:
            begins[start:end] = False
            begins[start] = True
        return np.append(np.flatnonzero(begins), self.size)


def read(data: bytes, final: bool = False) -> Reading:
    """`data` as text. `final`: nothing follows that could finish a last character, which is invalid then."""
    view = memoryview(data)
    parts: list[str] = []
    invalid: list[tuple[int, int]] = []
    at = 0
    while True:
        try:
            text, used = codecs.utf_8_decode(view[at:], "strict", final)
            return Reading("".join([*parts, text]), at + used, tuple(invalid))
        except UnicodeDecodeError as error:
            parts += [str(view[at : at + error.start], "utf-8"), "\ufffd"]
            invalid.append((at + error.start, at + error.end))
            at += error.end
