"""`opd prompts filter | calibrate`: pools of some rows of another."""

import json
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from opd.cli.asking import (
    SUITE,
    Boxed,
    Deadline,
    Dtype,
    Longest,
    MaxInFlight,
    MaxRows,
    Overwrite,
    Pool,
    Resume,
    Seed,
    ServedAs,
    System,
    Temperature,
    TokenFile,
    TopP,
    Url,
    check_begin,
    check_model,
    eval_options,
    interruptible,
    pool_file,
    refuse_without,
    suite_problems,
    wording,
)
from opd.cli.evaluate import SuiteDir, Text, Thinking, option
from opd.errors import UserError

NewPool = Annotated[Path, option("The .jsonl file of the new pool.")]


def add_to(group: typer.Typer) -> None:
    group.command("filter")(filter_)
    group.command("calibrate")(calibrate)


def filter_(
    pool: Pool,
    out: NewPool,
    dedup: Annotated[Literal["exact", "near"] | None, option("Leave out what says the same as an earlier prompt.")] = None,
    decontaminate: Annotated[list[str] | None, option(f"Leave out what overlaps with it. {SUITE}")] = None,
    suite_dir: SuiteDir = None,
    overwrite: Overwrite = False,
) -> None:
    """Write a new pool without duplicates or without problems of suites. The first of duplicates stays.

    Prints one JSON line for each prompt that is left out, and what stays on stderr.
    """
    if dedup is None and not decontaminate:
        raise UserError("--dedup or --decontaminate is missing: nothing is left out without one of them")
    from opd.data_free.pool import check_out, pool_digest, read_pool, write_pool
    from opd.data_free.selection import select

    check_out(out, pool, overwrite=overwrite)
    rows = read_pool(pool_file(pool), "POOL")
    kept, dropped = select(rows, dedup, suite_problems(decontaminate or (), suite_dir, "--decontaminate"))
    if not kept:
        raise UserError(f"--decontaminate: of {len(rows)} prompts none is left (--dedup keeps one); leave it out")
    write_pool(out, kept)
    for one in dropped:
        print(json.dumps({"id": one.id, "because": one.because, "of": one.of}, ensure_ascii=False))
    counts = Counter(one.because for one in dropped)
    facts = {"num_prompts": len(rows), "num_kept": len(kept), "dropped": dict(counts), "digest": pool_digest(kept)}
    print(json.dumps(facts, ensure_ascii=False), file=sys.stderr)


def calibrate(
    ctx: typer.Context,
    pool: Pool,
    out: NewPool,
    student: Annotated[str, option("The current student: a model folder, a checkpoint, a hub id, or tiny:student.")],
    low: Annotated[float, option("Least pass rate that stays.", min=0.0, max=1.0)] = 0.2,
    high: Annotated[float, option("Largest pass rate that stays.", min=0.0, max=1.0)] = 0.8,
    samples: Annotated[int, option("The student's answers a prompt.", min=1)] = 8,
    answers: Annotated[Text, option("Judge by the answers in this column.")] = None,
    reward: Annotated[Text, option("Judge by FILE.py:FUNCTION, a verifier of your own.")] = None,
    time_limit_s: Annotated[float, option("With --reward: seconds for one call.", min=0.1)] = 5.0,
    teacher: Annotated[Text, option("Judge by the most frequent answer of this model.")] = None,
    teacher_samples: Annotated[int, option("With --teacher: its answers a prompt.", min=1)] = 4,
    min_agreement: Annotated[float, option("With --teacher: least share of them that agree.", min=0.0, max=1.0)] = 0.5,
    teacher_url: Annotated[Text, option("With --teacher: a vLLM server that serves it.")] = None,
    teacher_served_as: Annotated[Text, option("With --teacher-url: its name there.")] = None,
    temperature: Temperature = 0.7,
    top_p: TopP = 1.0,
    max_new_tokens: Longest = 1024,
    template: Boxed = None,
    system: System = None,
    thinking: Thinking = None,
    seed: Seed = 0,
    dtype: Dtype = "auto",
    max_rows: MaxRows = 64,
    url: Url = None,
    served_as: ServedAs = None,
    token_file: TokenFile = None,
    max_in_flight: MaxInFlight = 256,
    deadline_s: Deadline = 3600.0,
    resume: Resume = False,
    overwrite: Overwrite = False,
) -> None:
    """Write a new pool of the prompts that the student sometimes solves, each with its pass rate."""
    given = dict(locals())
    if teacher is None:
        refuse_without(ctx, ("teacher_samples", "min_agreement", "teacher_url", "teacher_served_as"), "--teacher")
    if reward is None:
        refuse_without(ctx, ("time_limit_s",), "--reward")
    if teacher_url is None:
        refuse_without(ctx, ("teacher_served_as",), "--teacher-url")
    if url is None and teacher_url is None:
        refuse_without(ctx, ("token_file", "max_in_flight", "deadline_s"), "--url")
    facts = _calibrate(given)
    print(json.dumps(facts))


def _calibrate(given: Mapping[str, Any]) -> dict[str, Any]:
    ways = [name for name in ("answers", "reward", "teacher") if given[name] is not None]
    if len(ways) != 1:
        raise UserError("give one of --answers, --reward and --teacher, which says whether the student is right")
    if given["low"] > given["high"]:
        raise UserError(f"--low: {given['low']:g} is above --high {given['high']:g}; give a lower one")
    check_begin(given)
    from opd.data_free.pool import check_out, read_pool

    samples = (".samples.jsonl", ".teacher.samples.jsonl")
    check_out(given["out"], given["pool"], overwrite=given["overwrite"], resume=given["resume"], beside=samples)
    check_model(given["student"], "--student", "--url")
    of_teacher = None
    if given["teacher"] is not None:
        check_model(given["teacher"], "--teacher", "--teacher-url")
        served = {"url": given["teacher_url"], "served_as": given["teacher_served_as"]}
        of_teacher = eval_options(_with_token({**given, **served, "samples": given["teacher_samples"]}))
    rows = read_pool(pool_file(given["pool"]), "POOL")
    options = eval_options(_with_token(given))
    from opd.data_free.calibrate import Judge, calibrate

    ways_and_limits = ("answers", "reward", "teacher", "min_agreement", "time_limit_s")
    judge = Judge(options=of_teacher, **{name: given[name] for name in ways_and_limits})
    begin = {"resume": given["resume"], "overwrite": given["overwrite"]}
    with interruptible():
        band = (given["low"], given["high"])
        return calibrate(rows, given["out"], given["student"], options, judge, band, wording(given), begin)


def _with_token(given: Mapping[str, Any]) -> dict[str, Any]:
    """The token is for whichever of the two models is on a server."""
    return {**given, "token_file": given["token_file"] if given["url"] else None}
