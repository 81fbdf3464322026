"""Recorded rollouts and their teacher's scores against other thresholds to stop and to restart.

What is read are the rows of RUN/rollouts/step-N.jsonl. Their log-probs are rounded, so that a statistic within the rounding
of a threshold may fall on another side of it than in training. Nothing here needs torch.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from opd.episodes import SUCCESS
from opd.errors import UserError
from opd.records import Array, Turn, Unit
from opd.stopping import Stat, first_below, restart_index, running, statistic
from opd.units import units_of

UnitKind = Literal["auto", "turn", "chunk"]
ROUNDING = 1e-3  # nats that a log-prob may be above 0
RECORD_ALL = "train with trackers.rollouts_every=1 and trackers.num_rollouts as large as the batch"
NONE = np.zeros(0, np.int32)


@dataclass(frozen=True, eq=False)
class Recorded:
    """One rollout of u units, as it was recorded."""

    units: tuple[Unit, ...]
    num_sampled: Array  # [u] int64: tokens of each unit that are not reused
    mistake: int | None = None  # how many units there are up to the first with a mistake
    flawless: bool = False  # whether a verifier looked at a whole rollout and saw no mistake
    success: bool | None = None  # of a whole rollout; None where nobody says


@dataclass(frozen=True)
class Recording:
    """The rollouts of a run whose units are turns or, where `chunk_tokens` is given, chunks of single answers."""

    rollouts: Sequence[Recorded]
    chunk_tokens: int | None
    num_steps: int
    num_left_out: int  # rollouts that the teacher has not judged
    num_cut: int  # rollouts that were stopped when they were sampled: what would have followed is unknown

    @property
    def whole_turns(self) -> bool:
        return self.chunk_tokens is None

    @property
    def mu(self) -> float:
        """Nats: the mean over all new turns, or all new tokens of single answers. In training it is a running mean."""
        return statistic([unit for rollout in self.rollouts for unit in rollout.units], "mean", self.whole_turns)


@dataclass(frozen=True)
class Row:
    """What becomes of all rollouts under one threshold. Shares are fractions; a mean over nothing is NaN.

    `stopped` counts rollouts that are cut short. A rule that fires at the last unit cuts nothing: that is `at_end`, and it
    counts beside the mistakes alone. Mistakes are the first ones of their rollouts, outcomes those of the whole rollouts.
    """

    stop_below: float  # nats; -inf: no stop
    rollouts: int
    tokens: int  # kept, of those that were sampled
    tokens_share: float
    stopped: float  # share of the rollouts
    at_end: float
    stop_unit: float  # mean number of units, reused ones included, of the rollouts that are cut short
    restart_index: float  # mean number of units that the next rollout of the task would reuse
    restarted: float  # share of the rollouts with an index above 0
    reused: float  # share of all kept units that these restarts would reuse
    with_mistake: int
    before: int  # stops before the first mistake
    at: int
    after: int
    missed: int  # no stop
    without_mistake: int
    false_stops: int
    stopped_outcomes: int  # rollouts with an outcome that are cut short
    stopped_success: float
    other_outcomes: int  # rollouts with an outcome that go to their end
    other_success: float


def replay(recording: Recording, thresholds: Sequence[float], keep_above: float, stat: Stat = "cumulative") -> list[Row]:
    """A row for no stop, then one for each threshold in nats; restarts follow from the units that are kept."""
    mu = recording.mu if stat == "excess" else 0.0
    values = [running(rollout.units, stat, recording.whole_turns, mu) for rollout in recording.rollouts]
    found = []
    for level in dict.fromkeys([-math.inf, *thresholds]):
        stops = [first_below(row, level, len(rollout.units)) for rollout, row in zip(recording.rollouts, values)]
        found.append(_row(level, recording.rollouts, stops, keep_above))
    return found


def _row(threshold: float, rollouts: Sequence[Recorded], stops: Sequence[int | None], keep_above: float) -> Row:
    whole = [len(rollout.units) for rollout in rollouts]
    kept = [length if stop is None else stop for length, stop in zip(whole, stops)]
    cut = [stop is not None and stop < length for length, stop in zip(whole, stops)]
    tokens = sum(int(rollout.num_sampled[:length].sum()) for rollout, length in zip(rollouts, kept))
    sampled = sum(int(rollout.num_sampled.sum()) for rollout in rollouts)
    restarts = [restart_index(rollout.units[:length], keep_above) for rollout, length in zip(rollouts, kept)]
    pairs = [(rollout.mistake, stop) for rollout, stop in zip(rollouts, stops) if rollout.mistake is not None]
    flawless = [stopped for rollout, stopped in zip(rollouts, cut) if rollout.flawless]
    known = [(rollout.success, stopped) for rollout, stopped in zip(rollouts, cut) if rollout.success is not None]
    ended, others = ([success for success, stopped in known if stopped is which] for which in (True, False))
    return Row(
        stop_below=threshold,
        rollouts=len(rollouts),
        tokens=tokens,
        tokens_share=tokens / sampled if sampled else math.nan,
        stopped=_mean(cut),
        at_end=_mean([stop == length for length, stop in zip(whole, stops)]),
        stop_unit=_mean([length for length, stopped in zip(kept, cut) if stopped]),
        restart_index=_mean(restarts),
        restarted=_mean([index > 0 for index in restarts]),
        reused=sum(restarts) / sum(kept) if any(kept) else math.nan,
        with_mistake=len(pairs),
        before=sum(stop is not None and stop < mistake for mistake, stop in pairs),
        at=sum(stop == mistake for mistake, stop in pairs),
        after=sum(stop is not None and stop > mistake for mistake, stop in pairs),
        missed=sum(stop is None for _, stop in pairs),
        without_mistake=len(flawless),
        false_stops=sum(flawless),
        stopped_outcomes=len(ended),
        stopped_success=_mean(ended),
        other_outcomes=len(others),
        other_success=_mean(others),
    )


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else math.nan


def read(run: Path, unit: UnitKind = "auto", chunk_tokens: int | None = None) -> Recording:
    """The rollouts that `run` recorded; `unit` and `chunk_tokens` take the place of what its rows say.

    Raises `UserError` for a folder without rollouts, for rollouts without a teacher's log-probs, for units that they do not
    have, and for a damaged row.
    """
    if not run.is_dir():
        raise UserError(f"{run}: no such folder; name the folder of a run")
    files = sorted(run.glob("rollouts/step-*.jsonl"), key=_step_of)
    rollouts, chunks, num_rows, num_cut = [], set(), 0, 0
    for where, row in (each for file in files for each in _rows(file)):
        num_rows += 1
        turns = _turns(row, where)
        if turns:
            chunk = _chunk(row, len(turns), where, unit, chunk_tokens)
            chunks.add(chunk)
            rollouts.append(_recorded(row, turns, chunk, where))
            num_cut += turns[-1].finish == "stopped"
    if not num_rows:
        raise UserError(f"{run}: holds no recorded rollouts (rollouts/step-N.jsonl); {RECORD_ALL}")
    if not rollouts:
        raise UserError(
            f"{run}: its rollouts have no log-probs of a teacher; {RECORD_ALL}, and with objective.temperature equal to the "
            "sampling temperature"
        )
    if len(chunks) > 1:
        raise UserError(f"{run}: its rollouts have different units; --unit turn takes each turn for one")
    (chunk,) = chunks
    if chunk is None and chunk_tokens is not None:
        raise UserError("--chunk-tokens: the units are turns, which have no chunks; leave it out")
    return Recording(rollouts, chunk, len(files), num_rows - len(rollouts), num_cut)


def _step_of(path: Path) -> int:
    found = re.fullmatch(r"step-(\d+)", path.stem)
    return int(found[1]) if found else -1


def _rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(where it stands, row) of each line. Raises `UserError` for one that is no JSON object."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    for number, line in enumerate(lines, 1):
        where = f"{path}, line {number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict):
            raise _damaged(where, "it is no JSON object")
        yield where, row


def _turns(row: Mapping[str, Any], where: str) -> tuple[Turn, ...]:
    """The turns with their teacher's log-probs; none where the teacher has not judged the rollout."""
    if not row.get("teacher_logps") or not row.get("turns"):
        return ()
    try:
        logps = np.array(row["teacher_logps"], np.float32)
        sizes = [(turn["num_tokens"], turn["num_reused"], turn.get("mistake")) for turn in row["turns"]]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise _damaged(where, f"'teacher_logps' or 'turns' cannot be read ({error!r})") from None
    if logps.ndim != 1 or (logps > ROUNDING).any():
        raise _damaged(where, "'teacher_logps' holds what is no log-prob")
    if np.isnan(logps).all():
        return ()
    for size, reused, mistake in sizes:
        counts = type(size) is int and type(reused) is int and size > 0 and 0 <= reused <= size
        if not counts or not (mistake is None or isinstance(mistake, bool)):
            raise _damaged(where, "a turn's 'num_tokens', 'num_reused' or 'mistake' is out of range")
    if sum(size for size, *_ in sizes) != len(logps):
        raise _damaged(where, f"its turns have {sum(size for size, *_ in sizes)} tokens and 'teacher_logps' {len(logps)}")
    ends = np.cumsum([size for size, *_ in sizes])
    finish = str(row.get("finish"))
    return tuple(
        Turn(NONE, np.zeros(size, np.int32), NONE, finish, num_reused=reused, teacher_logps=part, mistake=mistake)  # type: ignore[arg-type]
        for (size, reused, mistake), part in zip(sizes, np.split(logps, ends[:-1]))
    )


