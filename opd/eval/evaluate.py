"""Sampling a model's answers to problems, and the problem x sample matrix of what became of them."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from accelerate.utils import gather_object

from opd.contexts import Contexts
from opd.envs.formats import tool_format
from opd.errors import UserError
from opd.eval.grading import SCORE_CORRECT, Grade, Grader, Item
from opd.eval.overlap import problem_key
from opd.eval.repetition import is_repetitive
from opd.eval.samples import Pair, Sampled
from opd.eval.summary import summarise
from opd.records import DEFAULT_DOMAIN, Array, Prompt, Sampling
from opd.rollouts import InPlay, Player
from opd.students.noise import slot_seed
from opd.students.sampler import Sampler


async def sample_pairs(
    sampler: Sampler,
    problems: Sequence[Prompt],
    contexts: Contexts,
    sampling: Sampling,
    seed: int,
    pairs: Sequence[Pair],
    done: Callable[[Sampled], None],
) -> None:
    """Samples these (problem, sample) pairs together, of problems that fit; `done` is given each as it ends."""

    async def one(index: int, sample: int) -> None:
        rollout = await player.play(problems[index], sample, slot_seed(seed, index, sample))
        assert rollout is not None, "of the problems only those that fit are sampled"
        said = [str(contexts.tokenizer.decode(turn.sampled_ids, skip_special_tokens=True)) for turn in rollout.turns]
        repetitive = is_repetitive(np.concatenate([turn.sampled_ids for turn in rollout.turns]))
        shown = "\n".join(said)
        done(Sampled(index, sample, shown, rollout.num_tokens, rollout.finish, repetitive, rollout.outcome))

    player = Player(sampler, contexts, sampling, InPlay())
    await asyncio.gather(*(one(index, sample) for index, sample in pairs))


def fitting(problems: Sequence[Prompt], contexts: Contexts) -> dict[int, Array]:
    """The prompts of the problems that leave room for an answer, by place.

    Raises `UserError` when there are none, and for episodes with a model whose form of tool calls is not known.
    """
    if episodes := [problem for problem in problems if problem.task is not None]:
        tool_format(contexts.tokenizer, "the model", tools=any(one.tools for one in episodes))
    ids = {place: context for place, problem in enumerate(problems) if (context := contexts(problem)) is not None}
    if not ids:
        raise UserError(f"every problem is longer than the context of {contexts.max_context} tokens")
    return ids


def matrix(
    problems: Sequence[Prompt], samples: Mapping[Pair, Sampled], grader: Grader, *, responses: bool = False
) -> list[dict[str, Any]]:
    """A row a problem that has samples: verdicts, extracted answers and classes of all its samples.

    `responses` adds what was written. Blocks while it grades.
    """
    by_problem: dict[int, list[Sampled]] = {}
    for _, sampled in sorted(samples.items()):
        by_problem.setdefault(sampled.index, []).append(sampled)
    items = [
        Item.of(problems[index], sampled.response, sampled.finish == "length")
        for index, row in by_problem.items()
        for sampled in row
        if problems[index].task is None
    ]
    graded = iter(grader.grade_many(items))
    grades = [
        [next(graded) if problems[index].task is None else _of_outcome(sampled) for sampled in row]
        for index, row in by_problem.items()
    ]
    extracted = [[grade.extracted for grade in row] for row in grades]
    rows = []
    for (index, row), found, verdicts, classes in zip(
        by_problem.items(), extracted, grades, grader.classes(extracted, grades)
    ):
        problem = problems[index]
        rows.append(
            {
                "id": problem.id,
                "key": problem_key(problem.problem),
                "answer": problem.answer,
                "verdicts": [grade.verdict for grade in verdicts],
                "extracted": found,
                "scores": [grade.reward for grade in verdicts],
                "classes": classes,
                "num_tokens": [sampled.num_tokens for sampled in row],
                "finish": [sampled.finish for sampled in row],
                "repetitive": [sampled.repetitive for sampled in row],
                "index": index,
                **({} if problem.domain == DEFAULT_DOMAIN else {"domain": problem.domain}),
                **({"responses": [sampled.response for sampled in row]} if responses else {}),
            }
        )
    return rows


async def accuracy(
    sampler: Sampler,
    problems: Sequence[Prompt],
    contexts: Contexts,
    grader: Grader,
    sampling: Sampling,
    *,
    samples: int,
    seed: int,
    rank: int = 0,
    num_processes: int = 1,
) -> dict[str, Any]:
    """Samples and grades at once, for use while training; problems are dealt to the processes by index.

    Returns `opd.eval.summary.summarise` of the rows, `num_skipped` problems that are longer than the context, and `rows`
    with the responses.
    """
    ids = fitting(problems, contexts)
    mine = [(place, sample) for place in list(ids)[rank::num_processes] for sample in range(samples)]
    found: dict[Pair, Sampled] = {}

    def done(sampled: Sampled) -> None:
        found[sampled.index, sampled.sample] = sampled

    await sample_pairs(sampler, problems, contexts, sampling, seed, mine, done)
    rows = sorted(gather_object(matrix(problems, found, grader, responses=True)), key=lambda row: row["index"])
    return {**summarise(rows), "num_skipped": len(problems) - len(ids), "rows": rows}


def _of_outcome(sampled: Sampled) -> Grade:
    """The verdict of the environment that the episode took place in; one that says nothing is no success."""
    if sampled.outcome is None:
        return Grade("no_answer", None)
    failed = "truncated" if sampled.finish == "length" else "wrong"
    return Grade("correct" if sampled.outcome >= SCORE_CORRECT else failed, None, sampled.outcome)
