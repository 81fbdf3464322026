"""What the section `reward:` must satisfy: its values, the functions that it names, and the prompts' answers."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from opd.errors import UserError
from opd.eval.verifier import locate_verifier
from opd.records import Prompt
from opd.registry import TERM_MAKERS
from opd.reward.config import RewardConfig
from opd.spelling import nearest

if TYPE_CHECKING:
    from opd.config import RunConfig


def check_reward(config: RewardConfig, run: "RunConfig") -> None:
    """Refuses values out of range and those without an effect. Raises `UserError` naming the field."""
    if not 0 <= config.length_cost < math.inf:
        raise UserError(f"reward.length_cost is {config.length_cost}: it must be 0 or more")
    compared = any(TERM_MAKERS.load(name, "terms").compares_groups for name in run.terms)
    for name in ("score", "length_cost"):
        if getattr(config, name) != getattr(RewardConfig, name) and not compared:
            raise UserError(f"reward.{name}: no term of this recipe reads scores, as group_reward does; leave it out")
    if not 0 < config.time_limit_s < math.inf:
        raise UserError(f"reward.time_limit_s is {config.time_limit_s}: it must be above 0")
    if config.verifier is not None and ":" not in config.verifier:
        hint = nearest(config.verifier, ["answer", "majority"])
        raise UserError(f"reward.outcome is {config.outcome!r}: it must be answer, majority or FILE.py:FUNCTION{hint}")
    if run.prompts["type"] == "environment" and config.outcome != "answer":
        raise UserError("reward.outcome: of an episode its environment says what came of it; leave it out")
    if config.outcome == "majority" and run.batch.rollouts_per_prompt < 2:
        raise UserError("batch.rollouts_per_prompt is 1: one answer is always reward.outcome=majority; set 3 or more")


def check_reward_files(config: RewardConfig) -> None:
    """Refuses functions whose file does not exist, without running it. Raises `UserError` naming the field."""
    if config.verifier is not None:
        locate_verifier(config.verifier, "reward.outcome")
    if config.score is not None:
        locate_verifier(config.score, "reward.score")


def check_answers(run: "RunConfig", prompts: Sequence[Prompt]) -> None:
    """Refuses prompts without an answer where a term or the reward reads it. Raises `UserError` naming the fix."""
    for name in run.terms:
        if TERM_MAKERS.load(name, "terms").needs_answers:
            refuse_unanswered(prompts, f"terms.{name}")
    if run.reward is not None and run.reward.outcome == "answer":
        refuse_unanswered(prompts)


def refuse_unanswered(prompts: Sequence[Prompt], reader: str = "reward.outcome=answer") -> None:
    """Raises `UserError` naming the first prompt without an answer that `reader` needs; of episodes nobody needs one."""
    missing = next((prompt for prompt in prompts if prompt.answer is None and prompt.task is None), None)
    if missing is not None:
        instead = ", or set reward.outcome to majority or to FILE.py:FUNCTION" if reader.startswith("reward") else ""
        raise UserError(
            f"prompts.columns.answer: prompt {missing.id} has no answer for {reader}; name the column of the answers"
            f"{instead}"
        )
