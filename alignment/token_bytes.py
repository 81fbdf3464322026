"""What each token of a fast tokenizer adds to a text, in bytes: a table made once, and joins of ids without `decode`.

Decoding id by id loses bytes: the pieces of a split character each decode to U+FFFD, and a first token loses its space.
Shape legend: V ids of the tokenizer, n tokens, b bytes of their text.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np

from opd.errors import UserError
from opd.records import Array

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
Prefix = Literal["never", "first", "always"]


@dataclass(frozen=True, eq=False)
class TokenBytes:
    """The bytes of each token. Special tokens have none, nor have ids that the tokenizer lacks.

    Example: `TokenBytes.of(tokenizer.backend_tokenizer, "student")`
    """

    blob: Array  # uint8, the bytes of all tokens one after another
    starts: Array  # [V + 1] int64, where each token's bytes begin; the last row stands for every id from V on
    sizes: Array  # [V + 1] int64
    special: Array  # [V + 1] bool: control tokens
    prefix: Prefix  # whether the tokenizer puts a space before a text of its own accord: never, at the first, or at each
    before_spaces: bool  # whether it does so before a text that begins with a space, too
    fallback: Array  # [V + 1] bool: stands for one byte of a character that has no token

    @classmethod
    def of(cls, backend: Any, field: str) -> "TokenBytes":
        """The table of a `tokenizers.Tokenizer`. Raises `UserError` naming `field` for a decoder that is not understood."""
        vocab: dict[str, int] = backend.get_vocab(with_added_tokens=True)
        added = backend.get_added_tokens_decoder()
        size = 1 + max(vocab.values(), default=-1)
        spell, (prefix, before_spaces) = _speller(backend, field), _prefix(backend)
        byte_level = _is_byte_level(backend)
        pieces = [b""] * (size + 1)
        special = np.zeros(size + 1, bool)
        fallback = np.zeros(size + 1, bool)
        has_fallback = any(step["type"] == "ByteFallback" for step in steps(backend.decoder))
        for token, index in vocab.items():
            if index in added:
                special[index] = added[index].special
                pieces[index] = token.encode() if byte_level else spell(token)
            else:
                pieces[index] = spell(token)
            fallback[index] = has_fallback and BYTE_TOKEN.fullmatch(token) is not None
        pieces = [b"" if control else piece for piece, control in zip(pieces, special.tolist())]
        sizes = np.array([len(piece) for piece in pieces], np.int64)
        return cls(
            blob=np.frombuffer(b"".join(pieces), np.uint8),
            starts=np.cumsum(sizes) - sizes,
            sizes=sizes,
            special=special,
            prefix=prefix,
            before_spaces=before_spaces,
            fallback=fallback,
        )

    @cached_property
    def of_byte(self) -> Array:
        """[256] int32: the token of each byte that is no character by itself; -1 for the others, or where there is none."""
        single = np.flatnonzero((self.sizes[:-1] == 1) & ~self.special[:-1])
        byte = self.blob[self.starts[:-1][single]]
        found = np.full(256, -1, np.int32)
        found[byte[::-1]] = single[::-1]  # of several tokens the first
        found[:128] = -1
        return found

    def __len__(self) -> int:
        return len(self.sizes) - 1

    def rows(self, ids: Array) -> Array:
        """[n] the table's rows of these ids [n]."""
        return np.minimum(ids, len(self))

    def __getitem__(self, index: int) -> bytes:
        """The bytes of one token."""
        start = self.starts[index]
        return self.blob[start : start + self.sizes[index]].tobytes()

    def join(self, ids: Array) -> tuple[Array, Array]:
        """What these ids [n] spell: the bytes [b] uint8, and where each token ends in them [n] int64."""
        rows = self.rows(ids)
        sizes = self.sizes[rows]
        ends = np.cumsum(sizes)
        index = np.arange(ends[-1] if len(ends) else 0) + np.repeat(self.starts[rows] - (ends - sizes), sizes)
        return self.blob[index], ends

    def text(self, ids: Array, first: bool = True) -> tuple[Array, Array]:
        """As `join`, without a space at the beginning that the tokenizer itself would have put there.

        `first`: nothing comes before these tokens.
        """
        spelled, ends = self.join(ids)
        puts_one = self.prefix == "always" or (first and self.prefix == "first")
        if puts_one and spelled[:1].tobytes() == b" " and (self.before_spaces or spelled[1:2].tobytes() != b" "):
            return spelled[1:], np.maximum(ends - 1, 0)
        return spelled, ends


