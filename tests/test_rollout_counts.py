"""A step's rollouts, counted."""

from dataclasses import replace

import numpy as np
import pytest

from opd.episodes import EnvironmentTask
from opd.records import Finish, Prompt, Rollout, Term, Turn
from opd.rollout_counts import MOST_UNITS, FullLength, counts_of, figures_of

EPISODE = Prompt(id="e", task=EnvironmentTask("calculator", {}, 0))


def turn(tokens, finish: Finish = "eos", reused=0, discarded=0, version=0):
    ids = np.arange(tokens, dtype=np.int32)
    logps = np.zeros(tokens, np.float32)
    return Turn(ids, ids, logps, finish, num_reused=reused, num_discarded=discarded, versions=((0, version),))


def taught(rollout):
    return rollout, [Term("policy_gradient", mask=rollout.trainable, inputs={})]


def episode(*turns, **settings):
    return taught(Rollout(EPISODE, 0, turns, **settings))


def answer(one, **settings):
    return taught(Rollout(Prompt(id="p"), 0, (one,), **settings))


def test_reused_tokens_were_sampled_at_another_step():
    rows = [episode(turn(4, reused=4), turn(3), turn(2, "stopped", discarded=5, version=6), restart="restored")]
    counts = counts_of(8, rows, 16)
    figures = figures_of(counts, steered=True)
    assert (counts["sampled_tokens"], counts["trained_tokens"], counts["reused_tokens"]) == (5, 5, 4)
    assert counts["staleness"] == 3 * 7 + 2 * 1  # of the new tokens only
    assert (figures["restart_units"], figures["discarded_tokens"], figures["stopped_rate"]) == (1, 5, 1)
    assert figures["stops/3"] == 1
    assert figures["trained_share/2"] == pytest.approx(3 / 5)
    assert figures["trained_share/3"] == pytest.approx(2 / 5)
    assert figures.get("trained_share/1", 0) == 0
    assert figures["turns"] == 3


def test_answers_are_counted_by_chunks():
    counts = counts_of(1, [answer(turn(10, "stopped", reused=4))], 4)
    figures = figures_of(counts, steered=True)
    assert counts["reused_units"] == 1
    assert figures["stops/3"] == 1
    assert [figures[f"trained_share/{unit}"] for unit in (2, 3)] == pytest.approx([4 / 6, 2 / 6])
    assert "turns" not in figures


def test_how_rollouts_end():
    rows = [episode(turn(2, "env"), outcome=1.0), episode(turn(2, "length"), outcome=0.0), answer(turn(2))]
    rows += [
        answer(turn(2, "stopped"), outcome=0.5),
        episode(turn(1), restart="failed"),
        answer(turn(1), restart="too long"),
    ]
    figures = figures_of(counts_of(1, rows, 16), steered=True)
    assert figures["eos_rate"] == pytest.approx(4 / 6)
    assert figures["truncated_rate"] == pytest.approx(1 / 6)
    assert figures["success_rate"] == pytest.approx(1 / 2)  # of those that were judged and not stopped
    assert (figures["restore_failures"], figures["long_prefixes"]) == (1, 1)


def test_without_controllers_single_answers_have_no_such_figures():
    figures = figures_of(counts_of(1, [answer(turn(3))], 16), steered=False)
    assert figures == {"response_tokens": 3.0, "eos_rate": 1.0, "truncated_rate": 0.0}


def test_shares_of_domains():
    """One of which a step has no prompt has none of its tokens."""
    rows = [taught(Rollout(Prompt(f"{domain}", domain=domain), 0, (turn(n),))) for domain, n in (("a", 3), ("b", 1))]
    figures = figures_of(counts_of(1, rows, 16), steered=False, domains=("c", "b", "a"))
    assert {name: value for name, value in figures.items() if "/" in name} == {
        "tokens_share/a": 0.75,
        "tokens_share/b": 0.25,
        "tokens_share/c": 0.0,
    }


def test_late_units_are_counted_together():
    figures = figures_of(counts_of(1, [answer(turn(MOST_UNITS + 10, "stopped"))], 1), steered=True)
    assert figures[f"stops/{MOST_UNITS}"] == 1
    assert figures[f"trained_share/{MOST_UNITS}"] == pytest.approx(11 / (MOST_UNITS + 10))


def test_counts_of_processes_add_up():
    rows = [episode(turn(4), turn(3, "stopped")), answer(turn(9)), episode(turn(2, "env"), outcome=1.0)]
    apart = counts_of(3, rows[:1], 4) + counts_of(3, rows[1:], 4)
    assert figures_of(apart, steered=True) == figures_of(counts_of(3, rows, 4), steered=True)


def test_what_is_saved_is_measured_against_whole_rollouts():
    full = FullLength()
    assert full.saved(counts_of(1, [answer(turn(2, "stopped"))], 16)) is None  # nothing was whole yet
    assert full.saved(counts_of(1, [answer(turn(10)), answer(turn(4, "stopped", discarded=1))], 16)) == 20 - 14 - 1
    again = FullLength(full.mean)
    assert again.saved(counts_of(1, [answer(turn(4, "stopped"))], 16)) == 6
    one = replace(turn(10), num_reused=6)
    assert again.saved(counts_of(1, [answer(one)], 16)) == 10 - 4
