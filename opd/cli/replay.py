"""`opd replay`."""

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from opd.errors import UserError

if TYPE_CHECKING:
    from opd.replay import Recording, Row
    from opd.report.tables import Table

UNKNOWN = (
    "What an untried branch would have brought: no rollout was sampled anew from a restart, and none was continued in "
    "another way from the place where a rule stops it.",
    "Which rollouts a run with these rules would have seen: its student would learn from other tokens, so that later "
    "rollouts would come from another student. All of these come from this run's.",
)


def add_to(app: typer.Typer) -> None:
    app.command("replay")(replay)


def replay(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run that recorded its rollouts.")],
    stop_below: Annotated[str, typer.Option(metavar="X,Y,Z", help="Thresholds in nats, such as -0.5,-1,-2.")],
    keep_above: Annotated[
        str, typer.Option(metavar="A", help="Mean log-prob of a unit above which a restart may reuse it; null: any.")
    ] = "-0.8",
    stop_stat: Annotated[
        Literal["cumulative", "mean", "min", "excess"], typer.Option(help="What is held against the thresholds.")
    ] = "cumulative",
    unit: Annotated[Literal["auto", "turn", "chunk"], typer.Option(help="auto: what the run took.")] = "auto",
    chunk_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens of a chunk. Default: the run's.")] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE.json", help="Also write the figures here.")] = None,
) -> None:
    """Re-run recorded rollouts with their teacher's scores against other thresholds to stop and to restart.

    Needs a run with trackers.rollouts_every=1 and trackers.num_rollouts as large as its batch.
    """
    from rich.text import Text

    from opd.cli.tables import print_tables, wide_console
    from opd.replay import read
    from opd.replay import replay as run_again

    thresholds = _thresholds(stop_below)
    floor = -math.inf if keep_above in ("null", "none") else _nats(keep_above, "--keep-above", "-0.8, or null for any unit")
    if out is not None and out.is_dir():
        raise UserError(f"--out {out} is a folder; name a file")
    recording = read(run, unit, chunk_tokens)
    rows = run_again(recording, thresholds, floor, stop_stat)
    remarks = _remarks(recording, thresholds, stop_stat)
    console = wide_console()
    print_tables(console, _tables(run, recording, rows, floor, stop_stat))
    for heading, lines in (("Notes", remarks), ("What a replay cannot know", UNKNOWN)):
        if lines:
            console.print(Text(f"\n{heading}", style="bold"))
            for line in lines:
                console.print(Text(f"- {line}"))
    if out is not None:
        settings = {"run": str(run), "unit": _unit(recording), "chunk_tokens": recording.chunk_tokens}
        settings |= {"stop_stat": stop_stat, "keep_above": floor, "mu": recording.mu, "steps": recording.num_steps}
        settings |= {"left_out": recording.num_left_out, "stopped_in_training": recording.num_cut}
        _write(out, {**settings, "rows": [asdict(row) for row in rows], "notes": remarks, "unknown": UNKNOWN})


def _thresholds(text: str) -> list[float]:
    return [_nats(part, "--stop-below", "-0.5,-1,-2") for part in text.split(",")]


