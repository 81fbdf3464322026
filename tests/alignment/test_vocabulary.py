"""Token -> id maps decide whether two models speak the same ids."""

import pytest

from opd.alignment.vocabulary import shared_vocabulary
from opd.errors import UserError

COMMON = {"a": 0, "b": 1, "c": 2}


def test_equal_maps_share_everything():
    shared = shared_vocabulary(COMMON, dict(reversed(COMMON.items())), "teachers.t.model")
    assert (shared.size, shared.dropped) == (3, ())


@pytest.mark.parametrize("extra", [{"<tool>": 3}, {"<tool>": 3, "</tool>": 4}, {"<tool>": 7}])
def test_tokens_at_the_end_that_one_side_lacks_are_cut_off(extra):
    for student, teacher in ((COMMON, COMMON | extra), (COMMON | extra, COMMON)):
        shared = shared_vocabulary(student, teacher, "teachers.t.model")
        assert shared.size == min(extra.values())
        assert shared.dropped == tuple(extra)


def test_each_side_may_have_tokens_of_its_own_after_the_common_ones():
    shared = shared_vocabulary(COMMON | {"x": 3}, COMMON | {"y": 4}, "teachers.t.model")
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
    with pytest.raises(UserError) as error:
        shared_vocabulary(student, teacher, "teachers.maths.model")
    message = str(error.value)
    assert message.startswith("teachers.maths.model: the tokenizers differ:")
    assert f"id {first} is {ours!r} to the student and {theirs!r} to the teacher" in message
    assert "\n" not in message


def test_equal_sizes_are_not_equal_vocabularies():
    with pytest.raises(UserError):
        shared_vocabulary({"a": 0, "b": 1}, {"b": 0, "a": 1}, "teachers.t.model")
