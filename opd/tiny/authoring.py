"""Two tasks, and teachers that not only solve the problems of one but write them when asked to: lessons for data-free OPD.

Such a teacher learns worked solutions and, after `INSTRUCTION`, problems of its task drawn at random. The student of two
such teachers learns a little of both tasks.

Shapes: B examples, P prompt tokens, R response tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerFast

from opd.tiny import arithmetic, subtraction
from opd.tiny.arithmetic import Problem
from opd.tiny.solutions import encode_prompts, greedy_accuracy, worked
from opd.tiny.subtraction import Difference
from opd.tiny.tokenizer import END, END_ID, PAD_ID
from opd.tiny.training import Batch, Lessons

INSTRUCTION = "Write one challenging {domain} problem. Output only the problem statement."
"""What `opd prompts author` asks by default."""
DOMAINS: dict[str, Any] = {"addition": arithmetic, "subtraction": subtraction}  # modules of the same form
SOLVED_BATCHES = {"addition": 7, "subtraction": 4}
"""Batches of worked solutions to each one of problems that are to be written; these have longer prompts, and are easier, but
a subtraction's second number must not be above the first."""
NUM_VALIDATION = 500
"""Problems of a task's validation split that are solved, and problems that are written, to measure a member."""


def read(domain: str, text: str) -> Problem | Difference | None:
    """The problem of that task which `text` states, or None where it states none."""
    found = re.fullmatch(r"(\d{3})([+-])(\d{3})", text, re.ASCII)
    if found is None or found[2] != {"addition": "+", "subtraction": "-"}[domain]:
        return None
    a, b = int(found[1]), int(found[3])
    if domain == "addition":
        return Problem(a, b)
    return Difference(a, b) if a >= b else None


def author_batches(domain: str, tokenizer: PreTrainedTokenizerFast, size: int, seed: str) -> Iterator[Batch]:
    """Endless batches of `size`, each all of worked solutions or all of problems that are to be written."""
    solved, written = (DOMAINS[domain].supervised_problems(name) for name in (seed, f"{seed} written"))
    while True:
        for _ in range(SOLVED_BATCHES[domain]):
            yield worked(tokenizer, list(islice(solved, size)))
        yield authored(tokenizer, domain, list(islice(written, size)))


def authored(tokenizer: PreTrainedTokenizerFast, domain: str, problems: Sequence[Problem | Difference]) -> Batch:
    """The instruction, answered with each of the problems, which are all of the same length."""
    responses = tokenizer([problem.text + END for problem in problems], return_tensors="pt").input_ids
    return Batch(encode_prompts(tokenizer, [INSTRUCTION.format(domain=domain)] * len(problems)), responses, responses)


def author_accuracy(domain: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> float:
    """The lower of two shares: of validation problems that are solved greedily, and of different problems among those that
    are written at temperature 1."""
    texts = written(domain, model, tokenizer, NUM_VALIDATION)
    well_formed = {text for text in texts if read(domain, text)}
    return min(solved_share(domain, model, tokenizer), len(well_formed) / len(texts))


def written(domain: str, model: Any, tokenizer: PreTrainedTokenizerFast, num_texts: int) -> list[str]:
    """What the model answers to the instruction at temperature 1; torch's default generator is the source of chance."""
    prompts = encode_prompts(tokenizer, [INSTRUCTION.format(domain=domain)] * num_texts)
    tokens = model.generate(prompts, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=16)
    responses = tokens[:, prompts.shape[1] :].tolist()
    ended = [row[: row.index(END_ID)] if END_ID in row else [PAD_ID] for row in responses]
    return [str(tokenizer.decode(row)) for row in ended]  # one without an end is no problem: it reads as the pad mark


def solved_share(domain: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> float:
    """Greedy accuracy on the task's validation problems."""
    return greedy_accuracy(model, tokenizer, DOMAINS[domain].splits()["validation"][:NUM_VALIDATION])


def pair_batches(tokenizer: PreTrainedTokenizerFast, size: int, seed: str) -> Iterator[Batch]:
    """Endless batches of `size` worked solutions, half of each task's."""
    streams = [domain.supervised_problems(f"{seed} {name}") for name, domain in DOMAINS.items()]
    while True:
        yield worked(tokenizer, [problem for stream in streams for problem in islice(stream, size // len(streams))])


def pair_accuracy(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> float:
    """Greedy accuracy on the validation problems of the task that is known less well."""
    return min(solved_share(domain, model, tokenizer) for domain in DOMAINS)


AUTHOR_LESSONS = {domain: Lessons(partial(author_batches, domain), partial(author_accuracy, domain)) for domain in DOMAINS}
PAIR_LESSONS = Lessons(pair_batches, pair_accuracy)