def _nats(text: str, option: str, example: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise UserError(f"{option}: {text.strip()!r} is no number; give nats such as {example}") from None
    if math.isnan(value) or value == math.inf:
        raise UserError(f"{option}: {text.strip()} is no threshold; give nats such as {example}")
    return value


def _unit(recording: "Recording") -> str:
    return "turn" if recording.whole_turns else "chunk"


def _tables(run: Path, recording: "Recording", rows: "list[Row]", keep_above: float, stat: str) -> "list[Table]":
    """Narrow ones, so that a terminal of 80 columns shows them whole."""
    from opd.report.tables import Column, Table

    unit, first = _unit(recording), rows[0]
    names = ["no stop" if row.stop_below == -math.inf else f"{row.stop_below:g}" for row in rows]

    def table(name: str, title: str, columns: list[Column], cells: list[list[Any]], note: str) -> Table:
        return Table(name, title, [Column("stop below"), *columns], [[n, *line] for n, line in zip(names, cells)], note)

    columns = [Column("rollouts", "count"), Column("tokens", "quantity"), Column("tokens", "percent")]
    columns += [Column("stopped", "percent"), Column("at the end", "percent"), Column(f"mean stop {unit}", "number")]
    cells = [[r.rollouts, r.tokens, r.tokens_share, r.stopped, r.at_end, r.stop_unit] for r in rows]
    title = f"Stops by the {stat} statistic in {run}: {first.rollouts:,} rollouts of {recording.num_steps:,} steps"
    note = f"Tokens: sampled up to the stop. At the end: the rule fires after the last {unit}, where nothing is left to cut."
    tables = [table("stops", title, columns, cells, note)]
    columns = [Column("mean restart index", "number"), Column("restarted", "percent"), Column(f"{unit}s reused", "percent")]
    cells = [[r.restart_index, r.restarted, r.reused] for r in rows]
    note = "Of the next rollout of the same task, after what is kept of this one."
    tables.append(table("restarts", f"Restarts that keep {unit}s above {keep_above:g}", columns, cells, note))
    if first.with_mistake or first.without_mistake:
        columns = [Column("rollouts", "count"), Column("stopped before", "percent"), Column("at it", "percent")]
        columns += [Column("after it", "percent"), Column("not stopped", "percent")]
        counts = [[r.with_mistake, r.before, r.at, r.after, r.missed] for r in rows]
        cells = [[total, *(_share(count, total) for count in line)] for total, *line in counts]
        note = "Of rollouts in which the environment's verifier saw a mistake. A rule that fires at the end counts here too."
        tables.append(table("mistakes", "Stops beside the first mistake", columns, cells, note))
    columns, cells = [], [[] for _ in rows]
    if first.without_mistake:
        columns += [Column("without a mistake", "count"), Column("falsely stopped", "percent")]
        cells = [[r.without_mistake, _share(r.false_stops, r.without_mistake)] for r in rows]
    if first.other_outcomes:
        columns += [Column("success of stopped", "percent"), Column("success of others", "percent")]
        cells = [[*line, r.stopped_success, r.other_success] for line, r in zip(cells, rows)]
    if columns:
        note = "Of the whole rollouts, as they were recorded."
        tables.append(table("outcomes", "Good rollouts among those that are stopped", columns, cells, note))
    return tables


def _share(count: int, total: int) -> float:
    return count / total if total else math.nan


def _remarks(recording: "Recording", thresholds: list[float], stat: str) -> list[str]:
    """What the figures rest on."""
    lines = []
    marked = any(rollout.mistake is not None or rollout.flawless for rollout in recording.rollouts)
    if not recording.whole_turns:
        lines.append(
            f"A unit is a chunk of {recording.chunk_tokens} tokens. Where in a single answer a mistake stands is unknown: "
            "stops are compared with outcomes alone."
        )
    elif not marked:
        lines.append("The environment marked no mistakes: stops are compared with outcomes alone.")
    if not any(rollout.success is not None for rollout in recording.rollouts):
        lines.append("No rollout has an outcome.")
    if stat == "excess":
        what = "new turns" if recording.whole_turns else "new tokens"
        lines.append(
            f"excess is measured against {recording.mu:.4f} nats, the mean over all {what}; in training, a running mean."
        )
    elif max(thresholds) >= 0:
        lines.append("A threshold of 0 or more stops every rollout after its first new unit.")
    if recording.num_left_out:
        lines.append(f"{recording.num_left_out:,} rollouts without log-probs of the teacher are left out.")
    if recording.num_cut:
        lines.append(
            f"{recording.num_cut:,} rollouts were stopped when they were sampled: what would have followed is unknown, and "
            "so are their outcomes. A run without stops tells more."
        )
    return lines


def _write(out: Path, content: dict[str, Any]) -> None:
    from opd.files import explain_unwritable, write_text

    with explain_unwritable(out):
        write_text(out, json.dumps(_strict(content), indent=2, allow_nan=False) + "\n")


def _strict(value: Any) -> Any:
    """JSON has no infinities and no NaN: null."""
    if isinstance(value, dict):
        return {key: _strict(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
