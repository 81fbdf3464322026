"""Recorded rollouts against other thresholds: small rollouts by hand, and damaged files."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from opd.errors import UserError
from opd.records import Unit
from opd.replay import Recorded, Recording, Row, read, replay

NAN = math.nan


def turn(*logps: float | None, mistake: bool | None = None, reused: int = 0) -> dict:
    """A turn with its teacher's log-probs, which `row` takes out."""
    return {"logps": logps, "num_tokens": len(logps), "num_reused": reused, "finish": "eos", "mistake": mistake}


def row(*turns: dict, outcome: float | None = None, **more) -> dict:
    """A rollout of the turns, as a run writes it down."""
    logps = [logp for each in turns for logp in each["logps"]]
    told = [{**{k: v for k, v in each.items() if k != "logps"}, "text": "t", "observations": ["o"]} for each in turns]
    found = {"id": "p", "slot": 0, "prompt": "?", "response": "t", "finish": "eos", "outcome": outcome, "restart": ""}
    return {**found, "unit": "turn", "chunk_tokens": 32, "teacher_logps": logps, "turns": told, **more}


@pytest.fixture
def record(tmp_path):
    def write(*rows: dict, step: int = 1) -> Path:
        path = tmp_path / "run" / "rollouts" / f"step-{step}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(each) + "\n" for each in rows), encoding="utf-8")
        return tmp_path / "run"

    return write


GOOD = row(turn(-0.1, -0.1, mistake=False), turn(-0.2, mistake=False), turn(-0.1, mistake=False), outcome=1.0)
BAD = row(turn(-0.1, mistake=False), turn(-2.0, -4.0, mistake=True), turn(-0.5, -0.5, -0.5, mistake=False), outcome=0.0)
ODD = row(turn(-1.0, mistake=False), turn(-0.2, mistake=None), turn(-5.0, mistake=True), outcome=0.5)


def test_a_row_a_threshold_and_one_without_stops(record):
    rows = replay(read(record(GOOD, BAD, ODD)), [-0.9, -4.0], keep_above=-0.8)
    assert [found.stop_below for found in rows] == [-math.inf, -0.9, -4.0]
    assert rows[0] == pytest.approx(
        Row(
            stop_below=-math.inf, rollouts=3, tokens=13, tokens_share=1.0, stopped=0.0, at_end=0.0, stop_unit=NAN,
            restart_index=1 / 3, restarted=1 / 3, reused=1 / 9, with_mistake=2, before=0, at=0, after=0, missed=2,
            without_mistake=1, false_stops=0, stopped_outcomes=0, stopped_success=NAN, other_outcomes=3, other_success=2 / 3,
        ),
        nan_ok=True,
    )  # fmt: skip
    assert rows[1] == Row(
        stop_below=-0.9, rollouts=3, tokens=8, tokens_share=8 / 13, stopped=2 / 3, at_end=0.0, stop_unit=1.5,
        restart_index=1 / 3, restarted=1 / 3, reused=1 / 6, with_mistake=2, before=1, at=1, after=0, missed=0,
        without_mistake=1, false_stops=0, stopped_outcomes=2, stopped_success=0.5, other_outcomes=1, other_success=1.0,
    )  # fmt: skip
    last = rows[2]  # the second goes on to -3.6; the third falls below at its end, where nothing is left to cut
    assert (last.tokens, last.stopped, last.at_end) == (13, 0.0, 1 / 3)
    assert (last.before, last.at, last.after, last.missed) == (0, 1, 0, 1)
    assert (last.stopped_outcomes, last.other_outcomes) == (0, 3)


def test_stops_after_the_mistake_and_of_rollouts_without_one(record):
    flawless = row(turn(-3.0, mistake=False), turn(-0.1, mistake=False))
    late = row(turn(-1.0, mistake=True), turn(-1.5, mistake=True), turn(-0.1, mistake=False))
    (_, found) = replay(read(record(flawless, late)), [-2.0], keep_above=0.0)
    assert (found.with_mistake, found.before, found.at, found.after, found.missed) == (1, 0, 0, 1, 0)
    assert (found.without_mistake, found.false_stops) == (1, 1)
    assert found.restart_index == 0


