"""Prompts that the current student sometimes solves: those whose pass rate lies in a band (FrogNano's calibration).

The verifier is the answer in a row, a function of the user's own, or the teacher's agreement with itself: its most frequent
answer, where enough of its samples give it. A prompt that the student always or never solves teaches a group reward nothing.
A call of the function that does not end says nothing about the student, so its prompt is not judged.
"""

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from opd.data import DatasetConfig
from opd.data_free.agreement import agreements, pool_prompts
from opd.data_free.asking import ask
from opd.data_free.pool import Row, pool_digest, write_pool
from opd.data_free.selection import selected
from opd.errors import UserError
from opd.eval.evaluate import matrix
from opd.eval.grading import SCORE_CORRECT, Grader, Item
from opd.eval.options import EvalOptions
from opd.eval.samples import Pair, Sampled
from opd.evaluation import public_name
from opd.records import Prompt
from opd.reward.functions import Function


@dataclass(frozen=True)
class Judge:
    """What decides whether the student solved a prompt: exactly one of `answers`, `reward` and `teacher`.

    `options`: how the teacher is sampled; of these samples at least the share `min_agreement` must give one answer.
    `time_limit_s`: for one call of the function.
    """

    answers: str | None = None  # the column of the answer
    reward: str | None = None  # FILE.py:FUNCTION
    teacher: str | None = None
    options: EvalOptions | None = None
    min_agreement: float = 0.5
    time_limit_s: float = 5.0

    def named(self) -> dict[str, Any]:
        """As a row's provenance holds it."""
        if self.teacher is not None:
            assert self.options is not None
            how = {**self.options.fixing_numbers(), "min_agreement": self.min_agreement}
            return {"teacher": public_name(self.teacher), **how}
        return {"reward": Path(self.reward).name} if self.reward else {"answers": self.answers}


def calibrate(
    rows: Sequence[Row],
    out: Path,
    student: str,
    options: EvalOptions,
    judge: Judge,
    band: tuple[float, float],
    style: DatasetConfig,
    begin: Mapping[str, bool],
) -> dict[str, Any]:
    """Writes to `out` the rows whose pass rate lies in `band`, ends included, as `pass_rate`, and returns the counts.

    The student's samples are kept beside it in `.samples.jsonl`, the teacher's in `.teacher.samples.jsonl`, from which a
    killed command goes on, or one with another band. Raises `UserError`, also when no row is left: `out` is then as it was.
    """
    with ExitStack() as stack:
        grader, function = stack.enter_context(Grader()), None
        if judge.reward is not None:  # its mistakes show before anything is sampled
            function = stack.enter_context(closing(Function(judge.reward, "--reward", judge.time_limit_s)))
        prompts = _answered(rows, out, judge, style, begin, grader)
        judged = [place for place, prompt in enumerate(prompts) if judge.reward or prompt.answer]
        if not judged:
            raise UserError(_unjudged(judge))
        mine = [prompts[place] for place in judged]
        samples = out.with_suffix(".samples.jsonl")
        asked = asyncio.run(ask(student, mine, samples, options, begin, ("--student", "POOL")))
        if function is None:
            compared = matrix(mine, asked.samples, grader)
            lost, found = 0, {row["index"]: [one == "correct" for one in row["verdicts"]] for row in compared}
        else:
            lost, found = _passed(mine, asked.samples, function)
    rates = {judged[place]: Fraction(sum(passed), len(passed)) for place, passed in found.items()}
    low, high = band
    kinds = Counter("too_hard" if rate < low else "too_easy" if rate > high else "kept" for rate in rates.values())
    counts = {f"num_{kind}": kinds[kind] for kind in ("kept", "too_easy", "too_hard")}
    too_long = len(judged) - len(asked.ids)
    counts |= {"num_unjudged": len(rows) - too_long - len(rates), "num_too_long": too_long}
    counts |= {"num_lost_calls": lost} if function else {}
    if not kinds["kept"]:
        told = ", ".join(f"{number} {name.removeprefix('num_').replace('_', ' ')}" for name, number in counts.items())
        raise UserError(f"--low {low:g} --high {high:g}: no prompt is left ({told}); widen the band, and add --resume")
    how = {"student": public_name(student), "weights": asked.identity, **options.fixing_numbers(), "band": [low, high]}
    how |= {"template": style.template, "system": style.system, "judge": judge.named()}
    kept = [_rated(rows[place], rate, how) for place, rate in sorted(rates.items()) if low <= rate <= high]
    write_pool(out, kept)
    return {"num_prompts": len(rows), **counts, "digest": pool_digest(kept)}


def _answered(
    rows: Sequence[Row], out: Path, judge: Judge, style: DatasetConfig, begin: Mapping[str, bool], grader: Grader
) -> list[Prompt]:
    """The prompts with the answers that the student's are compared with; None where there is none."""
    prompts = pool_prompts(rows, style, "POOL", judge.answers or "answer")
    if judge.teacher is None:
        return prompts
    assert judge.options is not None
    samples = out.with_suffix(".teacher.samples.jsonl")
    asked = asyncio.run(ask(judge.teacher, prompts, samples, judge.options, begin, ("--teacher", "POOL")))
    found = agreements(asked.samples, grader)
    if all(one.answer is None for one in found.values()):
        raise UserError("--teacher: no final answer in any sample; see --template and --max-new-tokens, and add --overwrite")
    sure = {place: one.answer for place, one in found.items() if one.share >= judge.min_agreement}
    return [replace(prompt, answer=sure.get(place)) for place, prompt in enumerate(prompts)]


def _passed(
    prompts: Sequence[Prompt], samples: Mapping[Pair, Sampled], function: Function
) -> tuple[int, dict[int, list[bool]]]:
    """(calls that did not end, whether each sample passed by the prompt's place). Prompts with such calls are left out."""
    ordered = [(prompts[place], place, sampled) for (place, _), sampled in sorted(samples.items())]
    values = function([Item.of(prompt, one.response, one.finish == "length") for prompt, _, one in ordered])
    lost = values.count(None)
    if lost == len(values):
        raise UserError(
            f"--reward: {function.spec} took longer than --time-limit-s {function.limit_s:g} or ended its process in every "
            "call; mend it, or raise --time-limit-s, and add --resume"
        )
    found: dict[int, list[float | None]] = {}
    for (prompt, place, _), value in zip(ordered, values):
        if value is not None and not 0 <= value <= 1:
            raise UserError(
                f"--reward: {function.spec} returned {value:g} for prompt {prompt.id}; return a bool, or a number from 0 to "
                "1, and add --resume"
            )
        found.setdefault(place, []).append(value)
    whole = {place: [value for value in row if value is not None] for place, row in found.items() if None not in row}
    return lost, {place: [value >= SCORE_CORRECT for value in row] for place, row in whole.items()}


def _unjudged(judge: Judge) -> str:
    if judge.teacher is None:
        return f"--answers: no row has an answer in column {judge.answers!r}; name another, or give --reward or --teacher"
    least = f"--min-agreement {judge.min_agreement:g}"
    return f"{least}: the teacher agrees with itself about no prompt; lower it, and add --resume"


def _rated(row: Row, rate: Fraction, how: Mapping[str, Any]) -> Row:
    row = selected(row, "calibrate", how)
    return replace(row, further={**row.further, "pass_rate": float(rate)})
