"""Term maker `self_distillation`: the student learns from itself, told the answer (OPSD, arXiv 2601.18734).

On a rollout y of the plain prompt x, the teacher is the student's own frozen start under a prompt that also holds the
reference answer y*:

    L = mean over t of D( pi_start(. | x, y*, y_<t) || pi_theta(. | x, y_<t) )

with the gradient through the student alone. It differs from plain OPD in the teacher only, which needs no other model: it
is better informed, not stronger. `opd.strategies.comparison` has the forms of D.

The paper leaves D open; its published scripts take the Jensen-Shannon divergence at beta 0.5 over the whole vocabulary,
which is the default here. Negative self-distillation (arXiv 2609.11699) is defined against this method.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from opd.envs.opening import plays_turns
from opd.errors import UserError
from opd.plugins import Models
from opd.records import Prompt, Rollout, Term
from opd.reward.checks import refuse_unanswered
from opd.strategies.comparison import Comparison, ComparisonConfig
from opd.strategies.reprompted import reworded, seen_under, wording
from opd.teachers.config import START
from opd.templates import check_template

if TYPE_CHECKING:
    from opd.config import RunConfig


@dataclass(frozen=True)
class SelfDistillationConfig(ComparisonConfig):
    """The student's frozen start as the teacher, which is shown the answer."""

    divergence: Literal["reverse_kl", "forward_kl", "jsd"] = "jsd"
    """For `topk` and `full`; `sampled` needs `reverse_kl`."""
    template: str = (
        "{prompt}\n\nFor reference, here is a correct answer:\n{answer}\n\n"
        "Make sure that you understand it, then solve the problem yourself, step by step, in your own words."
    )
    """What the teacher reads in place of the last user message (or of a plain prompt's text). {prompt} is that message,
    {problem} the task as the data have it, {answer} the reference answer: what `prompts.columns.answer` names, which may
    be a worked solution. Of several accepted answers it is the first."""


class SelfDistillation(Comparison):
    """See the module."""

    Config = SelfDistillationConfig
    needs_teacher = False
    needs_answers = True

    def __init__(self, config: SelfDistillationConfig, run: "RunConfig") -> None:
        super().__init__(config, run)
        self.template = config.template

    @staticmethod
    def needs_start(config: SelfDistillationConfig) -> bool:
        return True

    @staticmethod
    def check(config: SelfDistillationConfig, run: "RunConfig") -> None:
        field = "terms.self_distillation"
        config.check_for(field, run)
        if config.coverage != "all":
            raise UserError(f"{field}.coverage: has no effect, the student's start reads its tokens; set it to all")
        check_template(f"{field}.template", config.template, ("prompt", "problem", "answer"))
        if "{answer}" not in config.template:
            raise UserError(f"{field}.template: it must contain {{answer}}, or the teacher knows no more than the student")
        if not any(name in config.template for name in ("{prompt}", "{problem}")):
            raise UserError(f"{field}.template: it must contain {{prompt}} or {{problem}}, where the problem goes")
        if plays_turns(run):
            raise UserError(
                f"{field}: prompts open episodes of several turns, which have no reference answer; take single answers, "
                "or a teacher and reverse_kl"
            )

    async def collect(self, rollout: Rollout, models: Models) -> list[Term]:
        """Without a term where the answer makes the prompt too long for the context: the rollout then teaches nothing,
        which the metric `answer_too_long` counts."""
        seen = seen_under(rollout, self._told(rollout.prompt), models)
        models.note("answer_too_long", seen is None)
        return [] if seen is None else [await self.compare(START, seen, models)]

    def _told(self, prompt: Prompt) -> Prompt:
        """The prompt with its answer. Raises `UserError` for one without."""
        refuse_unanswered([prompt], "terms.self_distillation")
        answer = prompt.answer[0] if isinstance(prompt.answer, tuple) else str(prompt.answer)
        asked = wording(prompt)
        return reworded(prompt, self.template, {"prompt": asked, "problem": prompt.problem or asked, "answer": answer})
