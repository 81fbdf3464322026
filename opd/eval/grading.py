"""Grading: is a response's final answer right?

Texts, numbers and structure settle most answers in the calling process, in time linear in their length. Formulas are
compared in worker processes under a hard time limit, since computer algebra may not end (`9^{9^{9^9}}`); so is a user's own
verifier run.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from opd.errors import UserError
from opd.eval.answers.algebra import algebraically_equal
from opd.eval.answers.classes import vote_classes
from opd.eval.answers.equality import equivalent, same_value
from opd.eval.answers.extract import extract_answer
from opd.eval.pool import TaskError, WorkerPool
from opd.eval.verifier import load_verifier, verifier_score

if TYPE_CHECKING:  # a worker that compares answers needs no numpy
    from opd.records import Prompt

Verdict = Literal["correct", "wrong", "no_answer", "truncated", "timeout"]

MEMORY_LIMIT_GIB = 4.0  # per worker without a verifier: a runaway power fails before it hurts its host
SCORE_CORRECT = 0.5  # a verifier's score from here on counts as correct


@dataclass(frozen=True)
class Grade:
    """A verdict, the answer it is about (None if none was found) and, with a verifier, the verifier's score."""

    verdict: Verdict
    extracted: str | None
    score: float | None = None

    @property
    def reward(self) -> float:
        """The verifier's score; without one, 1 for a correct answer and 0 for anything else."""
        return float(self.verdict == "correct") if self.score is None else self.score


@dataclass(frozen=True)
class Item:
    """One response to grade. `answer` is the correct answer, or several of which any will do.

    `truncated`: the response ended at its token limit. `prompt`: the prompt's record, for a verifier.
    """

    response: str
    answer: str | list[str] | None
    truncated: bool = False
    prompt: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, prompt: "Prompt", response: str, truncated: bool) -> "Item":
        """A response to a prompt of a data set."""
        answer = list(prompt.answer) if isinstance(prompt.answer, tuple) else prompt.answer
        messages = [dict(message) for message in prompt.messages]
        return cls(response, answer, truncated, {"id": prompt.id, "messages": messages, "text": prompt.text, **prompt.meta})

    @property
    def answers(self) -> tuple[str, ...]:
        """The correct answers. Raises UserError if there are none."""
        answers = (self.answer,) if isinstance(self.answer, str) else tuple(self.answer or ())
        if not answers:
            raise UserError("answer: a prompt has no correct answer; add one, or set `reward: FILE.py:FUNCTION`")
        return answers


def grade(response: str, answer: str | list[str], truncated: bool = False) -> Grade:
    """Grades in the calling process and with no time limit: for trusted answers; `Grader` is for sampled ones.

    An answer found in a truncated response is graded as any other. Raises UserError if there is no correct answer.
    """
    item = Item(response, answer, truncated)
    extracted = extract_answer(response)
    return _settle(item, extracted) or _graded(equivalent((extracted or "", item.answers)), extracted)


def _settle(item: Item, extracted: str | None) -> Grade | None:
    """The grade, if it takes no computer algebra."""
    answers = item.answers
    if extracted is None:
        return Grade("truncated" if item.truncated else "no_answer", None)
    same = [same_value(extracted, answer) for answer in answers]
    if any(same) or None not in same:
        return _graded(any(same), extracted)
    return None


def _graded(correct: bool, extracted: str | None) -> Grade:
    return Grade("correct" if correct else "wrong", extracted)