def steps(component: Any) -> list[dict[str, Any]]:
    """The steps of a decoder, normalizer or pre-tokenizer in order, with nested sequences flattened."""
    return [] if component is None else _flattened(json.loads(component.__getstate__()))


def _flattened(step: dict[str, Any]) -> list[dict[str, Any]]:
    if step["type"] != "Sequence":
        return [step]
    inner = next(value for value in step.values() if isinstance(value, list))
    return [flat for part in inner for flat in _flattened(part)]


def _is_byte_level(backend: Any) -> bool:
    return any(step["type"] == "ByteLevel" for part in (backend.decoder, backend.pre_tokenizer) for step in steps(part))


def _speller(backend: Any, field: str) -> Callable[[str], bytes]:
    """From a token as the vocabulary writes it to its bytes, as the tokenizer's decoder has it."""
    if _is_byte_level(backend):
        return _from_byte_alphabet
    decoder = steps(backend.decoder)
    if not decoder:  # tokenizers puts a space between tokens then
        return lambda token: f" {token}".encode()
    known = {"Replace", "Metaspace", "ByteFallback", "WordPiece", "Fuse", "Strip"}
    for step in decoder:
        if step["type"] not in known or "Regex" in step.get("pattern", {}):
            raise UserError(
                f"{field}: the bytes of its tokens are unknown: its decoder has a step {step['type']}"
                f"{' with a regular expression' if step['type'] in known else ''}; choose a model whose tokenizer is "
                "byte-level BPE, SentencePiece (BPE or Unigram) or WordPiece"
            )
    return lambda token: _decoded(token, decoder)


def _decoded(token: str, decoder: Sequence[dict[str, Any]]) -> bytes:
    for step in decoder:
        if step["type"] == "Replace":
            token = token.replace(step["pattern"]["String"], step["content"])
        elif step["type"] == "Metaspace":
            token = token.replace(step["replacement"], " ")
        elif step["type"] == "WordPiece":
            token = token.removeprefix(step["prefix"]) if token.startswith(step["prefix"]) else f" {token}"
        elif step["type"] == "ByteFallback" and (byte := BYTE_TOKEN.fullmatch(token)):
            return bytes([int(byte[1], 16)])
    return token.encode()


def _prefix(backend: Any) -> tuple[Prefix, bool]:
    """Where the tokenizer puts a space that is not in the text, and whether it does before a space of the text's own."""
    decoder = steps(backend.decoder)
    for step in steps(backend.normalizer) + steps(backend.pre_tokenizer):
        if step["type"] == "Prepend":
            return "always", True
        if step["type"] == "Metaspace":
            return step["prepend_scheme"], False
        if step.get("add_prefix_space"):
            return "always", False
    if any(step["type"] == "WordPiece" for step in decoder) or not (decoder or _is_byte_level(backend)):
        return "always", True
    return ("first" if any(step["type"] == "Strip" and step["start"] for step in decoder) else "never"), True


def _byte_alphabet() -> dict[int, int]:
    """GPT-2's characters for bytes, as code point -> byte; characters below 256 that stand for none go out of range."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return dict.fromkeys(others, 0xFFFF) | {c: c for c in printable} | {256 + i: byte for i, byte in enumerate(others)}


ALPHABET = _byte_alphabet()


def _from_byte_alphabet(token: str) -> bytes:
    try:
        return token.translate(ALPHABET).encode("latin-1")
    except UnicodeEncodeError:  # a token that holds other characters stands for itself
        return token.encode()
