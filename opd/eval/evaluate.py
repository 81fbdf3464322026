"""Accuracy on held-out problems, and the reverse KL to the teacher on the student's own rollouts of them."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from accelerate.utils import gather_object

from opd.errors import UserError
from opd.eval.grading import Grade, Grader, Item, summarise
from opd.records import Array, Prompt, Rollout, Sampling
from opd.rollouts import Contexts, sample_rollout
from opd.students.noise import slot_seed
from opd.students.sampler import Sampler


async def sample_all(
    sampler: Sampler,
    prompts: Sequence[Prompt],
    contexts: Contexts,
    sampling: Sampling,
    seed: int,
    samples: int,
    done: Callable[[int], None] = lambda count: None,
) -> list[list[Rollout] | None]:
    """`samples` rollouts of each prompt; None for a prompt that is longer than the context. `done` counts them."""

    async def one(prompt: Prompt, sample: int, ids: Array, sample_seed: int) -> Rollout:
        rollout = await sample_rollout(sampler, prompt, sample, ids, sample_seed, contexts.room(ids), sampling)
        done(1)
        return rollout

    async def row(index: int, prompt: Prompt) -> list[Rollout] | None:
        ids = contexts(prompt)
        if ids is None:
            done(samples)
            return None
        return await asyncio.gather(*(one(prompt, s, ids, slot_seed(seed, index, s)) for s in range(samples)))

    return await asyncio.gather(*(row(index, prompt) for index, prompt in enumerate(prompts)))


async def accuracy(
    sampler: Sampler,
    prompts: Sequence[Prompt],
    contexts: Contexts,
    grader: Grader,
    sampling: Sampling,
    *,
    samples: int,
    seed: int,
    rank: int = 0,
    num_processes: int = 1,
    done: Callable[[int], None] = lambda count: None,
) -> dict[str, Any]:
    """Samples and grades; problems are dealt to the processes by index.

    Returns the summary of `opd.eval.grading.summarise`, response lengths, and `rows`: for each problem its id, the
    verdicts of all samples (the problem x sample matrix), the extracted answers, and the responses. Raises `UserError`
    when no problem fits the context.
    """
    mine = list(range(rank, len(prompts), num_processes))
    results = await sample_all(sampler, [prompts[i] for i in mine], contexts, sampling, seed, samples, done)
    kept = [(i, row) for i, row in zip(mine, results) if row is not None]
    tokenizer = contexts.tokenizer
    texts = [[str(tokenizer.decode(r.turns[0].sampled_ids, skip_special_tokens=True)) for r in row] for _, row in kept]
    items = [
        Item(text, _answer(prompts[i]), rollout.finish == "length", _record(prompts[i]))
        for (i, row), row_texts in zip(kept, texts)
        for rollout, text in zip(row, row_texts)
    ]
    grades = iter(grader.grade_many(items))
    rows = [
        _row(prompts[i], row, row_texts, [next(grades) for _ in row]) | {"index": i}
        for (i, row), row_texts in zip(kept, texts)
    ]
    rows = sorted(gather_object(rows), key=lambda row: row["index"])
    skipped = sum(gather_object([len(mine) - len(kept)]))
    if not rows:
        raise UserError(f"every problem to evaluate is longer than the context of {contexts.max_context} tokens")
    summary = summarise([[Grade(verdict, None) for verdict in row["verdicts"]] for row in rows])
    lengths = [length for row in rows for length in row["num_tokens"]]
    return {**summary, "num_skipped": skipped, "mean_tokens": sum(lengths) / len(lengths), "rows": rows}


def _row(prompt: Prompt, rollouts: Sequence[Rollout], texts: Sequence[str], grades: Sequence[Grade]) -> dict[str, Any]:
    return {
        "id": prompt.id,
        "answer": prompt.answer,
        "verdicts": [grade.verdict for grade in grades],
        "extracted": [grade.extracted for grade in grades],
        "scores": [grade.reward for grade in grades],
        "num_tokens": [rollout.num_tokens for rollout in rollouts],
        "finish": [rollout.finish for rollout in rollouts],
        "responses": list(texts),
    }


def _answer(prompt: Prompt) -> str | list[str] | None:
    return list(prompt.answer) if isinstance(prompt.answer, tuple) else prompt.answer


def _record(prompt: Prompt) -> dict[str, Any]:
    return {"id": prompt.id, "messages": [dict(m) for m in prompt.messages], "text": prompt.text, **prompt.meta}
