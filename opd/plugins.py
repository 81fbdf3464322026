"""What a plug-in implements, and what it is given."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from opd.records import Array, Limits, Progress, Prompt, Rollout, ScoreRequest, Scores, SpanMap, Start, Term, Turn

if TYPE_CHECKING:
    from opd.config import RunConfig


class Models(Protocol):
    """The frozen models a term maker may ask."""

    def teacher_for(self, prompt: Prompt) -> str:
        """The name of the teacher that the prompt's domain routes to."""
        ...

    async def score(self, model: str, request: ScoreRequest) -> Scores:
        """The answer of the frozen model called `model`, about its own tokens."""
        ...

    def align(self, model: str, rollout: Rollout, turn: Turn) -> SpanMap | None:
        """One of the rollout's turns beside the model's tokens of the same text, after the turns before it as the model's
        own chat template shows them; None where the model reads the student's own tokens."""
        ...

    def same_bytes(self, model: str) -> Array | None:
        """[V] int32: the model's id for each of the student's ids, -1 where it has no token of the same bytes; None where
        the model reads the student's own tokens."""
        ...

    def context(self, prompt: Prompt, num_tokens: int) -> Array | None:
        """[c] int32: the prompt as the student would see it; None where `num_tokens` more would not fit."""
        ...

    def spell(self, token_ids: Array) -> list[bytes]:
        """What each of the student's tokens [n] adds to the text; special tokens add nothing."""
        ...

    def group(self, rollout: Rollout) -> Sequence[Rollout]:
        """The rollouts of the same prompt, this one among them, in the order of their slots. Only for makers with
        `compares_groups`; of others it is the rollout alone."""
        ...

    async def write(self, model: str, prompt: Prompt, number: int, max_new_tokens: int, temperature: float) -> str | None:
        """What the student (`student`) or its frozen start answers to a prompt; None for one that is too long.

        `number` tells the draws of one step apart. With temperature 0 the answer is the likeliest one.
        """
        ...

    def note(self, name: str, value: float, weight: float = 1.0) -> None:
        """Counts `value` towards the step's metric `name`, the mean of all that is noted by this name in all processes.

        `weight` above 0: how often it counts, as the number of tokens of which it is the mean.
        """
        ...


class PromptSource:
    """Yields the prompts of a step as a pure function of the step, so that a resumed run sees the same ones. A plug-in
    derives from this."""

    Config: ClassVar[type]
    digest: str | None = None  # of its prompts, by which a resumed run notices that they are others

    def __init__(self, config: Any, seed: int) -> None: ...

    @classmethod
    def preview(cls, config: Any, seed: int) -> "PromptSource | None":
        """What stands for the source while a recipe is checked, where that costs nothing; prompts that are still to be made
        have other texts there. None: it is not looked at before a run."""
        return None

    def known(self) -> Sequence[Prompt]:
        """Every prompt it can yield, as far as they are known beforehand: compared with the evaluation's problems."""
        return ()

    def at(self, step: int, attempt: int, count: int) -> Sequence[Prompt]:
        """`count` prompts for `step` (from 0); `attempt` counts the times a step asked again."""
        raise NotImplementedError


