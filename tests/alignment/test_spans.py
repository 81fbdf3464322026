"""Placing teacher tokens on bytes and cutting, on cases written out by hand."""

import numpy as np
import pytest

from opd.alignment.spans import place_by_offsets, place_exact, refine


def by_offsets(text: str, *tokens: tuple[str, int, int]):
    """Teacher tokens (what they spell, first character, end) on a text."""
    written = np.frombuffer(text.encode(), np.uint8)
    starts = np.cumsum([0, *(len(character.encode()) for character in text)])
    spelled = [token.encode() for token, _, _ in tokens]
    spans = np.array([span for _, *span in tokens]).reshape(-1, 2)
    ends = np.cumsum([len(piece) for piece in spelled], dtype=np.int64)
    return place_by_offsets(written, starts, spans, np.frombuffer(b"".join(spelled), np.uint8), ends)


def cut(sizes: list[int], placed):
    """Units as (student end, teacher end, bytes, aligned)."""
    units = refine(np.cumsum(sizes), placed)
    return list(zip(*(values.tolist() for values in vars(units).values())))


def test_common_ends_are_cuts():
    assert cut([2, 1, 3], place_exact(np.array([1, 3, 6]), 6)) == [(2, 2, 3, True), (3, 3, 3, True)]
    assert cut([1, 1], place_exact(np.array([2]), 2)) == [(2, 1, 2, True)]


def test_tokens_without_bytes_go_with_the_next():
    placed = place_exact(np.array([0, 2, 2, 4, 4]), 4)
    assert cut([2, 0, 2, 0], placed) == [(1, 2, 2, True), (3, 5, 2, True), (4, 5, 0, False)]


@pytest.mark.parametrize("placed", [place_exact(np.array([0, 2]), 2), by_offsets("ab", (" ", 0, 0), ("ab", 0, 2))])
def test_the_spaces_that_both_put_before_a_text_are_a_unit(placed):
    assert cut([0, 2], placed) == [(1, 1, 0, True), (2, 2, 2, True)]
    assert cut([2], placed) == [(1, 2, 2, True)]


def test_bytes_that_the_teacher_was_not_shown_are_not_aligned():
    assert cut([2, 1], place_exact(np.array([2]), 3)) == [(1, 1, 2, True), (2, 1, 1, False)]
    assert cut([3], place_exact(np.array([2]), 3)) == [(1, 1, 3, False)]
    assert cut([3], place_exact(np.zeros(0, np.int64), 3)) == [(1, 0, 3, False)]


def test_a_gap_that_the_tokens_spell_is_theirs():
    placed = by_offsets("a fox", ("a", 0, 1), (" fox", 2, 5))
    assert cut([1, 4], placed) == [(1, 1, 1, True), (2, 2, 4, True)]
    assert cut([1, 1, 3], placed) == [(1, 1, 1, True), (3, 2, 4, True)]


def test_a_gap_that_they_do_not_spell_is_not_aligned():
    placed = by_offsets("a\nfox!", ("a", 0, 1), (" fox", 2, 5), (" !", 5, 6))
    assert cut([1, 1, 3, 1], placed) == [(1, 1, 1, True), (2, 1, 1, False), (3, 2, 3, True), (4, 3, 1, True)]
    assert cut([1, 4, 1], placed) == [(1, 1, 1, True), (2, 2, 4, False), (3, 3, 1, True)]


def test_what_is_spelled_otherwise_is_not_aligned_and_what_follows_is():
    placed = by_offsets("e\u0301 Fox", ("é", 0, 2), (" f", 2, 4), ("ox", 4, 6))
    assert cut([1, 2, 2, 2], placed) == [(2, 1, 3, False), (3, 2, 2, False), (4, 3, 2, True)]


@pytest.mark.parametrize("inner", [True, False])
def test_tokens_of_one_character_are_placed_inside_of_it(inner):
    written, spelled = np.frombuffer("é!".encode(), np.uint8), np.frombuffer("é!".encode(), np.uint8)
    spans = np.array([[0, 1], [0, 1], [1, 2]])
    placed = place_by_offsets(written, np.array([0, 2, 3]), spans, spelled, np.array([1, 2, 3]))
    expected = [(1, 1, 1, True), (2, 2, 1, True), (3, 3, 1, True)] if inner else [(1, 2, 2, True), (2, 3, 1, True)]
    assert cut([1, 1, 1] if inner else [2, 1], placed) == expected


def test_an_inserted_token_spoils_its_unit_alone():
    placed = by_offsets("ab", ("a", 0, 1), ("~", 1, 1), ("b", 1, 2))
    assert cut([1, 1], placed) == [(1, 1, 1, True), (2, 3, 1, False)]


def test_crossing_characters_are_one_group():
    placed = by_offsets("abc", ("b", 1, 2), ("a", 0, 1), ("c", 2, 3))
    assert cut([1, 1, 1], placed) == [(2, 2, 2, False), (3, 3, 1, True)]
