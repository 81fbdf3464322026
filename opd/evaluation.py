"""`opd.evaluate`: how often a model's answers are right, with the matrix that says so for each problem and sample."""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opd.errors import UserError
from opd.eval.options import EvalOptions
from opd.eval.suites import Loaded
from opd.files import explain_unwritable, write_text
from opd.records import Prompt

if TYPE_CHECKING:
    from opd.eval.models import Opened
    from opd.eval.provenance import Checkpoint


def evaluate(
    model: str,
    problems: Sequence[Prompt],
    out: str | Path,
    *,
    suite: str = "problems",
    resume: bool = False,
    overwrite: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Samples and grades answers to `problems`; writes `out/SUITE.json` and returns its content.

    `options` are the fields of `opd.eval.options.EvalOptions`. The result holds `accuracy` (avg@k), `pass@k`, `maj@k`,
    counts and rates of each verdict, `intervals` (95 %), `notes`, and `rows`, the problem x sample matrix. The responses lie
    in `out/SUITE.samples.jsonl`. Raises `UserError`.
    """
    loaded = Loaded(suite, problems)
    return evaluate_suites(model, [loaded], Path(out), EvalOptions(**options), resume=resume, overwrite=overwrite)[0]


def evaluate_suites(
    model: str,
    suites: Sequence[Loaded],
    out: Path,
    options: EvalOptions,
    *,
    resume: bool = False,
    overwrite: bool = False,
    checkpoint: "Checkpoint | None" = None,
    about: Mapping[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """As `evaluate`, for several suites with one loading of the model.

    `checkpoint` is what `model` is of a run: its selection and its training prompts are then held against the problems.
    `about` goes into each result's `settings`.
    """
    for suite in suites:
        graded = options.reward or suite.reward
        without = next((one.id for one in suite.problems if one.answer is None and one.task is None), None)
        if graded is None and without is not None:
            raise UserError(f"--answer: {without} of {suite.name} has no answer; name the column, or set --reward")
    with explain_unwritable(out):
        out.mkdir(parents=True, exist_ok=True)
    from opd.eval.provenance import write_card

    begin, settings = {"resume": resume, "overwrite": overwrite}, {**options.fixing_numbers(), **(about or {})}
    results: list[dict[str, Any]] = []

    def finished(suite: Loaded, body: Mapping[str, Any]) -> None:
        overlap, notes = _provenance(checkpoint, suite.problems) if checkpoint else (None, [])
        result = {
            "suite": suite.name,
            "model": f"{checkpoint.run.name}/{checkpoint.path.name}" if checkpoint else public_name(model),
            "step": checkpoint.step if checkpoint else None,
            "settings": {**settings, "template": None} if any(one.task for one in suite.problems) else settings,
            **body,
            "overlap": overlap,
            "notes": [*notes, *suite.notes, *body["notes"]],
        }
        write_text(out / f"{suite.name}.json", json.dumps(result, ensure_ascii=False) + "\n")
        results.append(result)
        if checkpoint:
            write_card(checkpoint)

    asyncio.run(_evaluate_all(model, suites, out, options, begin, finished))
    return results


async def _evaluate_all(
    model: str,
    suites: Sequence[Loaded],
    out: Path,
    options: EvalOptions,
    begin: Mapping[str, bool],
    finished: Callable[[Loaded, Mapping[str, Any]], None],
) -> None:
    """One suite after the other, each `finished` before the next begins."""
    from opd.eval.models import open_model
    from opd.progress import counting_bar

    async with open_model(model, options) as opened:
        with counting_bar() as bar:
            for suite in suites:
                body = await _evaluate_one(opened, suite, out, options, begin, bar)
                finished(suite, body)
                bar.console.print(_line(suite.name, body), highlight=False, markup=False, soft_wrap=True)


def _line(name: str, body: Mapping[str, Any]) -> str:
    """A result in one line for people."""
    low, high = (100 * limit for limit in body["intervals"]["accuracy"])
    kinds = {"wrong": "wrong", "no_answer": "no answer", "truncated": "truncated", "timeout": "timed out"}
    rates = ", ".join(f"{shown} {body[f'{kind}_rate']:.1%}" for kind, shown in kinds.items())
    return f"{name}: accuracy {100 * body['accuracy']:.1f} % [{low:.1f}, {high:.1f}]; {rates}"


async def _evaluate_one(
    opened: "Opened", suite: Loaded, out: Path, options: EvalOptions, begin: Mapping[str, bool], bar: Any
) -> dict[str, Any]:
    """Samples what is left of one suite, and grades all of it."""
    from opd.eval.evaluate import fitting, matrix
    from opd.eval.grading import Grader
    from opd.eval.sampling import sample_to_file
    from opd.eval.summary import summarise

    problems, contexts = suite.problems, opened.contexts
    ids = fitting(problems, contexts)
    with Grader(options.time_limit_s, verifier=options.reward or suite.reward) as grader:
        path = out / f"{suite.name}.samples.jsonl"
        again, anew = begin["resume"], begin["overwrite"]
        samples = await sample_to_file(opened, problems, ids, path, options, bar, resume=again, overwrite=anew)
        rows = matrix(problems, samples, grader)
    summary = summarise(rows)
    skipped = len(problems) - len(ids)
    short = sum(contexts.room(context) < options.max_new_tokens for context in ids.values())
    notes = [f"{skipped} problems are longer than the context and were left out"] if skipped else []
    if short:
        limit = f"{options.max_new_tokens} tokens in a context of {contexts.max_context}"
        notes.append(f"{short} problems leave room for fewer than {limit}")
    return {**summary, "num_skipped": skipped, "notes": [*notes, summary["power_note"]], "rows": rows}


def _provenance(checkpoint: "Checkpoint", problems: Sequence[Prompt]) -> tuple[dict[str, Any] | None, list[str]]:
    """Overlap with the training prompts of the checkpoint's run, and what a reader must know."""
    from opd.eval.provenance import overlap_notes, selection_notes, training_overlap

    overlap, notes = training_overlap(checkpoint.config, problems), selection_notes(checkpoint, problems)
    if overlap is None:
        notes.append("the run's training prompts cannot be read (any more), so their overlap with these problems is unknown")
    return overlap, [*notes, *overlap_notes(overlap)]


def public_name(model: str) -> str:
    """A model's name for others to read: a folder's own name without the way to it."""
    return Path(model).name if Path(model).expanduser().is_dir() else model
