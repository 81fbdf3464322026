"""Term maker `group_reward`: the rollouts of one prompt compared with each other by what they are worth.

GRPO (Shao et al., arXiv 2402.03300, eq. 3; outcome supervision). Of the G rollouts of a prompt with scores r_i, each token
of rollout i has the advantage

    A_i = (r_i - mean r) / (std r + eps)          `normalize: none` leaves out the division (Dr. GRPO, arXiv 2503.20783)

in a policy gradient with PPO's clip. There is no teacher and no KL to a reference: alone it is a GRPO run; beside a
teacher's term the losses are added, and the teacher's advantages are never normalised by groups. `std` is the sample
standard deviation (G - 1), as in TRL and verl.

The gate (Phantom Advantages, arXiv 2609.13866) says which groups are live. Scores may be shaped, and differ where no
rollout is right: the division then makes full-sized advantages of differences in length, say, and the student learns to
fail quickly. So under `outcome`, the default, a group is live only if its raw outcomes differ; its scores never decide.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from opd.episodes import SUCCESS
from opd.errors import UserError, refuse_unused
from opd.plugins import Models, TermMaker
from opd.records import Array, Rollout, Term
from opd.strategies.sampled import PolicyGradientConfig

if TYPE_CHECKING:
    from opd.config import RunConfig

FIELD = "terms.group_reward"
Gate = Literal["outcome", "score", "none"]
Normalize = Literal["std", "none"]


@dataclass(frozen=True)
class GroupRewardConfig(PolicyGradientConfig):
    """Rollouts of one prompt, compared by their scores."""

    normalize: Normalize = "std"
    """Divide a group's advantages by the standard deviation of its scores (GRPO), or leave them as they are (Dr. GRPO): then
    a group counts the less, the more alike its scores are."""
    eps: float = 1e-6
    """Added to the standard deviation."""
    ratio_clip_high: float | None = None
    """The ratio's distance above 1 beyond which a token stops teaching, where it is not that below 1 (DAPO's clip-higher,
    arXiv 2503.14476, is 0.28 beside a `ratio_clip` of 0.2). Null: `ratio_clip` on both sides."""
    gate: Gate = "outcome"
    """Which groups are live: those whose raw outcomes differ, those whose scores differ, or all. Where scores are shaped,
    the latter two teach from groups in which nothing is right."""
    dead: Literal["zero_advantage", "drop_and_refill"] = "zero_advantage"
    """What becomes of groups that are not live. `zero_advantage`: their advantages are 0, and their tokens count in the
    normaliser as before, so that the others teach no more than they would. `drop_and_refill`: another prompt takes their
    place and is sampled as often (DAPO's dynamic sampling), which costs the tokens that the metric `dropped_tokens`
    counts; all other metrics, `success_rate` among them, are then those of the rollouts that were kept."""
    max_refills: int = 9
    """For `drop_and_refill`: how often the place of a prompt is filled again in one step. What is dead after that has
    advantage 0."""


class GroupReward(TermMaker):
    """See the module. Metrics are shares of the rollouts: `live_groups`; `phantom_groups`, whose rollouts all fail alike and
    have an advantage all the same; and the mean `score`. `group_advantage` is the mean advantage over tokens."""

    Config = GroupRewardConfig
    needs_teacher = False
    compares_groups = True

    def __init__(self, config: GroupRewardConfig, run: "RunConfig") -> None:
        self.config = config
        self.policy_inputs = {**config.policy_inputs(run), "ratio_clip_high": config.ratio_clip_high}
        if config.dead == "drop_and_refill":
            self.generates = ("those that are dropped and refilled",)

    @staticmethod
    def check(config: GroupRewardConfig, run: "RunConfig") -> None:
        config.check(FIELD)
        if not 0 < config.eps < math.inf:
            raise UserError(f"{FIELD}.eps is {config.eps}: it must be above 0, and finite")
        if config.ratio_clip_high is not None:
            if not config.ratio_clip_high > 0:
                raise UserError(f"{FIELD}.ratio_clip_high is {config.ratio_clip_high}: it must be positive, or null")
            if config.ratio_clip is None:
                refuse_unused(config, ("ratio_clip_high",), FIELD, "without ratio_clip")
        if run.batch.rollouts_per_prompt < 2:
            raise UserError(f"batch.rollouts_per_prompt is 1: {FIELD} compares the rollouts of a prompt; set 2 or more")
        if run.reward is None and run.prompts["type"] != "environment":
            raise UserError(
                f"{FIELD}: nothing says what a rollout is worth; set reward.outcome to answer, majority or FILE.py:FUNCTION"
            )
        if run.sampling.temperature != run.loss_temperature:
            raise UserError(f"{FIELD}: sampled tokens need objective.temperature to be the sampling temperature")
        if config.dead == "drop_and_refill":
            _check_refills(config, run)
        else:
            refuse_unused(config, ("max_refills",), FIELD, "with dead: zero_advantage")
        if config.normalize == "none":
            refuse_unused(config, ("eps",), FIELD, "with normalize: none")

    def keeps(self, group: Sequence[Rollout], attempt: int) -> bool:
        refills = self.config.dead == "drop_and_refill" and attempt < self.config.max_refills
        return not refills or is_live(group, self.config.gate)

    async def collect(self, rollout: Rollout, models: Models) -> list[Term]:
        config, group = self.config, models.group(rollout)
        live = is_live(group, config.gate)
        advantages = group_advantages(group, config.normalize, config.eps) if live else np.zeros(len(group))
        models.note("live_groups", live)
        models.note("phantom_groups", fails_alike(group) and bool(advantages.any()))
        if is_judged(rollout):
            models.note("score", score_of(rollout))
        place = next(i for i, one in enumerate(group) if one.slot == rollout.slot)
        inputs = {
            **self.policy_inputs,
            "reward": np.full(rollout.num_tokens, advantages[place], np.float32),
            "self_coef": 0.0,
            "figure": "group_advantage",
        }
        return [Term("policy_gradient", mask=rollout.trainable, inputs=inputs, coef=config.coef)]


def is_judged(rollout: Rollout) -> bool:
    """Whether anybody knows what came of it: not of one that a controller stopped."""
    return rollout.outcome is not None and rollout.finish != "stopped"


def score_of(rollout: Rollout) -> float:
    """Of a rollout that is judged; without a shaped score it is the outcome."""
    assert rollout.outcome is not None
    return rollout.outcome if rollout.score is None else rollout.score


def is_live(group: Sequence[Rollout], gate: Gate) -> bool:
    """Whether the rollouts of a prompt teach: with `outcome` where their raw outcomes differ, whatever their scores are."""
    if gate == "none":
        return True
    judged = [rollout for rollout in group if is_judged(rollout)]
    return len({rollout.outcome if gate == "outcome" else score_of(rollout) for rollout in judged}) > 1


def fails_alike(group: Sequence[Rollout]) -> bool:
    """Whether no rollout is a success and their outcomes are all the same, so that they say nothing about the task."""
    outcomes = {rollout.outcome for rollout in group if is_judged(rollout)}
    return len(outcomes) == 1 and all(outcome is not None and outcome < SUCCESS for outcome in outcomes)


def group_advantages(group: Sequence[Rollout], normalize: Normalize, eps: float) -> Array:
    """[g] float64, see the module. Rollouts that are not judged are left out of mean and deviation, and have 0."""
    judged = np.array([is_judged(rollout) for rollout in group], bool)
    scores = np.array([score_of(rollout) for rollout in group if is_judged(rollout)], np.float64)
    advantages = np.zeros(len(group))
    if len(set(scores.tolist())) > 1:  # else all are 0, which rounding of the mean must not change
        centred = scores - scores.mean()
        advantages[judged] = centred / (scores.std(ddof=1) + eps) if normalize == "std" else centred
    return advantages


def _check_refills(config: GroupRewardConfig, run: "RunConfig") -> None:
    """Whether dead groups can be replaced in this run. Raises `UserError`."""
    field = f"{FIELD}.dead=drop_and_refill"
    if config.gate == "none":
        raise UserError(f"{field}: with gate none no group is dead; choose gate outcome, or dead zero_advantage")
    if config.max_refills < 1:
        raise UserError(f"{FIELD}.max_refills is {config.max_refills}: it must be at least 1")
    if run.lookahead:
        raise UserError(
            f"{field}: with lookahead 1 a checkpoint holds the next step's rollouts, and cannot tell for which other "
            "prompts some of them were sampled; set lookahead=0"
        )
    cutting = [name for name in run.rollout if name != "horizon"]
    if cutting:
        raise UserError(
            f"{field}: rollout.{cutting[0]} may stop rollouts, of which nobody knows what would have come, so that groups "
            "would be dropped for it; take zero_advantage, or set rollout.{cutting[0]}=null"
        )
