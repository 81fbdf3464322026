"""Judges the rollouts of one prompt together: their raw outcomes, which decide, and their scores, which may be shaped.

Label-free outcomes by majority vote are those of TTRL (arXiv 2504.16084).
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from opd.contexts import Contexts
from opd.errors import UserError
from opd.eval.answers.extract import extract_answer
from opd.eval.grading import Grade, Grader, Item
from opd.records import Rollout
from opd.reward.checks import refuse_unanswered
from opd.reward.config import RewardConfig
from opd.reward.functions import Function

Note = Callable[[str, float], None]  # as `opd.plugins.Models.note`


class Rewards:
    """See the module.

    Answers are compared in line, so that nothing goes on meanwhile and a resumed run is the uninterrupted one to the last
    bit. A function of the user's own may take long, so it runs in worker processes while sampling and scoring go on:
    batches then depend on when it returns, and a resumed run repeats to the rounding of other batches.

    Raises `UserError` for a function that cannot be loaded.
    """

    def __init__(self, config: RewardConfig, contexts: Contexts) -> None:
        self.config, self.contexts = config, contexts
        self.grader = Grader(config.time_limit_s)
        specs = {"outcome": config.verifier, "score": config.score}
        self.functions = {
            name: Function(spec, f"reward.{name}", config.time_limit_s) for name, spec in specs.items() if spec is not None
        }
        self.warned = False  # of calls that did not end

    async def judged(self, group: Sequence[Rollout], note: Note) -> list[Rollout]:
        """These rollouts of one prompt with `outcome` (0 to 1) and `score`, in their order.

        A rollout that a controller stopped has neither, since nobody knows what would have come of it, and has no vote on
        the others; one that its environment says nothing about has no score. Rollouts that were judged before are returned
        as they are. For each call of a function, `note` is told whether it ended in time.

        Raises `UserError` for a prompt without an answer where one is needed, an outcome that is not from 0 to 1, and a
        function that fails.
        """
        if any(rollout.score is not None for rollout in group):  # from a checkpoint
            return list(group)
        whole = [rollout for rollout in group if rollout.finish != "stopped"]
        outcomes = await self._outcomes(whole, note)
        scores = await self._scores(whole, outcomes, note)
        found = {rollout.slot: pair for rollout, *pair in zip(whole, outcomes, scores, strict=True)}
        judged = ((rollout, *found.get(rollout.slot, (None, None))) for rollout in group)
        return [replace(rollout, outcome=outcome, score=score) for rollout, outcome, score in judged]

    def review(self, step: int, figures: Mapping[str, float]) -> str | None:
        """A warning, once a run, where calls of step `step` did not end in time; `figures` are the step's, as noted.

        Raises `UserError` where none of a function's calls did: such a step teaches nothing but noise.
        """
        lost = {name: share for name in self.functions if (share := figures.get(timeouts_of(name), 0.0))}
        limit = f"reward.time_limit_s={self.config.time_limit_s:g}"
        said = {
            name: f"reward.{name}: {self.functions[name].spec} took longer than {limit} or ended its process in {share:.1%} "
            f"of the calls of step {step}"
            for name, share in lost.items()
        }
        for name, share in lost.items():
            if share == 1:
                raise UserError(f"{said[name]}; mend it, or raise reward.time_limit_s")
        if self.warned or not lost:
            return None
        self.warned = True
        return f"WARNING: {'; '.join(said.values())}; these count as 0: mend it, or raise reward.time_limit_s"

    async def _outcomes(self, whole: Sequence[Rollout], note: Note) -> list[float | None]:
        if not whole or whole[0].prompt.task is not None:
            return [rollout.outcome for rollout in whole]
        items = [self._item(rollout) for rollout in whole]
        if self.config.outcome == "majority":
            return [*self._agreeing(items)]
        if self.config.verifier is None:
            refuse_unanswered([whole[0].prompt])
            return [grade.reward for grade in self.grader.grade_many(items)]
        outcomes = await self._called("outcome", items, note)
        for outcome in outcomes:
            if not 0 <= outcome <= 1:
                raise UserError(
                    f"reward.outcome: {self.config.outcome} returned {outcome:g} for prompt {whole[0].prompt.id}; an "
                    "outcome is from 0 to 1, anything else is a reward.score"
                )
        return [*outcomes]

    async def _scores(self, whole: Sequence[Rollout], outcomes: Sequence[float | None], note: Note) -> list[float | None]:
        """Nothing of a rollout without an outcome."""
        scores = list(outcomes)
        if "score" in self.functions:
            items = [
                self._item(rollout, outcome=outcome, num_tokens=rollout.num_tokens)
                for rollout, outcome in zip(whole, outcomes)
                if outcome is not None
            ]
            shaped = iter(await self._called("score", items, note))
            scores = [None if outcome is None else next(shaped) for outcome in outcomes]
        cost = self.config.length_cost
        return [None if score is None else score - cost * rollout.num_tokens for rollout, score in zip(whole, scores)]

    async def _called(self, name: str, items: Sequence[Item], note: Note) -> list[float]:
        """What the function says of each item; 0 where it did not end in time."""
        values = await asyncio.to_thread(self.functions[name], items)
        for value in values:
            note(timeouts_of(name), value is None)
        return [0.0 if value is None else value for value in values]

    def _agreeing(self, items: Sequence[Item]) -> list[float]:
        """1 for the answers of the largest class of equal ones, 0 for all others."""
        extracted = [extract_answer(item.response) for item in items]
        grades = [Grade("no_answer" if answer is None else "wrong", answer) for answer in extracted]
        (classes,) = self.grader.classes([extracted], [grades])
        return majority(classes)

    def _item(self, rollout: Rollout, **row: float | None) -> Item:
        """The response as evaluation shows it, and the prompt's record with `row` for a function of the user's own."""
        decode = self.contexts.tokenizer.decode
        said = [str(decode(turn.sampled_ids, skip_special_tokens=True)) for turn in rollout.turns]
        item = Item.of(rollout.prompt, "\n".join(said), rollout.finish == "length")
        return replace(item, prompt={**item.prompt, **row})

    def close(self) -> None:
        """Ends the workers."""
        for one in (self.grader, *self.functions.values()):
            one.close()


def timeouts_of(name: str) -> str:
    """The metric that is the share of the function's calls that ran over the limit or ended their process."""
    return f"reward/{name}_timeouts"


def majority(classes: Sequence[int | None]) -> list[float]:
    """1 for each member of the largest class, 0 for the others; None is no member of any. Of classes of one size the one
    with the lowest number has it, which is the one that appears first."""
    sizes = Counter(one for one in classes if one is not None)
    largest = min(sizes, key=lambda one: (-sizes[one], one), default=None)
    return [float(one is not None and one == largest) for one in classes]