def test_restarts_are_chosen_on_what_is_kept(record):
    run = record(row(turn(-0.1), turn(-0.5), turn(-0.7), turn(-0.1)))
    whole, cut = replay(read(run), [-0.4], keep_above=-0.8)
    assert (whole.restart_index, whole.reused) == (2, 0.5)
    assert (cut.restart_index, cut.reused, cut.stop_unit) == (1, 0.5, 2)


def test_reused_turns_are_neither_sampled_nor_counted(record):
    run = record(row(turn(-9.0, -9.0, reused=2), turn(-0.1), turn(-0.3), turn(-0.1)))
    _, found = replay(read(run), [-0.35], keep_above=-math.inf)
    assert (found.tokens, found.tokens_share) == (2, 2 / 3)
    assert found.stop_unit == 3  # a place in the rollout


@pytest.mark.parametrize(
    ("stat", "stops"),
    [("cumulative", [3, 2, 2, 2]), ("mean", [NAN, NAN, 2, 2]), ("min", [NAN, 2, 2, 2]), ("excess", [NAN, NAN, NAN, 2])],
)
def test_the_statistic_is_the_one_asked_for(record, stat, stops):
    """Turn means -0.1, -3, -0.1, 0 (of the token that is judged), so that mu is -0.8."""
    recording = read(record(row(turn(-0.1), turn(-2.0, -4.0), turn(-0.1), turn(-0.0, None))))
    assert recording.mu == pytest.approx(-0.8)
    _, *found = replay(recording, [-3.15, -2.9, -1.52, -1.2], keep_above=0.0, stat=stat)
    assert [each.stop_unit for each in found] == pytest.approx(stops, nan_ok=True)


def test_single_answers_are_looked_at_chunk_by_chunk(record):
    logps = [-0.25, -0.5, None, -1.0, -0.25, -2.0, -0.25]
    run = record(row(turn(*logps, mistake=True), unit="chunk", chunk_tokens=2, outcome=1.0))
    recording = read(run)
    assert not recording.whole_turns
    assert recording.mu == pytest.approx(-4.0 / 5)  # over tokens that training looks at: whole chunks
    (rollout,) = recording.rollouts
    assert rollout.num_sampled.tolist() == [2, 2, 2, 1]
    assert rollout.units == (Unit(-0.75, 2), Unit(-1.0, 1), Unit(-2.25, 2), Unit(0.0, 0))
    assert (rollout.mistake, rollout.flawless) == (None, False)
    _, first, second = replay(recording, [-1.0, -2.0], keep_above=-math.inf)
    assert (first.stop_unit, first.tokens) == (2, 4)
    assert (second.stop_unit, second.tokens) == (3, 6)
    assert second.restart_index == 2
    assert second.stopped_success == 1.0
    (rollout,) = read(run, chunk_tokens=5).rollouts
    assert rollout.num_sampled.tolist() == [5, 2]
    assert len(read(run, "turn").rollouts[0].units) == 1


def test_tokens_reused_inside_a_single_answer(record):
    logps = [-1.0] * 7
    (rollout,) = read(record(row(turn(*logps, reused=4), unit="chunk", chunk_tokens=2))).rollouts
    assert [unit.reused for unit in rollout.units] == [True, True, False, False]
    assert rollout.num_sampled.tolist() == [0, 0, 2, 1]


def test_what_a_stopped_run_does_not_know(record):
    """Neither the outcome of a rollout that was stopped, nor that it would have stayed without a mistake."""
    stopped = row(turn(-0.1, mistake=False), turn(-2.0, mistake=False), outcome=1.0, finish="stopped")
    seen = row(turn(-0.1, mistake=False), turn(-2.0, mistake=True), outcome=0.0, finish="stopped")
    recording = read(record(stopped, seen, GOOD))
    assert recording.num_cut == 2
    (found,) = replay(recording, [], keep_above=0.0)
    assert (found.with_mistake, found.without_mistake, found.other_outcomes) == (1, 1, 1)


def test_mistakes_that_nobody_looked_for_are_none(record):
    (rollout,) = read(record(row(turn(-0.1), turn(-0.2)))).rollouts
    assert (rollout.mistake, rollout.flawless, rollout.success) == (None, False, None)


