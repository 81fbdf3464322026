"""Which answers to one problem are the same answer: the classes that majority voting counts."""

import re
from collections.abc import Callable, Iterable, Sequence
from itertools import combinations

from opd.eval.answers.equality import same_value
from opd.eval.answers.notation import normalise

Comparison = tuple[str, tuple[str, ...]]
_WHOLE = re.compile(r"-?[1-9]\d*|0")
CORRECT = ""  # the key of correct answers; no other answer has an empty text


def vote_classes(
    extracted: Sequence[Sequence[str | None]],
    verdicts: Sequence[Sequence[str]],
    compare: Callable[[list[Comparison]], list[bool | None]],
) -> list[list[int | None]]:
    """For each problem the class of each of its answers, numbered as they first appear; None where there is no answer.

    Correct answers are one class, except that one which was not found in its response does not vote either: a verifier may
    see what extraction does not, in right and wrong responses alike. Others are grouped by text, then by value; the pairs
    that need algebra go to `compare` in one call, and those it cannot decide are different. An answer whose grading ran out
    of time is grouped by text alone.
    """
    # An answer's key is its normal text, `written` is how one of those with this key was written.
    keys = [[_key(*pair) for pair in zip(*row, strict=True)] for row in zip(extracted, verdicts, strict=True)]
    written: dict[str, str] = {}
    for row in zip(keys, extracted):
        for key, answer in zip(*row):
            if key and answer:
                written.setdefault(key, answer)
    groups: list[dict[str, str]] = []  # of each problem: a key to the first key of its class
    open_pairs: list[tuple[int, str, str]] = []
    for number, row in enumerate(keys):
        late = {key for key, verdict in zip(row, verdicts[number]) if verdict == "timeout"}
        group = {key: key for key in row if key is not None}
        groups.append(group)
        for first, second in _comparable(key for key in group if key != CORRECT and key not in late):
            first, second = sorted((first, second), key=lambda key: "=" not in key)  # `m + n = 34` is 34 on the left only
            same = same_value(written[first], written[second])
            if same:
                _merge(group, first, second)
            elif same is None:
                open_pairs.append((number, first, second))
    tasks = [(written[first], (written[second],)) for _, first, second in open_pairs]
    for (number, first, second), same in zip(open_pairs, compare(tasks), strict=True):
        if same:
            _merge(groups[number], first, second)
    return [_numbered(row, group) for row, group in zip(keys, groups, strict=True)]


def _key(answer: str | None, verdict: str) -> str | None:
    if answer is None:
        return None
    return CORRECT if verdict == "correct" else normalise(answer) or answer


def _comparable(keys: Iterable[str]) -> list[tuple[str, str]]:
    """The pairs worth comparing: whole numbers without leading zeros are the same only as text."""
    listed = list(keys)
    whole = {key for key in listed if _WHOLE.fullmatch(key)}
    return [pair for pair in combinations(listed, 2) if not whole.issuperset(pair)]


def _merge(group: dict[str, str], first: str, second: str) -> None:
    old, new = group[second], group[first]
    for key, head in group.items():
        if head == old:
            group[key] = new


def _numbered(row: Sequence[str | None], group: dict[str, str]) -> list[int | None]:
    numbers: dict[str, int] = {}
    return [None if key is None else numbers.setdefault(group[key], len(numbers)) for key in row]
