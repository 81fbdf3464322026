"""Token -> id maps decide whether two models speak the same ids."""

import pytest

from opd.alignment.vocabulary import SharedVocabulary, shared_vocabulary

COMMON = {"a": 0, "b": 1, "c": 2}


def test_equal_maps_share_everything():
    shared = shared_vocabulary(COMMON, dict(reversed(COMMON.items())))
    assert shared == SharedVocabulary(3, ())


@pytest.mark.parametrize("extra", [{"<tool>": 3}, {"<tool>": 3, "</tool>": 4}, {"<tool>": 7}])
def test_tokens_at_the_end_that_one_side_lacks_are_cut_off(extra):
    for student, teacher in ((COMMON, COMMON | extra), (COMMON | extra, COMMON)):
        shared = shared_vocabulary(student, teacher)
        assert shared == SharedVocabulary(min(extra.values()), tuple(extra))


def test_each_side_may_have_tokens_of_its_own_after_the_common_ones():
    shared = shared_vocabulary(COMMON | {"x": 3}, COMMON | {"y": 4})
    assert isinstance(shared, SharedVocabulary)
    assert shared.size == 3
    assert set(shared.dropped) == {"x", "y"}


@pytest.mark.parametrize(
    ("student", "teacher", "first", "ours", "theirs"),
    [
        (COMMON, {"a": 0, "c": 1, "b": 2}, 1, "b", "c"),  # as many tokens, in another order
        (COMMON, {"a": 0, "B": 1, "c": 2}, 1, "b", "B"),
        (COMMON | {"x": 3}, COMMON | {"y": 3}, 3, "x", "y"),
        (COMMON, {"z": 0, "a": 1, "b": 2, "c": 3}, 0, "a", "z"),
        ({"a": 0, "c": 2}, COMMON, 1, None, "b"),  # a hole: both go on
        (COMMON, {"a": 0, "c": 2}, 1, "b", None),
    ],
)
def test_the_first_disagreement_is_named(student, teacher, first, ours, theirs):
    assert shared_vocabulary(student, teacher) == f"id {first} is {ours!r} to the one and {theirs!r} to the other"


def test_equal_sizes_are_not_equal_vocabularies():
    assert isinstance(shared_vocabulary({"a": 0, "b": 1}, {"b": 0, "a": 1}), str)
