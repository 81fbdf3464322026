"""Prompts that say the same: against every pair compared in full."""

import random
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opd.data_free.duplicates import LONG, SHORT, exact_groups, near_groups
from opd.eval.overlap import problem_key, signed_words

WORDS = st.lists(st.sampled_from("abcdef"), min_size=1, max_size=30).map(" ".join)
STORY = "A train leaves the station at noon and travels north at sixty miles an hour while a second train, which left two "
STORY += (
    "hours earlier from a town ninety miles to the south, follows it at eighty miles an hour. When do they meet, and how "
)
STORY += "far is it? Explain your answer in full and name each of the steps that you take."


def similarity(first, second):
    """The larger Jaccard similarity of the ways in which these two are compared."""
    found = [0.0]
    words = [signed_words(text) for text in (first, second)]
    if len({tuple(word for word in one if not word.isalpha()) for one in words}) > 1:  # these texts have no other signs
        return 0.0
    if min(map(len, words)) >= LONG:
        found.append(jaccard(*({tuple(one[i : i + 5]) for i in range(len(one) - 4)} for one in words)))
    if max(map(len, words)) <= SHORT:
        padded = [f"{'':4}{' '.join(one)}{'':4}" for one in words]
        found.append(jaccard(*({one[i : i + 5] for i in range(len(one) - 4)} for one in padded)))
    return max(found)


def jaccard(first, second):
    return len(first & second) / len(first | second)


def by_hand(texts):
    groups, keys = {}, {}
    for place, text in enumerate(texts):
        leader = keys.get(problem_key(text))
        if leader is None:
            leader = next((other for other in groups if similarity(text, texts[other]) >= 0.8), place)
            keys[problem_key(text)] = leader
        groups.setdefault(leader, []).append(place)
    return [group for group in groups.values() if len(group) > 1]


@given(st.lists(WORDS, max_size=12), st.randoms(use_true_random=False))
def test_the_index_finds_what_comparing_all_finds(texts, rng):
    for _ in range(6 if texts else 0):  # near copies
        words = rng.choice(texts).split()
        words[rng.randrange(len(words))] = rng.choice("abcdefg")
        texts.insert(rng.randrange(len(texts) + 1), " ".join([*words, *rng.choice(["", "a"])]))
    assert near_groups(texts) == by_hand(texts)


def test_exact_ones_may_differ_in_white_space_alone():
    assert exact_groups(["2 + 3", "2 - 3", "2  +\n3", "2 - 3 ", "A", "a"]) == [[0, 2], [1, 3]]
    assert exact_groups([]) == near_groups([]) == []


def test_a_changed_word_in_a_long_text():
    assert near_groups([STORY, "another", STORY.replace("noon", "six")]) == [[0, 2]]
    assert near_groups([STORY, STORY.replace("noon", "six").replace("second", "last")]) == []  # 48 of 58, now 43 of 63
    assert near_groups([STORY, " ".join(reversed(STORY.split()))]) == []
    assert near_groups([STORY, STORY[: len(STORY) // 2]]) == []


@pytest.mark.parametrize(
    ("texts", "groups"),
    [
        ([f"{a}+{b}" for a in range(340, 350) for b in range(580, 590)], []),  # all different problems
        (["347+585", "347-585", "347 * 585"], []),
        (["347+585", " 347+585\n", "347 + 585"], [[0, 1, 2]]),
        (["What is 347+585?", "what is 347+585", "What is 347+586?"], [[0, 1]]),
        (["Compute the integral of sin(x) from 0 to pi.", "Compute the integral of sin(x) from 0 to pi"], [[0, 1]]),
        (["?", "!", "..."], []),
        (["求方程的所有实数解并证明你的结论", "求方程的所有整数解并证明你的结论"], []),
    ],
)
def test_short_texts_are_compared_by_characters(texts, groups):
    assert near_groups(texts) == groups


@pytest.mark.parametrize(
    ("text", "changed"),
    [
        ("What is the remainder when 347 is divided by 17?", "What is the remainder when 348 is divided by 17?"),
        (f"{STORY} At 3.5 miles?", f"{STORY} At 35 miles?"),
        (f"{STORY} At 1.500 miles?", f"{STORY} At 1:500 miles?"),
        (f"{STORY} At 12:30 or 12:40?", f"{STORY} At 12:40 or 12:30?"),
        (f"{STORY} Let y = 2x.", f"{STORY} Let y = 3x."),
        (f"{STORY} Let y = x².", f"{STORY} Let y = x³."),
    ],
)
def test_other_numbers_make_another_problem(text, changed):
    assert len(text) > 41
    assert near_groups([text, changed]) == []
    assert near_groups([text, f"{text} Go", changed, f"{changed} Go"]) == [[0, 1], [2, 3]]


def test_a_text_at_the_border_is_compared_both_ways():
    nine = "please compute the exact value of this definite integral"
    assert len(nine.split()) == LONG
    assert near_groups([nine, nine.removeprefix("please ").capitalize()]) == []  # by characters 47 of 67: too few
    assert near_groups([nine, f"{nine}s"]) == [[0, 1]]  # by words 4 of 6, by characters 55 of 61
    assert near_groups([f"{nine} now for me", nine]) == by_hand([f"{nine} now for me", nine])


def test_what_holds_of_the_first_texts_does_not_change():
    rng = random.Random(0)
    words = [f"w{letter}{other}" for letter in "abcde" for other in "stuvwxyz"]
    texts = [" ".join(rng.choices(words, k=30)) for _ in range(20)]
    for _ in range(60):
        words_of = rng.choice(texts).split()
        words_of[rng.randrange(30)] = "x"
        texts.append(" ".join(words_of))
    whole = near_groups(texts)
    assert len(whole) > 5
    for size in (1, 8, 25, 50):
        first = [kept for group in whole if len(kept := [place for place in group if place < size]) > 1]
        assert near_groups(texts[:size]) == first


def test_a_pool_of_one_text_with_other_names_or_numbers_takes_no_time():
    letters = "abcdefghijklmno"
    names = [a + b + c for a in letters for b in letters for c in letters][:3000]
    began = time.monotonic()
    assert [len(group) for group in near_groups([f"{STORY} {STORY} {name} {STORY}" for name in names])] == [3000]
    assert near_groups([f"{STORY} {STORY} {number} {STORY}" for number in range(3000)]) == []
    assert time.monotonic() - began < 20  # each with each would be minutes
