"""Prompts that say the same, exactly or nearly: a Jaccard similarity of 5-grams >= 0.8 (Lee et al., arXiv 2107.06499).

Texts with other numbers are other problems, however alike. The first of each group stands for it, and a text is compared
with these alone. So what holds of the first rows of a pool does not change when rows follow them.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from fractions import Fraction

from opd.eval.overlap import problem_key, signed_words

SIMILARITY = Fraction(4, 5)
GRAM = 5
LONG, SHORT = 9, 12  # texts of 9 words or more are compared by words, of 12 or fewer by characters, between them by both


def exact_groups(texts: Sequence[str]) -> list[list[int]]:
    """The places of texts that are equal but for white space, in groups of two or more, in the order of the first."""
    groups: dict[str, list[int]] = defaultdict(list)
    for place, text in enumerate(texts):
        groups[problem_key(text)].append(place)
    return [group for group in groups.values() if len(group) > 1]


def near_groups(texts: Sequence[str]) -> list[list[int]]:
    """The places of texts that say nearly the same as the first of their group, equal ones included; else as `exact_groups`.

    Two texts do if they have the same numbers in the same order and share four fifths of their distinct 5-grams, of words
    with the signs between them; a text of few words has few of these, so that short ones are compared by characters.
    """
    places: dict[str, list[int]] = defaultdict(list)
    for place, text in enumerate(texts):
        places[problem_key(text)].append(place)
    alike: dict[tuple[str, ...], list[list[int]]] = defaultdict(list)  # by their numbers
    for group in places.values():
        alike[_numbers(texts[group[0]])].append(group)
    groups: dict[int, list[int]] = defaultdict(list)
    for found in alike.values():
        for group, leader in zip(found, _leaders([texts[group[0]] for group in found])):
            groups[found[leader][0]].extend(group)
    return [sorted(groups[first]) for first in sorted(groups) if len(groups[first]) > 1]


def _numbers(text: str) -> tuple[str, ...]:
    """What holds a digit, in order, with the points and colons between digits: 2x, 3 . 5."""
    return tuple(word for word in signed_words(text) if word in ".,:" or any(map(str.isdigit, word)))


def _leaders(texts: Sequence[str]) -> list[int]:
    """For each text the first one that stands for it: itself, or an earlier one that is nearly the same."""
    by_words, by_characters = [], []
    for text in texts:
        words = signed_words(text)
        by_words.append(_grams(words) if len(words) >= LONG else frozenset())
        edge = " " * (GRAM - 1)  # the first and the last character are in as many grams as the others
        short = f"{edge}{' '.join(words or text.split())}{edge}"
        by_characters.append(_grams(short) if len(words) <= SHORT else frozenset())
    indices = [_Index(by_words), _Index(by_characters)]
    leaders = []
    for place in range(len(texts)):
        found = [leader for index in indices if (leader := index.first_similar(place)) is not None]
        leaders.append(min(found, default=place))
        if not found:
            for index in indices:
                index.add(place)
    return leaders


def _grams(units: Sequence[str]) -> frozenset[str]:
    joint = "" if isinstance(units, str) else " "
    return frozenset(joint.join(units[start : start + GRAM]) for start in range(len(units) - GRAM + 1))


class _Index:
    """Which of some sets of grams is similar to a given one: exact, by prefix filtering (Bayardo et al., WWW 2007).

    Two sets A and B with a Jaccard similarity of s or more have one of their rarest grams in common, of the
    |A| - ceil(s |A|) + 1 rarest of each: only these are looked up.
    """

    def __init__(self, sets: Sequence[Iterable[str]]) -> None:
        frequency = Counter(gram for grams in sets for gram in grams)
        ranks = {gram: rank for rank, (gram, _) in enumerate(reversed(frequency.most_common()))}  # any order is exact
        self._sets = [frozenset(ranks[gram] for gram in grams) for grams in sets]
        self._holders: dict[int, list[int]] = defaultdict(list)

    def first_similar(self, place: int) -> int | None:
        """The first added set that is similar to the one at `place`."""
        mine = self._sets[place]
        seen: set[int] = set()
        for gram in self._rarest(place):
            seen.update(self._holders.get(gram, ()))
        return next((other for other in sorted(seen) if _similar(mine, self._sets[other])), None)

    def add(self, place: int) -> None:
        for gram in self._rarest(place):
            self._holders[gram].append(place)

    def _rarest(self, place: int) -> list[int]:
        grams = self._sets[place]
        least = -(-len(grams) * SIMILARITY.numerator // SIMILARITY.denominator)
        return sorted(grams)[: len(grams) - least + 1] if grams else []


def _similar(first: frozenset[int], second: frozenset[int]) -> bool:
    small, large = sorted((len(first), len(second)))
    times, out_of = SIMILARITY.numerator, SIMILARITY.denominator
    if small * out_of < times * large:
        return False
    shared = len(first & second)
    return shared * out_of >= times * (small + large - shared)
