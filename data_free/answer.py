"""A teacher answers prompts: the data of a cold start (CompassOPD, arXiv 2609.10154, A.4), for `opd sft`.

The rows are in TRL's conversational prompt-completion format, which `datasets.load_dataset` reads.
"""

import asyncio
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from opd.data_free.pool import check_out
from opd.data_free.thinking import OPEN_THOUGHT
from opd.errors import UserError
from opd.eval.options import EvalOptions
from opd.eval.samples import Pair, Sampled
from opd.files import explain_unwritable, write_text
from opd.records import Prompt


def answer_prompts(
    teacher: str,
    prompts: Sequence[Prompt],
    out: Path,
    options: EvalOptions,
    *,
    data: str,
    resume: bool = False,
    overwrite: bool = False,
    about: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Writes the teacher's answers that ended normally to `out` (.jsonl) and returns what lies beside it in `.about.json`.

    Every completion, cut short ones too, is kept in `.samples.jsonl`, from which a killed command goes on. `data` is where
    the prompts came from, and is never overwritten; `about` is added to what is told of the file's making. Raises
    `UserError`, also when no answer is left: `out` is then as it was.
    """
    _check_out(out, data, resume=resume, overwrite=overwrite)
    _check_prompts(prompts)
    with explain_unwritable(out.parent):
        out.parent.mkdir(parents=True, exist_ok=True)
    rows, facts = asyncio.run(_answer(teacher, prompts, out, options, {"resume": resume, "overwrite": overwrite}))
    if not rows:
        raise UserError(_none_left(facts, options))
    content = {**facts, **options.fixing_numbers(), "data": Path(data).name, **(about or {})}
    write_text(out, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    write_text(out.with_suffix(".about.json"), json.dumps(content, ensure_ascii=False, indent=2) + "\n")
    return content


def _check_out(out: Path, data: str, *, resume: bool, overwrite: bool) -> None:
    """Refuses to write over the prompts, or over what is not to be touched."""
    endings = (".samples.jsonl", ".about.json")
    there = check_out(out, Path(data).expanduser(), overwrite=overwrite, resume=resume, beside=endings)
    samples = out.with_suffix(".samples.jsonl")
    if there and resume and not _holds_samples(samples):
        raise UserError(
            f"--resume: {there[0]} belongs to no interrupted answer file (no completions in {samples.name}); "
            "name another --out, or replace it with --overwrite"
        )


def _holds_samples(samples: Path) -> bool:
    """Whether its first line can be the header of completions; whether it is the right one is seen when they are read."""
    try:
        with samples.open(encoding="utf-8", errors="replace") as lines:
            return isinstance(json.loads(lines.readline()), dict)
    except (OSError, ValueError):
        return False


def _check_prompts(prompts: Sequence[Prompt]) -> None:
    for prompt in prompts:
        for message in prompt.messages:
            if message.get("content") is None and not message.get("tool_calls"):
                raise UserError(f"--data: {prompt.id}: a {message['role']} message has no content; write its text")


def _none_left(facts: Mapping[str, Any], options: EvalOptions) -> str:
    if cut := facts["num_truncated"]:
        return (
            f"--max-new-tokens is {options.max_new_tokens}: no answer is left ({cut} cut short, {facts['num_empty']} "
            "without text); raise it, and add --overwrite"
        )
    return "--teacher: every answer is empty; name another teacher or --template, and add --overwrite"


async def _answer(
    teacher: str, prompts: Sequence[Prompt], out: Path, options: EvalOptions, begin: Mapping[str, bool]
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    from opd.data_free.asking import ask
    from opd.evaluation import public_name
    from opd.tokenization import render_text

    asked = await ask(teacher, prompts, out.with_suffix(".samples.jsonl"), options, begin, ("--teacher", "--data"))
    openings = {place: OPEN_THOUGHT.search(render_text(asked.tokenizer, prompts[place])) for place in asked.ids}
    thoughts = {place: found.group() for place, found in openings.items() if found}
    rows, counts = training_rows(prompts, asked.samples, thoughts)
    facts = {"teacher": public_name(teacher), "identity": asked.identity, "num_prompts": len(prompts)}
    return rows, {**facts, "num_skipped": len(prompts) - len(asked.ids), **counts}


def training_rows(
    prompts: Sequence[Prompt], samples: Mapping[Pair, Sampled], thoughts: Mapping[int, str]
) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """A row for each answer that ended normally, in the order of the prompts, and how many of each kind there were.

    `thoughts`: what the template wrote at the end of a prompt to open the teacher's reasoning, by the prompt's place; it
    is part of the answer that a student is to give.
    """
    rows: list[dict[str, Any]] = []
    counts: Counter[str] = Counter(dict.fromkeys(("num_answers", "num_truncated", "num_empty", "num_tokens"), 0))
    for (place, sample), sampled in sorted(samples.items()):
        if sampled.finish != "eos":
            counts["num_truncated"] += 1
        elif not sampled.response.strip():
            counts["num_empty"] += 1
        else:
            counts["num_answers"] += 1
            counts["num_tokens"] += sampled.num_tokens
            rows.append(_row(prompts[place], sample, thoughts.get(place, "") + sampled.response))
    return rows, dict(counts)


def _row(prompt: Prompt, sample: int, content: str) -> dict[str, Any]:
    further: Iterable[tuple[str, Any]] = (("answer", prompt.answer), ("tools", list(prompt.tools)))
    return {
        "id": prompt.id,
        "sample": sample,
        "prompt": [dict(message) for message in prompt.messages],
        "completion": [{"role": "assistant", "content": content}],
        **{name: value for name, value in further if value},
    }
