"""CompassOPD: the advantage of arXiv 2609.10154 on aligned units, and what its recipe must hold."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch

from opd.config import build_config
from opd.errors import UserError
from opd.objective.terms import advantages, unit_means
from opd.records import Prompt, Rollout, Term
from opd.strategies.compass import Compass, CompassConfig

UNITS = [[(1, 1, True), (2, 1, True), (1, 3, True)], [(1, 0, False), (1, 1, True)]]
STRONG = [[-0.1, -0.4, -0.2, -0.3, -0.7], [-0.5]]
WEAK = [[-0.3, -1.4, -0.9, -0.8, -0.1], [-2.5]]


def run_config(**compass):
    weak = {"weak_reference": {"model": "tiny:teacher", "logp_floor": -30.0}}
    raw = {
        "student": {"model": "tiny:student"},
        "teachers": {"maths": {"model": "tiny:teacher", **weak}},
        "prompts": {"path": "tiny:prompts"},
        "terms": {"compass": compass},
    }
    return build_config(raw)


@pytest.fixture
def rollout(random_rollout) -> Rollout:
    plain = random_rollout(0, (3, 4), (9, 2))
    return replace(plain, prompt=Prompt(id="0", domain="maths"))


def collect(rollout: Rollout, models, **settings) -> Term:
    config = run_config(**settings)
    (term,) = asyncio.run(Compass(config.terms["compass"], config).collect(rollout, models))
    return term


@pytest.fixture
def aligned(given_models):
    def build(strong=STRONG, weak=WEAK, strong_units=UNITS, weak_units=UNITS):
        scores = {"maths": strong, "maths.weak_reference": weak}
        return given_models(scores, {"maths": strong_units, "maths.weak_reference": weak_units})

    return build


def test_the_reward_is_the_teachers_change_on_units(rollout, aligned):
    for rule, shares in (("mean", (1, 1, 3)), ("split", (1, 2, 1))):
        term = collect(rollout, aligned(), span_reduce=rule, alpha=0.5, beta=0.25)
        change = np.array([0.2, 1.0, (-1.2 + 1.8) / 1])  # sums of the units
        weak = np.array([-0.3, -1.4, -1.8])
        first = (change + 0.25 * weak) / shares
        expected = [first[0], first[1], first[1], first[2], 0.0, 2.0 + 0.25 * -2.5]
        np.testing.assert_allclose(term.inputs["reward"], expected, atol=1e-6)
        assert term.mask.tolist() == [True, True, True, True, False, True]
        assert term.inputs["unit_starts"].tolist() == [True, True, False, True, True, True]
        coefs = {name: term.inputs[name] for name in ("self_coef", "reference_coef", "unit_coef")}
        assert coefs == {"self_coef": 0.5, "reference_coef": 0.5, "unit_coef": 0.25}


def test_beta_leads_from_the_change_to_the_teacher_itself(rollout, aligned):
    """Linear in beta: what the offset adds is the same at every step of a sweep."""
    own = torch.linspace(-3.0, -0.1, 6)
    found = []
    for beta in (0.0, 0.5, 1.0):
        inputs = dict(collect(rollout, aligned(), alpha=0.0, beta=beta, span_reduce="split").inputs)
        inputs |= {name: torch.from_numpy(inputs[name]) for name in ("reward", "unit_starts")}
        found.append(advantages(own, inputs))
    torch.testing.assert_close(found[1], (found[0] + found[2]) / 2)
    plain = torch.tensor([-0.1, -0.2, -0.2, -1.2, 0.0, -0.5]) - unit_means(own, inputs["unit_starts"])
    known = [0, 1, 2, 3, 5]
    torch.testing.assert_close(found[2][known], plain[known])


def test_a_constant_on_both_sides_changes_nothing(rollout, aligned):
    shifted = [[[value - 3.0 for value in turn] for turn in side] for side in (STRONG, WEAK)]
    before, after = collect(rollout, aligned()), collect(rollout, aligned(*shifted))
    np.testing.assert_allclose(after.inputs["reward"], before.inputs["reward"], atol=1e-5)


def test_the_cut_inside_a_unit_does_not_matter_where_its_mean_is_the_same(rollout, aligned):
    units = [[(1, 1, True), (2, 3, True), (1, 3, True)], UNITS[1]]
    strong = [[-0.1, -0.2, -0.4, -0.6, -0.2, -0.3, -0.7], STRONG[1]]
    weak = [[-0.3, -1.0, -1.4, -1.8, -0.9, -0.8, -0.1], WEAK[1]]
    before, after = collect(rollout, aligned()), collect(rollout, aligned(strong, weak, units, units))
    np.testing.assert_allclose(after.inputs["reward"], before.inputs["reward"], atol=1e-6)


def test_a_weak_reference_with_other_tokens_is_aligned_by_itself(rollout, aligned):
    units = [[(1, 1, True), (3, 1, True)], [(2, 3, True)]]
    term = collect(rollout, aligned(weak=[[-0.3, -0.6], [-0.4, -0.3, -0.3]], weak_units=units), span_reduce="split")
    strong = [-0.1, -0.2, -0.2, -1.2, 0.0, -0.5]
    weak = [-0.3, -0.2, -0.2, -0.2, -0.5, -0.5]
    np.testing.assert_allclose(term.inputs["reward"], np.subtract(strong, weak), atol=1e-6)
    assert term.mask.tolist() == [True, True, True, True, False, True]  # both must know the token


def test_one_to_one_units_alone(rollout, aligned):
    term = collect(rollout, aligned(), coverage="strict_1to1")
    assert term.mask.tolist() == [True, False, False, False, False, True]


def test_what_both_floor_says_nothing_and_one_alone_is_clipped(rollout, aligned):
    strong, weak = [[-30.0, -0.4, -30.0, -0.3, -0.7], [-30.0]], [[-30.0, -1.4, -0.9, -0.8, -30.0], [-2.5]]
    term = collect(rollout, aligned(strong, weak), delta_clip=5.0)
    assert term.mask.tolist() == [False, True, True, False, False, True]
    assert term.inputs["reward"][-1] == -5.0
    np.testing.assert_allclose(term.inputs["reward"][1:3], 1.0, atol=1e-6)


def test_with_the_students_own_tokens_there_are_no_units(rollout, given_models):
    scores = {"maths": [[-0.1] * 4, [-0.2] * 2], "maths.weak_reference": [[-0.5] * 4, [-0.5] * 2]}
    term = collect(rollout, given_models(scores))
    np.testing.assert_allclose(term.inputs["reward"], [0.4] * 4 + [0.3] * 2, atol=1e-6)
    assert "unit_starts" not in term.inputs
    assert term.mask.all()


def test_reused_tokens_are_not_trained(random_rollout, aligned):
    rollout = replace(random_rollout(0, (3, 4), (9, 2), num_reused=1), prompt=Prompt(id="0", domain="maths"))
    assert collect(rollout, aligned()).mask.tolist() == [False, True, True, True, False, True]


def test_reused_turns_are_not_asked_about(rollout, aligned):
    first, second = rollout.turns
    models = aligned(strong_units=UNITS[1:], weak_units=UNITS[1:])
    term = collect(replace(rollout, turns=(replace(first, num_reused=4), second)), models)
    assert term.mask.tolist() == [False] * 4 + [False, True]
    np.testing.assert_allclose(term.inputs["reward"], [0.0] * 5 + [2.0], atol=1e-6)
    assert term.inputs["unit_starts"].all()
    assert len(models.requests) == 2  # one of each model


def test_an_episode_is_one_question_to_each_model(random_episode, given_models):
    episode = replace(random_episode(0, 3, (2, 1), (3, 2), (1, 0)), prompt=Prompt(id="0", domain="maths"))
    strong, weak = np.arange(9) / 10 - 1, np.arange(9) / 5 - 2
    models = given_models({"maths": [strong], "maths.weak_reference": [weak]})
    term = collect(episode, models, beta=0.5)
    assert len(models.requests) == 2
    new = [0, 1, 3, 4, 5, 8]
    np.testing.assert_allclose(term.inputs["reward"], (strong - 0.5 * weak)[new], atol=1e-6)
    np.testing.assert_allclose(term.inputs["teacher_sampled"], strong[new], atol=1e-6)
    assert term.mask.all()


def test_a_frozen_start_is_needed_where_alpha_pulls_back_to_it():
    config = run_config()
    assert config.terms["compass"] == CompassConfig(alpha=0.5, beta=0.0, span_reduce="mean")  # the paper's
    assert Compass(config.terms["compass"], config).needs_reference
    none = run_config(alpha=0.0)
    assert not Compass(none.terms["compass"], none).needs_reference
    assert list(config.frozen) == ["maths", "maths.weak_reference"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"terms": {"compass": {"alpha": -1}}}, "terms.compass.alpha is -1"),
        ({"terms": {"compass": {"beta": float("nan")}}}, "terms.compass.beta is nan"),
        ({"terms": {"compass": {"delta_clip": 0}}}, "terms.compass.delta_clip is 0"),
        ({"terms": {"compass": {"ratio_clip": 0}}}, "terms.compass.ratio_clip is 0.0: it must be positive"),
        ({"objective": {"temperature": 0.5}}, "terms.compass: sampled tokens need objective.temperature"),
        ({"teachers": {"maths": {"model": "tiny:teacher"}}}, "teachers.maths.weak_reference is missing"),
        ({"teachers": {"maths": {"model": "m", "weak_reference": {}}}}, "teachers.maths.weak_reference.model is missing"),
        (
            {"teachers": {"maths": {"model": "m", "weak_reference": {"active_experts": 1, "dtype": "bfloat16"}}}},
            "teachers.maths.weak_reference.dtype: has no effect without",
        ),
        (
            {"teachers": {"maths": {"model": "m", "weak_reference": {"active_experts": 0}}}},
            "teachers.maths.weak_reference.active_experts is 0",
        ),
    ],
)
def test_refusals(change, said):
    raw = {
        "student": {"model": "tiny:student"},
        "teachers": {"maths": {"model": "tiny:teacher", "weak_reference": {"model": "tiny:teacher"}}},
        "prompts": {"path": "tiny:prompts"},
        "terms": {"compass": {}},
    }
    with pytest.raises(UserError) as error:
        build_config({**raw, **change})
    assert str(error.value).startswith(said)


def test_fewer_experts_take_everything_else_from_the_teacher():
    raw = {
        "student": {"model": "tiny:student"},
        "teachers": {"maths": {"model": "m", "dtype": "bfloat16", "weak_reference": {"active_experts": 1}}},
        "prompts": {"path": "tiny:prompts"},
        "terms": {"compass": {}},
    }
    weak = build_config(raw).frozen["maths.weak_reference"]
    assert (weak.model, weak.dtype, weak.active_experts) == ("m", "bfloat16", 1)
    assert list(build_config({**raw, "terms": {"reverse_kl": {}}}).frozen) == ["maths"]