class Grader:
    """Grades many responses at once; each costs at most `limit_s` seconds, after which its verdict is "timeout".

    A worker that hangs is killed and replaced; an item that crashes its worker is tried once more, then "timeout" too.
    Workers start when the first item needs one. Any thread may call `grade_many`; in asyncio use `asyncio.to_thread`.

    `verifier` is a user's own `FILE.py:FUNCTION` (see `load_verifier`), which then decides instead of the answers'
    equality. It may judge free text, so what it refuses is "wrong"; where the function has `judges_extracted = True`, since
    it judges what `extract_answer` finds, a response without an answer is "no_answer". Raises UserError if it cannot be
    loaded or an option is out of range.
    """

    def __init__(self, limit_s: float = 5.0, num_workers: int | None = None, verifier: str | None = None):
        if limit_s <= 0 or (num_workers is not None and num_workers < 1):
            raise UserError(f"limit_s = {limit_s} and num_workers = {num_workers}: both must be positive")
        self._judges_extracted = False
        if verifier is not None:  # its mistakes show here, not in a worker
            self._judges_extracted = getattr(load_verifier(verifier), "judges_extracted", False)
            verifier = str(Path(verifier).expanduser().absolute())  # workers may start in another folder
        self.verifier = verifier
        num_workers = num_workers or _default_workers()
        self._equality = WorkerPool(partial(_setup, None), num_workers, limit_s)
        self._pool = WorkerPool(partial(_setup, verifier), num_workers, limit_s) if verifier else self._equality

    def grade_many(self, items: Sequence[Item]) -> list[Grade]:
        """The items' grades, in order. Blocks.

        Raises UserError if an item has no correct answer or the verifier raises, RuntimeError if workers do not start.
        """
        return self._verify(items) if self.verifier else self._compare(items)

    def _compare(self, items: Sequence[Item]) -> list[Grade]:
        extracted = [extract_answer(item.response) for item in items]
        grades = [_settle(item, answer) for item, answer in zip(items, extracted)]
        # Samples of one prompt often share an answer: each distinct comparison is made once.
        pairs = {(extracted[i], items[i].answers): None for i, known in enumerate(grades) if known is None}
        results = dict(zip(pairs, self._pool.run(list(pairs))))

        def compared(item: Item, answer: str | None) -> Grade:
            correct = results[answer, item.answers]
            return Grade("timeout", answer) if correct is None else _graded(correct, answer)

        return [known or compared(item, answer) for known, item, answer in zip(grades, items, extracted)]

    def _verify(self, items: Sequence[Item]) -> list[Grade]:
        try:
            scores = self._pool.run([(item.response, item.answer, item.prompt) for item in items])
        except TaskError as error:
            raise UserError(f"reward: {self.verifier} failed on item {error.index}: {error.message}") from None
        return [_scored(item, score, self._judges_extracted) for item, score in zip(items, scores)]

    def classes(
        self, extracted_rows: Sequence[Sequence[str | None]], grade_rows: Sequence[Sequence[Grade]]
    ) -> list[list[int | None]]:
        """Classes of equal answers within each problem, for majority voting: see `vote_classes`. Blocks.

        Rows are problems, with one entry a sample in both arguments. Raises RuntimeError if workers do not start.
        """
        verdicts = [[grade.verdict for grade in row] for row in grade_rows]
        return vote_classes(extracted_rows, verdicts, self._equality.run)

    def close(self) -> None:
        """Ends the workers. Forgetting it is harmless: they end with the object and with the process."""
        self._pool.close()
        self._equality.close()

    def __enter__(self) -> "Grader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _default_workers() -> int:
    return min(8, len(os.sched_getaffinity(0)))


def _setup(verifier: str | None):
    """What a worker does: compares answers, or runs the user's verifier."""
    if verifier is not None:
        return partial(verifier_score, load_verifier(verifier))
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = int(MEMORY_LIMIT_GIB * 2**30)
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
    equivalent(("x", ("y",)))  # imports mpmath, and below math-verify with its parser, before the time limit counts
    algebraically_equal("x", "y")
    return equivalent


def _scored(item: Item, score: float | None, judges_extracted: bool) -> Grade:
    extracted = extract_answer(item.response)
    if score is None:
        return Grade("timeout", extracted, 0.0)
    if score >= SCORE_CORRECT:
        return Grade("correct", extracted, score)
    if extracted is None and (item.truncated or judges_extracted):
        return Grade("truncated" if item.truncated else "no_answer", None, score)
    return Grade("wrong", extracted, score)
