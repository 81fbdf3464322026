"""How far a model agrees with itself about a problem: which answer most of its samples give, and how many do."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from opd.data import Columns, DatasetConfig, prompt_of
from opd.data_free.asking import ask
from opd.data_free.pool import Row
from opd.eval.answers.extract import extract_answer
from opd.eval.grading import Grade, Grader
from opd.eval.options import EvalOptions
from opd.eval.samples import Pair, Sampled
from opd.evaluation import public_name
from opd.records import Prompt
from opd.reward.rewards import majority


@dataclass(frozen=True)
class Agreement:
    """`answer`: the most frequent one as one sample wrote it, the first of those that are as frequent; None where no sample
    states an answer. `share`: of all samples, those that give it."""

    answer: str | None
    share: float


def agreements(samples: Mapping[Pair, Sampled], grader: Grader) -> dict[int, Agreement]:
    """For each prompt that has samples, by place. Answers are the same as `opd eval` has it: 1/2 is 0.5. Blocks."""
    rows: dict[int, list[str | None]] = {}
    for (place, _), sampled in sorted(samples.items()):
        rows.setdefault(place, []).append(extract_answer(sampled.response))
    grades = [[Grade("no_answer" if answer is None else "wrong", answer) for answer in row] for row in rows.values()]
    found = {}
    for (place, answers), classes in zip(rows.items(), grader.classes(list(rows.values()), grades)):
        votes = majority(classes)
        first = answers[votes.index(1.0)] if any(votes) else None
        found[place] = Agreement(first, sum(votes) / len(votes))
    return found


def pool_prompts(rows: Sequence[Row], style: DatasetConfig, field: str, answer: str = "answer") -> list[Prompt]:
    """The rows as prompts, put to a model in the words of `style`; `answer` is their column of the answer."""
    config = DatasetConfig(
        "", columns=Columns("prompt", answer), template=style.template, system=style.system,
        chat_template_kwargs=style.chat_template_kwargs,
    )  # fmt: skip
    return [prompt_of(row.columns, row.id, config, field) for row in rows]


def solvability(
    teacher: str, prompts: Sequence[Prompt], samples: Path, options: EvalOptions, begin: Mapping[str, bool], field: str
) -> dict[str, Any]:
    """The facts about a pool that take the teacher's answers, as JSON holds them. Raises `UserError`."""
    asked = asyncio.run(ask(teacher, prompts, samples, options, begin, ("--teacher", field)))
    with Grader() as grader:
        found = agreements(asked.samples, grader)
    shares = [one.share for one in found.values()]
    votes = [round(share * options.samples) for share in shares]
    return {
        "teacher": public_name(teacher),
        "identity": asked.identity,
        **options.fixing_numbers(),
        "num_asked": len(found),
        "num_skipped": len(prompts) - len(asked.ids),
        "answered": sum(one.answer is not None for one in found.values()) / len(found),
        "agreement": float(np.mean(shares)),
        "histogram": {f"{k}/{options.samples}": votes.count(k) for k in range(options.samples + 1)},
    }
