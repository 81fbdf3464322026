"""Do training prompts contain the problems of a suite? And which problems are the same?

The convention of GPT-3 (Brown et al., arXiv 2005.14165, appendix C) and of lm-eval's decontamination: 13 words in a row.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Any

GRAM = 13  # words
COMMON = 10  # distinct training prompts; a gram in more of them is a phrase of the genre, not a problem
COPY = 0.5  # of a problem's grams in one prompt
NUM_EXAMPLES = 5
_CJK = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff"  # written without spaces: each character is a word
_WORD = re.compile(f"[{_CJK}]|[^\\W_{_CJK}]+")
# Signs that make another problem of the same words: no punctuation and no LaTeX, but points and colons within numbers.
_SIGN = r"(?<=\d)[.,:](?=\d)|(?<=[\d)])!|[^\w\s\\$.,:;?!'\"“”‘’…。，？！；：、]"
_SIGNED = re.compile(f"{_WORD.pattern}|{_SIGN}")
_DELIMITER = re.compile(r"\\(?:[()\[\]]|left\b|right\b)|\{(?=\\?\w+\})|(?<=\w)\}")  # of LaTeX; braces around one word


def problem_key(text: str) -> str:
    """32 hex digits that identify a problem: the digest (BLAKE2b-16) of its text, with each run of white space one space.

    Nothing else is normalised, since "2 + 3" and "2 - 3" are different problems.
    """
    return blake2b(" ".join(text.split()).encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def overlap(training: Iterable[str], problems: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """Which problems, given as (id, text), share 13 consecutive words with a training prompt.

    Words are runs of letters or digits in lower case; punctuation and LaTeX's signs do not count. A problem of fewer words
    overlaps if all of it occurs in a prompt, signs such as + and - included. Grams in more than 10 distinct training prompts
    are ignored ("where m and n are relatively prime positive integers find m n" is no contamination), so an instruction
    around prompts does not count. Rarer phrases still do: `num_copies` are the problems of which one prompt holds at least
    half of all 13-word stretches, which is hardly chance; these count however many prompts hold them. A rewritten or
    translated problem is not found.

    Returns num_problems, num_overlapping, share (0 without problems), num_copies, num_training, ids of the overlapping
    problems, and up to 5 examples, the most copied first: id, the shared text, and `copied`, the share held by one prompt.
    """
    grams, short = _index(problems)
    sizes = Counter(index for found in grams.values() for index in found)
    counts: Counter[str] = Counter()
    copied: Counter[int] = Counter()  # problem -> the most of its grams that one prompt holds
    num_training, seen = 0, set()
    for text in training:
        num_training += 1
        key = problem_key(text)
        if key not in seen:  # repeated prompts are one
            seen.add(key)
            shared = _shared(text, grams, short)
            counts.update(shared)
            copied |= Counter(index for gram in shared for index in grams[gram])
    shares = {index: most / sizes[index] for index, most in sorted(copied.items())}
    found: dict[int, str] = {}
    for gram, indices in grams.items():
        for index in indices:
            if counts[gram] and (counts[gram] <= COMMON or shares[index] >= COPY):
                found.setdefault(index, gram)
    shares = {index: share for index, share in shares.items() if index in found}
    shown = sorted(shares, key=lambda index: -shares[index])[:NUM_EXAMPLES]
    return {
        "num_problems": len(problems),
        "num_overlapping": len(found),
        "share": len(found) / max(1, len(problems)),
        "num_copies": sum(share >= COPY for share in shares.values()),
        "num_training": num_training,
        "ids": [problems[index][0] for index in shares],
        "examples": [{"id": problems[i][0], "text": found[i], "copied": round(shares[i], 3)} for i in shown],
    }


def sharing(training: Sequence[str], problems: Sequence[tuple[str, str]]) -> list[list[str]]:
    """For each training prompt the ids of the problems with which it shares 13 words, or which it holds if they are shorter.

    Unlike in `overlap`, phrases of the genre count too: what is said of a prompt does not depend on the others.
    """
    grams, short = _index(problems)
    shared = ({index for gram in _shared(text, grams, short) for index in grams[gram]} for text in training)
    return [[problems[index][0] for index in sorted(indices)] for indices in shared]


def _index(problems: Sequence[tuple[str, str]]) -> tuple[dict[str, list[int]], dict[str, dict[str, int]]]:
    """The problems that have each gram; and by first word, the problems too short for one, with their number of words.

    The words of short problems are those of `signed_words`.
    """
    grams: dict[str, list[int]] = defaultdict(list)
    short: dict[str, dict[str, int]] = defaultdict(dict)
    for index, (_, text) in enumerate(problems):
        words = _words(text)
        if 0 < len(words) < GRAM:
            words = signed_words(text)
            whole = " ".join(words)
            short[words[0]][whole] = len(words)
            grams[whole].append(index)
            continue
        for gram in dict.fromkeys(" ".join(words[i : i + GRAM]) for i in range(len(words) - GRAM + 1)):
            grams[gram].append(index)
    return grams, short


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def signed_words(text: str) -> list[str]:
    """Words in lower case and the signs between them: "12+7=" is not "12 - 7 ="."""
    return _SIGNED.findall(_DELIMITER.sub(" ", text.lower()))


def _shared(text: str, grams: dict[str, list[int]], short: dict[str, dict[str, int]]) -> set[str]:
    """The suite's grams that occur in one training prompt."""
    words = _words(text)
    shared = {gram for i in range(len(words) - GRAM + 1) if (gram := " ".join(words[i : i + GRAM])) in grams}
    signed = signed_words(text) if short else []
    for i, word in enumerate(signed):
        if word in short:
            shared |= {whole for whole, num in short[word].items() if " ".join(signed[i : i + num]) == whole}
    return shared
