"""Do two models mean the same by the same ids? Token -> id maps decide, never sizes."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class SharedVocabulary:
    """Two vocabularies that agree on the ids below `size`."""

    size: int  # ids in use; output rows from here on are padding, or tokens that one side lacks
    dropped: tuple[str, ...] = ()  # tokens with higher ids that one side lacks: never sampled, never scored


def shared_vocabulary(student: Mapping[str, int], teacher: Mapping[str, int]) -> SharedVocabulary | str:
    """The ids that student and teacher share, or the first disagreement where the maps differ.

    Equal maps share all. Where one has more tokens at the end (a newer release's special tokens), both are cut to the
    common part.
    """
    if student == teacher:
        return SharedVocabulary(max(student.values()) + 1)
    by_id = {index: token for token, index in student.items()}
    other = {index: token for token, index in teacher.items()}
    differing = sorted(index for index in by_id.keys() | other.keys() if by_id.get(index) != other.get(index))
    first = differing[0]
    extra = [token for index in differing for token in (by_id.get(index), other.get(index)) if token is not None]
    if (by_id.get(first) is not None and other.get(first) is not None) or _shares_later(by_id, other, first):
        return f"id {first} is {by_id.get(first)!r} to the one and {other.get(first)!r} to the other"
    return SharedVocabulary(first, tuple(extra))


def _shares_later(by_id: Mapping[int, str], other: Mapping[int, str], first: int) -> bool:
    """Whether one side has a hole at `first`: both go on with higher ids, so cutting there would lose shared tokens."""
    return any(index > first and index in other for index in by_id)
