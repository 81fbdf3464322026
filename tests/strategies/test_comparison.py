"""What term makers that compare two distributions have in common, for a maker that is neither of the shipped ones.

What the forms ask and make of it, and their gradients, is in the tests of `reverse_kl` and `self_distillation`.
"""

import asyncio
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pytest

from opd.config import RunConfig
from opd.errors import UserError
from opd.objective.config import ObjectiveConfig
from opd.records import Term
from opd.strategies.comparison import Comparison, ComparisonConfig
from opd.students.config import SamplingConfig

RUN = RunConfig(sampling=SamplingConfig(temperature=0.7))
LOGPS = [-0.5, -1.0, -2.0, -4.0]


@dataclass(frozen=True)
class OtherConfig(ComparisonConfig):
    SAMPLED_ALONE: ClassVar[tuple[str, ...]] = ("strength", *ComparisonConfig.SAMPLED_ALONE)

    strength: int = 1


class Other(Comparison):
    """Asks a model of its own choice, and with some of its rollouts' tokens reused."""

    Config = OtherConfig

    async def collect(self, rollout, models):
        return [await self.compare("other", rollout, models, "mean")]


def collected(rollout, models: Any, **settings) -> Term:
    (term,) = asyncio.run(Other(OtherConfig(**settings), RUN).collect(rollout, models))
    return term


def test_the_maker_chooses_the_model(random_rollout, given_models):
    models = given_models({"other": [LOGPS]})
    term = collected(random_rollout(0, (3, 4)), models, form="sampled", coef=0.5)
    ((model, request),) = models.requests
    assert (model, request.temperature, request.k, request.hidden) == ("other", 0.7, 0, False)
    assert term.inputs["reward"].tolist() == LOGPS
    assert (term.inputs["self_coef"], term.coef) == (1.0, 0.5)
    assert "baseline" not in term.inputs
    term = collected(random_rollout(0, (3, 4)), models, form="sampled", baseline="mean", advantage_clip=2.0)
    assert (term.inputs["baseline"], term.inputs["advantage_clip"]) == ("mean", 2.0)


def test_both_sides_of_a_unit_are_reduced_by_the_makers_rule(random_rollout, given_models):
    """Two student tokens beside one of the model's, then one beside two, then one without a counterpart."""
    units = {"other": [[(2, 1, True), (1, 2, True), (1, 1, False)]]}
    models = given_models({"other": [LOGPS]}, units)
    term = collected(random_rollout(0, (3, 4)), models, form="sampled")
    assert term.inputs["reward"].tolist() == [-0.5, -0.5, -1.5, 0.0]
    assert term.inputs["teacher_sampled"].tolist() == [-0.25, -0.25, -3.0, 0.0]  # reported by the sums all the same
    assert term.inputs["unit_starts"].tolist() == [True, False, True, True]
    assert (term.inputs["self_coef"], term.inputs["unit_coef"]) == (0.0, 1.0)
    assert term.mask.tolist() == [True, True, True, False]


@pytest.mark.parametrize(
    ("settings", "hidden", "num"),
    [
        ({}, True, 0),
        ({"form": "sampled"}, False, 0),
        ({"form": "topk", "k": 5}, False, 5),
        ({"form": "topk", "k": 5, "source": "union"}, False, 5),
        ({"form": "topk", "k": 5, "source": "teacher"}, False, 0),
        ({"form": "topk", "k": 0}, False, 0),
    ],
)
def test_what_each_form_needs(settings, hidden, num):
    maker = Other(OtherConfig(**settings), RUN)
    assert (maker.needs_hidden, maker.num_student_topk) == (hidden, num)
    assert maker.needs_teacher
    assert not maker.needs_start(maker.config)


def test_importance_weights_come_with_rollouts_that_are_behind():
    caps = {
        (importance, lookahead): Other(
            OtherConfig(form="sampled", importance=importance), replace(RUN, lookahead=lookahead)
        ).policy_inputs["importance_cap"]
        for importance in ("auto", "none", "truncated")
        for lookahead in (0, 1)
    }
    assert [caps["auto", 0], caps["auto", 1]] == [None, 2.0]
    assert [caps["none", 0], caps["none", 1]] == [None, None]
    assert [caps["truncated", 0], caps["truncated", 1]] == [2.0, 2.0]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"strength": 2}, "strength: has no effect with form full; leave it out"),
        ({"form": "topk", "baseline": "mean"}, "baseline: has no effect with form topk; leave it out"),
        ({"form": "sampled", "divergence": "forward_kl"}, "divergence: forward_kl needs form topk or full"),
        ({"form": "sampled", "advantage_clip": 0.0}, "terms.other.advantage_clip is 0.0: it must be positive, or null"),
        ({"form": "sampled", "importance_cap": float("nan")}, "terms.other.importance_cap is nan: it must be positive"),
        ({"coef": float("inf")}, "terms.other.coef is inf: it must be a finite number"),
        ({"beta": 0.0}, "beta is 0.0: it must lie between 0 and 1"),
    ],
)
def test_refusals_name_the_makers_own_field(settings, said):
    with pytest.raises(UserError) as refusal:
        OtherConfig(**settings).check_for("terms.other", RUN)
    assert str(refusal.value).startswith("terms.other")
    assert said in str(refusal.value)


def test_only_sampled_tokens_need_the_sampling_temperature():
    warmer = replace(RUN, objective=ObjectiveConfig(temperature=1.0))
    with pytest.raises(UserError, match=r"terms\.other\.form: sampled needs objective\.temperature"):
        OtherConfig(form="sampled").check_for("terms.other", warmer)
    for form in ("topk", "full"):
        OtherConfig(form=form).check_for("terms.other", warmer)  # type: ignore[arg-type]
    OtherConfig(form="sampled", strength=2).check_for("terms.other", RUN)


def test_one_renormalised_token_of_each_side_may_differ():
    """Of one token alone nothing is left to compare; a union has two."""
    OtherConfig(form="topk", k=1, tail="renormalise", source="union").check_for("terms.other", RUN)
    for source in ("student", "teacher"):
        with pytest.raises(UserError, match="one renormalised token has divergence 0"):
            OtherConfig(form="topk", k=1, tail="renormalise", source=source).check_for("terms.other", RUN)


def test_reused_tokens_are_context(random_rollout, given_models):
    rollout = random_rollout(0, (3, 4), num_reused=2)
    models = given_models({"other": [LOGPS[:2]]})
    term = collected(rollout, models, form="sampled")
    ((_, request),) = models.requests
    assert request.context_ids.tolist() == [*rollout.turns[0].context_ids, *rollout.turns[0].sampled_ids[:2]]
    assert term.mask.tolist() == [False, False, True, True]
    np.testing.assert_array_equal(term.inputs["reward"], [0.0, 0.0, *LOGPS[:2]])