class RolloutController:
    """Chooses where a rollout starts and when it stops. A plug-in derives from this and overrides what it needs.

    Decisions must follow from what it is shown alone, never from when it is shown. Every process has one of its own, and
    all of them are shown the same rollouts in the same order, so that they stay equal.
    """

    Config: ClassVar[type]
    needs_scores: bool = False  # whether it looks at the teacher's log-probs, which then come while the student decodes
    notes: Sequence[str] = ()  # what the user should know about its settings

    def __init__(self, config: Any, run: "RunConfig") -> None: ...

    @staticmethod
    def check(config: Any, run: "RunConfig") -> None:
        """Raises `UserError` when the recipe as a whole cannot work with it."""

    def start(self, prompt: Prompt, step: int, slot: int) -> Start | None:
        """Where the rollout of this slot begins; None: at its beginning. Asked for all slots before the first is sampled."""
        return None

    def limits(self, step: int) -> Limits:
        """The most that a rollout of this step may have; the least of all controllers' holds."""
        return Limits()

    def stops(self, progress: Progress) -> bool:
        """Whether the rollout ends here. Asked after every unit (see `Unit`); what was sampled since is discarded."""
        return False

    def landed(self, step: int, rollouts: Sequence[Rollout]) -> None:
        """The rollouts of `step` of all processes, in the order of their slots, without the student's own top-k; before any
        of the next step is begun."""

    def forget(self) -> None:
        """Teachers, tokenizer or template are not those that it has seen so far: earlier rollouts no longer count."""

    def figures(self) -> Mapping[str, float]:
        """Its own metrics, after each step."""
        return {}

    def state_dict(self) -> tuple[dict[str, Any], dict[str, Array]]:
        """What a resumed run needs: JSON values, and arrays by name."""
        return {}, {}

    def load_state_dict(self, state: Mapping[str, Any], arrays: Mapping[str, Array]) -> None: ...


class TermMaker:
    """Asks frozen models for what it needs and turns the answers into terms of the loss. A plug-in derives from this and
    says where it differs."""

    Config: ClassVar[type]
    num_student_topk: int = 0  # how many of the student's own most likely tokens it wants with each sampled one
    needs_teacher: bool = True  # whether it asks the prompt's teacher, so that a recipe must have one
    needs_hidden: bool = False  # whether it asks for hidden states, so that the learner needs the models' output heads
    needs_reference: bool = False  # whether its terms refer to the student's frozen start, which the learner then runs too
    needs_weak_reference: ClassVar[bool] = False  # whether it compares a teacher with the weak reference of its family
    needs_answers: ClassVar[bool] = False  # whether it reads the answers of prompts, so that each must have one
    compares_groups: ClassVar[bool] = False  # whether it compares the rollouts of one prompt, which one process then has
    generates: Sequence[str] = ()  # what is sampled for it beside the rollouts that are trained, in words
    across_tokenizers: bool = False  # whether it can learn from a teacher that reads with another tokenizer

    def __init__(self, config: Any, run: "RunConfig") -> None: ...

    @staticmethod
    def check(config: Any, run: "RunConfig") -> None:
        """Raises `UserError` when the recipe as a whole cannot work with it."""

    @staticmethod
    def check_files(config: Any) -> None:
        """Raises `UserError` for a file that the config names and that is not there."""

    @staticmethod
    def needs_start(config: Any) -> bool:
        """Whether it asks the student's frozen start (`opd.teachers.config.START`), which is then loaded."""
        return False

    def warning(self, figures: Mapping[str, float]) -> str | None:
        """What the user should change in view of a step's metrics, in one line; told once a run. None: nothing."""
        return None

    def keeps(self, group: Sequence[Rollout], attempt: int) -> bool:
        """Whether the rollouts of one prompt may teach. Else another prompt takes their place, as attempt `attempt + 1`.
        Only asked with `compares_groups`. A maker that ever says no must refuse `lookahead`: a checkpoint cannot tell of
        which attempt a rollout in flight is."""
        return True

    async def collect(self, rollout: Rollout, models: Models) -> list[Term]:
        """The terms of one rollout."""
        raise NotImplementedError


class Mask:
    """Lowers the weight of some of a rollout's tokens in every term, and leaves them in the context. A plug-in derives from
    this."""

    Config: ClassVar[type]
    counted: bool = True  # whether a token of weight 0 still counts in the normaliser

    def __init__(self, config: Any, run: "RunConfig") -> None: ...

    @staticmethod
    def check(config: Any, run: "RunConfig") -> None:
        """Raises `UserError` when the recipe as a whole cannot work with it."""

    def warning(self, figures: Mapping[str, float]) -> str | None:
        """See `TermMaker.warning`."""
        return None

    def weights(self, rollout: Rollout, models: Models) -> Array:
        """[n] float32 from 0 to 1: the weight of each sampled token of all turns."""
        raise NotImplementedError