def _chunk(row: Mapping[str, Any], num_turns: int, where: str, unit: UnitKind, chunk_tokens: int | None) -> int | None:
    """Tokens of a unit; None where units are turns."""
    kind = row.get("unit") if unit == "auto" else unit
    if kind == "turn":
        return None
    if kind != "chunk":
        raise _damaged(where, "its 'unit' is neither turn nor chunk")
    if num_turns > 1:
        raise UserError(f"--unit chunk: {where} has {num_turns} turns, and only single answers have chunks; use --unit turn")
    size = row.get("chunk_tokens") if chunk_tokens is None else chunk_tokens
    if type(size) is not int or size < 1:
        raise UserError(f"{where}: 'chunk_tokens' is no number of tokens; name it with --chunk-tokens")
    return size


def _recorded(row: Mapping[str, Any], turns: Sequence[Turn], chunk: int | None, where: str) -> Recorded:
    outcome, whole = row.get("outcome"), turns[-1].finish != "stopped"
    if outcome is not None and (isinstance(outcome, bool) or not isinstance(outcome, int | float)):
        raise _damaged(where, "'outcome' is no number")
    new = [turn.trainable for turn in turns]
    if chunk is not None:
        new = np.split(new[0], range(chunk, len(new[0]), chunk))
        turns = [replace(turns[0], teacher_logps=_whole_chunks(turns[0].teacher_logps, chunk))]
    marks = [turn.mistake for turn in turns] if chunk is None else []
    mistake = marks.index(True) + 1 if True in marks else None
    return Recorded(
        units=units_of(turns, chunk),
        num_sampled=np.array([part.sum() for part in new], np.int64),
        mistake=mistake,
        flawless=whole and mistake is None and False in marks,
        success=outcome >= SUCCESS if whole and outcome is not None else None,
    )


def _whole_chunks(logps: Array | None, chunk: int) -> Array | None:
    """In training nobody looks at the last tokens of an answer, which can no longer be stopped."""
    return None if logps is None else logps[: len(logps) // chunk * chunk]


def _damaged(where: str, why: str) -> UserError:
    return UserError(f"{where}: damaged: {why}; mend or remove that line")