def test_thresholds_never_keep_more_when_they_are_higher(record):
    rng = np.random.default_rng(0)
    rows = [row(*(turn(*(-rng.exponential(0.5, 3))) for _ in range(rng.integers(1, 9)))) for _ in range(50)]
    levels = [-5.0, -2.0, -1.0, -0.5, 0.0]
    found = replay(read(record(*rows)), levels, keep_above=-0.8)
    kept = [each.tokens for each in found]
    assert kept == sorted(kept, reverse=True)
    assert found[-1].tokens == 150  # a threshold of 0 leaves each its first turn


def test_a_threshold_named_twice_or_minus_infinity_is_one_row():
    recording = Recording([Recorded((Unit(-1.0, 1),), np.array([1]))], None, 1, 0, 0)
    assert [row.stop_below for row in replay(recording, [-1.0, -1.0, -math.inf], -math.inf)] == [-math.inf, -1.0]


def test_rollouts_that_were_not_judged_are_left_out(record):
    older = {"id": "p", "prompt": "?", "response": "t", "tokens": ["t"]}
    run = record(GOOD, {**BAD, "teacher_logps": []}, {**BAD, "teacher_logps": [None] * 6}, older)
    record(GOOD, step=12)
    recording = read(run)
    assert (len(recording.rollouts), recording.num_left_out, recording.num_steps) == (2, 3, 2)


def test_runs_without_rollouts_or_scores_say_how_to_get_them(record, tmp_path):
    with pytest.raises(UserError, match="no such folder"):
        read(tmp_path / "nothing")
    with pytest.raises(UserError, match=r"no recorded rollouts .* trackers.rollouts_every=1 and trackers.num_rollouts"):
        read(tmp_path)
    with pytest.raises(UserError, match=r"no log-probs of a teacher; .* objective.temperature equal to the sampling"):
        read(record({**GOOD, "teacher_logps": []}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"teacher_logps": [-0.1, "x", -0.1, -0.1]}, "'teacher_logps' or 'turns' cannot be read"),
        ({"teacher_logps": [-0.1, 2.0, -0.1, -0.1]}, "holds what is no log-prob"),
        ({"teacher_logps": [[-0.1], [-0.1], [-0.1], [-0.1]]}, "holds what is no log-prob"),
        ({"teacher_logps": [-0.1, -0.1]}, "turns have 4 tokens and 'teacher_logps' 2"),
        ({"turns": [{"num_tokens": 4}]}, "'teacher_logps' or 'turns' cannot be read"),
        ({"turns": ["a"]}, "'teacher_logps' or 'turns' cannot be read"),
        ({"turns": [turn(*[-0.1] * 4, reused=5)]}, "'num_tokens', 'num_reused' or 'mistake' is out of range"),
        ({"turns": [turn(*[-0.1] * 4) | {"mistake": "no"}]}, "'num_tokens', 'num_reused' or 'mistake' is out of range"),
        ({"outcome": "won"}, "'outcome' is no number"),
        ({"unit": "word"}, "'unit' is neither turn nor chunk"),
    ],
)
def test_a_damaged_row_is_named(record, damage, message):
    with pytest.raises(UserError, match=rf"step-7.jsonl, line 2: damaged: .*{message}"):
        read(record(GOOD, {**GOOD, **damage}, step=7))


@pytest.mark.parametrize("line", ["{", "[1]", "", "\ud800"])
def test_a_line_that_is_no_row_is_named(record, line):
    path = record(GOOD) / "rollouts" / "step-1.jsonl"
    path.write_bytes(path.read_bytes() + line.encode("utf-8", "surrogatepass") + b"\n")
    with pytest.raises(UserError, match=r"step-1.jsonl, line 2: damaged: it is no JSON object"):
        read(path.parent.parent)


def test_units_that_the_rollouts_do_not_have_are_refused(record):
    run = record(GOOD)
    with pytest.raises(UserError, match=r"--unit chunk: .*line 1 has 3 turns"):
        read(run, "chunk")
    with pytest.raises(UserError, match="--chunk-tokens: the units are turns"):
        read(run, chunk_tokens=4)
    single = row(turn(-0.1, -0.2), unit="chunk", chunk_tokens=2)
    with pytest.raises(UserError, match="different units; --unit turn"):
        read(record(GOOD, single))
    assert len(read(run, "turn").rollouts) == 2
    with pytest.raises(UserError, match=r"line 1: 'chunk_tokens' is no number of tokens; name it with --chunk-tokens"):
        read(record({**single, "chunk_tokens": 0}))
