"""How many of a teacher's tokens stay as they are, whatever follows the text so far.

A chunk of a rollout is scored before the rest is known, so what is read of it must not change later. Two rules:

* Where the pre-tokenizer cuts text into words by a regular expression, all words but the last two stay: more text can merge
  the last two (`'` and `s`, or the white space before a line break), never three. Words that meet between two digits or
  two spaces are taken together, since some patterns group a number from its end.
* Where it does not (SentencePiece, at most with a split at single characters), merges and lattices know no words. But no
  token reaches over a place whose two characters stand side by side in no token of the vocabulary, so the two sides are
  tokenised independently of each other (exact for BPE and for Unigram's Viterbi path). All before the last such place stays.

A turn that grows is taken up again at a *joint*: a place that tokens do not reach over and whose two sides are cut into
words independently.

Beside these, the last characters are open: a normalizer may compose them with what follows, and they may turn out to be the
beginning of an added token.
"""

import unicodedata
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from opd.alignment.token_bytes import steps

COMPOSED_CHARS = 8  # normalizers compose base characters with their marks, syllables, and graphemes of at most 6 bytes

SAMPLE = "So it's 12 + 345 = 357, isn't it?\n\tThat's all; go on"


class Settling:
    """How one tokenizer's tokens settle."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        model = type(backend.model).__name__
        self._has_words = model not in {"BPE", "Unigram"} or _cuts_words(backend)
        self._adds_up = model == "Unigram"  # scores, whose rounding depends on what precedes in the same word
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

    def joints(self, encoding: Any, text: str, counts: Sequence[int]) -> list[bool]:
        """For each of `counts` [k]: are the tokens from there on those of the text from there on, if some text precedes it?

        Only there may a text be taken up again. `encoding` is that of `text` and has more tokens than each count, which is
        not 0.
        """
        ids = encoding.ids
        return [self._is_joint(encoding, ids, text, count) for count in counts]

    def _is_joint(self, encoding: Any, ids: Sequence[int], text: str, count: int) -> bool:
        before, start = encoding.token_to_chars(count - 1)[1], encoding.token_to_chars(count)[0]
        if before > start:  # pieces of one character
            return False
        starts_word = encoding.token_to_word(count - 1) != encoding.token_to_word(count)
        if self._has_words:
            return starts_word and not _alike(text[start - 1 : start + 1])
        return starts_word or not (self._adds_up or self._pair(ids, count) in self._pairs)

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
        ids = encoding.ids
        for count in range(len(ids) - 1, 0, -1):
            if self._pair(ids, count) not in self._pairs and encoding.token_to_chars(count)[0] <= limit:
                return count
        return 0

    def _pair(self, ids: Sequence[int], count: int) -> str:
        """The two characters at the place between two tokens."""
        return self._backend.id_to_token(ids[count - 1])[-1:] + self._backend.id_to_token(ids[count])[:1]

    @cached_property
    def _pairs(self) -> frozenset[str]:
        """Each two characters that stand side by side in a token."""
        vocab = self._backend.get_vocab(with_added_tokens=True)
        codes = np.frombuffer("\0".join(vocab).encode("utf-32-le"), np.uint32).astype(np.int64)
        found = np.unique(codes[:-1] << 21 | codes[1:])
        return frozenset(chr(pair >> 21) + chr(pair & 0x1FFFFF) for pair in found.tolist())


def _cuts_words(backend: Any) -> bool:
    """Whether its pre-tokenizer has a pattern of words that finds some.

    A split at single characters changes nothing for the second rule; one at spaces (Gemma) finds none once the normalizer
    has replaced them.
    """
    if all(_splits_at_characters(step) for step in steps(backend.pre_tokenizer)):
        return False
    sample = SAMPLE if backend.normalizer is None else backend.normalizer.normalize_str(SAMPLE)
    return len(backend.pre_tokenizer.pre_tokenize_str(sample)) > 1


def _splits_at_characters(pre_tokenizer: dict[str, Any]) -> bool:
    if pre_tokenizer["type"] == "Split":
        return len(pre_tokenizer["pattern"].get("String", "  ")) == 1
    if pre_tokenizer["type"] == "ByteLevel":
        return not pre_tokenizer["use_regex"]
    return pre_tokenizer["type"] in {"Metaspace", "Digits", "Punctuation", "WhitespaceSplit", "CharDelimiterSplit"}


def _is_local(normalizer: dict[str, Any]) -> bool:
    """Whether it treats each character by itself."""
    if normalizer["type"] == "Replace":
        return len(normalizer["pattern"].get("String", "  ")) == 1
    return normalizer["type"] == "Prepend"


def _alike(pair: str) -> bool:
    tests: tuple[Callable[[str], bool], ...] = (str.isnumeric, str.isspace)
    return len(pair) == 2 and any(all(map(test, pair)) for test in tests)
