"""The student's likely tokens of a rollout, and what a teacher is asked about them."""

from dataclasses import replace

import numpy as np
import pytest

from opd.strategies.likely import ids_to_ask, likely_ids


def test_of_reused_turns_nobody_knows_them(random_episode):
    rollout = random_episode(0, 4, (2, 1), (2, 1), (1, 0), reused=1)
    first, second, third = rollout.turns
    known = np.arange(3, 15, dtype=np.int32).reshape(3, 4)
    turns = (first, replace(second, topk_ids=known[:2]), replace(third, topk_ids=known[2:]))
    expected = [[0, 0, 0]] * 2 + known[:, :3].tolist()
    assert likely_ids(replace(rollout, turns=turns), 3).tolist() == expected
    other = replace(first, topk_ids=np.ones((2, 1), np.int32))  # sampled for a run that wanted fewer
    assert likely_ids(replace(rollout, turns=(other, *turns[1:])), 3).tolist() == expected
    assert likely_ids(replace(rollout, turns=turns), 9).shape == (5, 4)  # a vocabulary of no more
    with pytest.raises(AssertionError, match="was not asked"):
        likely_ids(replace(rollout, turns=(*turns[:2], third)), 3)


def test_elsewhere_the_token_itself_is_asked_about():
    tokens, wanted = np.array([7, 8, 9, 10], np.int32), np.array([[1, -1], [2, 3]], np.int32)
    asked = ids_to_ask(tokens, np.array([0, 2]), wanted)
    assert (asked.dtype, asked.tolist()) == (np.int32, [[1, 7], [8, 8], [2, 3], [10, 10]])
