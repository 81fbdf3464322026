"""A rollout as the sequences that models read: every trainable token once, and nothing read twice that need not be."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opd.passages import passages, spread
from opd.records import Prompt, Rollout, Turn

SIZES = [(3, 2), (2, 4), (4, 0)]


def check(rollout: Rollout) -> None:
    """What must hold of any rollout."""
    found = passages(rollout)
    sampled = np.concatenate([turn.sampled_ids for turn in rollout.turns])
    rows = np.concatenate([np.zeros(0, int), *(passage.rows for passage in found)])
    assert rows.tolist() == np.flatnonzero(rollout.trainable).tolist()
    for passage in found:
        assert passage.at[0] == 0
        assert (np.diff(passage.at) > 0).all()
        assert passage.token_ids[passage.at].tolist() == sampled[passage.rows].tolist()
    before = np.cumsum([0, *(len(turn.sampled_ids) for turn in rollout.turns)])
    for turn, start in zip(rollout.turns, before):  # each token stands after exactly what the student saw
        for place in range(turn.num_reused, len(turn.sampled_ids)):
            passage = next(one for one in found if start + place in one.rows)
            at = passage.at[passage.rows.tolist().index(start + place)]
            seen = np.concatenate([passage.context_ids, passage.token_ids[:at]])
            assert seen.tolist() == [*turn.context_ids.tolist(), *turn.sampled_ids[:place].tolist()]


def test_turns_that_continue_one_another_are_one_passage(random_episode):
    rollout = random_episode(0, 5, *SIZES)
    (passage,) = passages(rollout)
    assert passage.context_ids.tolist() == rollout.turns[0].context_ids.tolist()
    assert passage.at.tolist() == [0, 1, 2, 5, 6, 11, 12, 13, 14]
    assert passage.rows.tolist() == list(range(9))
    check(rollout)


def test_a_conversation_rendered_anew_is_a_passage_a_turn(random_episode):
    rollout = random_episode(0, 5, *SIZES, rerender=True)
    assert [len(passage.rows) for passage in passages(rollout)] == [3, 2, 4]
    check(rollout)


def test_reused_turns_are_the_context(random_episode):
    rollout = random_episode(0, 5, *SIZES, reused=2)
    (passage,) = passages(rollout)
    assert passage.context_ids.tolist() == rollout.turns[2].context_ids.tolist()
    assert passage.token_ids.tolist() == rollout.turns[2].sampled_ids.tolist()
    assert passage.rows.tolist() == [5, 6, 7, 8]
    check(rollout)
    check(random_episode(0, 5, *SIZES, reused=2, rerender=True))


def test_a_single_answer_is_its_turn_and_a_reused_beginning_its_context(random_rollout):
    plain = random_rollout(0, (4, 6))
    (passage,) = passages(plain)
    (turn,) = plain.turns
    assert (passage.context_ids.tolist(), passage.token_ids.tolist()) == (
        turn.context_ids.tolist(),
        turn.sampled_ids.tolist(),
    )
    reused = random_rollout(0, (4, 6), num_reused=2)
    (passage,) = passages(reused)
    assert passage.context_ids.tolist() == [*turn.context_ids, *turn.sampled_ids[:2]]
    assert passage.rows.tolist() == [2, 3, 4, 5]


def test_nothing_to_train_has_no_passage(random_episode, random_rollout):
    assert passages(random_episode(0, 5, *SIZES, reused=3)) == ()
    assert passages(random_rollout(0, (4, 0))) == ()
    assert passages(Rollout(Prompt(id="0"), 0, ())) == ()


def test_a_later_turn_that_reads_otherwise_begins_another_passage(random_episode):
    rollout = random_episode(0, 5, *SIZES)
    second = rollout.turns[1]
    for other in (second.context_ids[:-5], np.append(second.context_ids[1:], 3), np.append(3, second.context_ids[1:])):
        changed = replace(rollout, turns=(rollout.turns[0], replace(second, context_ids=other.astype(np.int32))))
        assert len(passages(changed)) == 2
        check(changed)


def test_values_are_spread_over_all_sampled_tokens(random_episode):
    rollout = random_episode(0, 5, *SIZES, reused=1, rerender=True)
    parts = [np.full((len(one.rows), 2), 1.0 + number, np.float32) for number, one in enumerate(passages(rollout))]
    whole = spread(rollout, parts)
    assert (whole.dtype, whole[:, 0].tolist()) == (np.float32, [0, 0, 0, 1, 1, 2, 2, 2, 2])
    with pytest.raises(AssertionError):
        spread(rollout, parts[:1])


@given(st.data())
@settings(max_examples=60, deadline=None, derandomize=True, database=None)
def test_any_rollout(data):
    """Few different ids, so that turns continue one another by chance, too."""
    ids = st.lists(st.integers(0, 1), max_size=4).map(lambda values: np.array(values, np.int32))
    turns: list[Turn] = []
    for _ in range(data.draw(st.integers(1, 4))):
        context, sampled = data.draw(ids), data.draw(ids)
        if turns and data.draw(st.booleans()):
            context = np.concatenate([turns[-1].context_ids, turns[-1].sampled_ids, context])
        num_reused = data.draw(st.integers(0, len(sampled)))
        turns.append(Turn(context, sampled, np.zeros(len(sampled), np.float32), "eos", num_reused=num_reused))
    check(Rollout(Prompt(id="0"), 0, tuple(turns)))
