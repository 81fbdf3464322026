"""How many of a teacher's tokens stay as they are, whatever follows the text so far.

A chunk of a rollout is scored before the rest is known, so what is read of it must not change later. Two rules:

* Where the pre-tokenizer cuts text into words by a regular expression, all words but the last two stay: more text can merge
  the last two (`'` and `s`, or the white space before a line break), never three. Words that meet between two digits or
  two spaces are taken together, since some patterns group a number from its end.
* Where it does not (SentencePiece), merges and lattices know no words. But no token reaches over a place whose two
  characters stand side by side in no token of the vocabulary, so the two sides are tokenised independently of each other
  (exact for BPE and for Unigram's Viterbi path). All before the last such place stays.

Beside these, the last characters are open: a normalizer may compose them with what follows, and they may turn out to be the
beginning of an added token.
"""

import unicodedata
from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np

from opd.alignment.token_bytes import steps

COMPOSED_CHARS = 8  # normalizers compose base characters with their marks, syllables, and graphemes of at most 6 bytes


class Settling:
    """How one tokenizer's tokens settle."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        before = steps(backend.pre_tokenizer)
        self._has_words = any(step["type"] not in {"Metaspace", "ByteLevel"} or step.get("use_regex") for step in before)
        self._composes = any(not _is_local(step) for step in steps(backend.normalizer))
        literal = [token.content for token in backend.get_added_tokens_decoder().values() if not token.special]
        self._beginnings = {token[:k] for token in literal for k in range(1, len(token))}
        self._longest = max(map(len, self._beginnings), default=0)

    def count(self, encoding: Any, text: str) -> int:
        """The number of leading tokens of `encoding`, that of `text`, which no further text can change."""
        if not len(encoding):
            return 0
        limit = self._first_open_char(text)
        return self._by_words(encoding, text, limit) if self._has_words else self._by_pairs(encoding, limit)

    def _first_open_char(self, text: str) -> int:
        end = len(text)
        if self._composes:
            while end and unicodedata.combining(text[end - 1]):
                end -= 1
            end = max(end - COMPOSED_CHARS, 0)
        longest = next((k for k in range(self._longest, 0, -1) if text[-k:] in self._beginnings), 0)
        return min(end, len(text) - longest)

    def _by_words(self, encoding: Any, text: str, limit: int) -> int:
        words, spans = encoding.word_ids, encoding.offsets
        count, num_dropped = len(words), 0
        while count:
            start = spans[count][0] if count < len(words) else len(text)
            if num_dropped >= 2 and start <= limit and not _alike(text[start - 1 : start + 1]):
                break
            word = words[count - 1]
            while count and words[count - 1] == word:
                count -= 1
            num_dropped += 1
        return count

    def _by_pairs(self, encoding: Any, limit: int) -> int:
        if type(self._backend.model).__name__ not in {"BPE", "Unigram"}:
            return 0
        tokens = encoding.tokens
        for count in range(len(tokens) - 1, 0, -1):
            pair = tokens[count - 1][-1:] + tokens[count][:1]
            if pair not in self._pairs and encoding.token_to_chars(count)[0] <= limit:
                return count
        return 0

    @cached_property
    def _pairs(self) -> frozenset[str]:
        """Each two characters that stand side by side in a token."""
        vocab = self._backend.get_vocab(with_added_tokens=True)
        codes = np.frombuffer("\0".join(vocab).encode("utf-32-le"), np.uint32).astype(np.int64)
        found = np.unique(codes[:-1] << 21 | codes[1:])
        return frozenset(chr(pair >> 21) + chr(pair & 0x1FFFFF) for pair in found.tolist())


def _is_local(normalizer: dict[str, Any]) -> bool:
    """Whether it treats each character by itself."""
    if normalizer["type"] == "Replace":
        return len(normalizer["pattern"].get("String", "  ")) == 1
    return normalizer["type"] == "Prepend"


def _alike(pair: str) -> bool:
    tests: tuple[Callable[[str], bool], ...] = (str.isnumeric, str.isspace)
    return len(pair) == 2 and any(all(map(test, pair)) for test in tests)
