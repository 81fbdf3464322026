"""The penalty of negative self-distillation: pushes, anchors and switches against float64 references."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from opd.objective.penalty import penalty, pull, push

PLAIN = {
    "penalty": "bounded",
    "anchor": "none",
    "alpha": 0.01,
    "importance_cap": 10.0,
    "clamp": None,
    "trust": None,
    "policy_gradient": False,
}
ANCHORS = ["pointwise_fkl", "is_fkl", "k2_reverse", "k1"]
LOGP = torch.tensor([-1e-4, -0.1, -0.7, -1.5, -4.0, -25.0])
GATE = torch.tensor([0.9, 0.3, 0.0, 0.7, 1.0, 0.5])
REFERENCE = torch.tensor([-0.3, -0.1, -0.2, -2.5, -3.0, -10.0])


def run(logp: Tensor, gate: Tensor, reference: Tensor | None = None, **changes) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Each token's loss, its gradient by its own log-prob, and the figures."""
    logp = logp.detach().clone().requires_grad_()
    inputs = {**PLAIN, "gate": gate, "reference": logp.detach() if reference is None else reference, **changes}
    loss, figures = penalty(logp, inputs)
    (gradient,) = torch.autograd.grad(loss.sum(), logp)
    return loss.detach(), gradient, figures


def by_logits(logits: Tensor, token: int, form: str, gate: float = 1.0) -> Tensor:
    """The gradient [V] of one sampled token's push with respect to the logits."""
    logits = logits.detach().clone().requires_grad_()
    return torch.autograd.grad(gate * push(logits.log_softmax(-1)[token][None], form).sum(), logits)[0]


def expected(logits: Tensor, log_ref: Tensor, anchor: str, **changes) -> Tensor:
    """The gradient [V] of the anchor by the logits over tokens drawn from the student, by enumeration."""
    logits = logits.detach().clone().requires_grad_()
    logp = logits.log_softmax(-1)
    inputs = {**PLAIN, "gate": torch.zeros_like(logp), "reference": log_ref, "anchor": anchor, "alpha": 1.0, **changes}
    loss, _ = penalty(logp, inputs)
    return torch.autograd.grad((logp.detach().exp() * loss).sum(), logits)[0]


def exact(logits: Tensor, log_ref: Tensor, divergence: str) -> Tensor:
    logits = logits.detach().clone().requires_grad_()
    logp = logits.log_softmax(-1)
    gap = log_ref - logp
    value = log_ref.exp() * gap if divergence == "forward_kl" else -logp.exp() * gap
    return torch.autograd.grad(value.sum(), logits)[0]


def toy(seed: int = 0, vocab: int = 7) -> tuple[Tensor, Tensor]:
    """Logits of the student [V], and log-probs of a reference [V] that differs from it."""
    generator = torch.Generator().manual_seed(seed)
    draw = torch.randn(2, vocab, generator=generator, dtype=torch.float64)
    return draw[0], draw[1].log_softmax(-1)


@pytest.mark.parametrize("form", ["bounded", "unlikelihood"])
def test_pushes_match_float64(form):
    own = LOGP.double()
    value = torch.sigmoid(-torch.log1p(-own.exp())) if form == "bounded" else -torch.log1p(-own.exp())
    slope = own.exp() / (2 - own.exp()).square() if form == "bounded" else own.exp() / (1 - own.exp())
    loss, gradient, _ = run(LOGP, GATE, penalty=form)
    torch.testing.assert_close(loss.double(), GATE.double() * value, rtol=1e-5, atol=0.0)
    torch.testing.assert_close(gradient.double(), GATE.double() * slope, rtol=1e-5, atol=0.0)


def test_a_complement_that_rounds_away_keeps_its_digits():
    """1 - exp(-1e-6) has one digit in single precision; the unlikelihood is right to six all the same."""
    exactly = -math.log(-math.expm1(-1e-6))
    assert push(torch.tensor([-1e-6]), "unlikelihood").item() == pytest.approx(exactly, rel=1e-6)


@pytest.mark.parametrize("form", ["bounded", "unlikelihood"])
def test_a_certain_token_has_a_finite_loss_and_no_gradient_to_reverse_it(form):
    loss, gradient, _ = run(torch.zeros(1), torch.ones(1), penalty=form)
    assert loss.item() == pytest.approx(1.0 if form == "bounded" else -math.log(1e-7), rel=1e-5)
    assert gradient.item() == (1.0 if form == "bounded" else 0.0)  # by the log-prob; by the logits it is 0 for both
    certain = torch.tensor([200.0, 0.0, 0.0])
    assert by_logits(certain, 0, form).abs().max() == 0


@pytest.mark.parametrize("form", ["bounded", "unlikelihood"])
def test_a_closed_gate_has_exactly_no_gradient(form):
    logp = torch.cat([LOGP, torch.zeros(1), torch.tensor([-1e-9])])
    loss, gradient, figures = run(logp, torch.zeros(8), penalty=form)
    assert torch.equal(loss, torch.zeros(8))
    assert torch.equal(gradient, torch.zeros(8))
    assert figures["gate_share"].sum() == 0


@given(st.lists(st.floats(-8, 8), min_size=2, max_size=9), st.floats(0, 1), st.integers(0, 8))
@settings(max_examples=200, deadline=None)
def test_the_bounded_push_never_raises_a_token_and_stays_below_an_eighth(values, gate, token):
    logits, token = torch.tensor(values, dtype=torch.float64), token % len(values)
    p = logits.softmax(-1)[token].item()
    gradient = by_logits(logits, token, "bounded", gate)
    assert gradient[token] >= 0
    assert (gradient[torch.arange(len(values)) != token] <= 0).all()
    assert gradient.abs().max() <= gate / 8 + 1e-12
    assert gradient[token].item() == pytest.approx(gate * p * (1 - p) / (2 - p) ** 2, rel=1e-6, abs=1e-12)


def test_the_largest_push_is_at_two_thirds():
    logits = torch.tensor([math.log(2.0), 0.0], dtype=torch.float64)
    assert by_logits(logits, 0, "bounded")[0].item() == pytest.approx(1 / 8)
    for shift in (-0.1, 0.1):
        assert by_logits(logits + torch.tensor([shift, 0.0]), 0, "bounded")[0] < 1 / 8


def test_raw_and_bounded_push_agree_up_to_a_factor():
    logits, _ = toy()
    for token, p in enumerate(logits.softmax(-1).tolist()):
        raw, bounded = by_logits(logits, token, "unlikelihood"), by_logits(logits, token, "bounded")
        torch.testing.assert_close(bounded, raw * (1 - p) / (2 - p) ** 2)
        assert raw[token].item() == pytest.approx(p)


@pytest.mark.parametrize("anchor", ANCHORS)
def test_anchors_match_float64(anchor):
    own, reference = LOGP.double(), REFERENCE.double()
    p, r = own.exp(), reference.exp()
    value, slope = {
        "pointwise_fkl": (r * (reference - own), -r),
        "is_fkl": ((r / p).clamp(max=10.0) * (reference - own), -(r / p).clamp(max=10.0)),
        "k2_reverse": ((own - reference) ** 2 / 2, own - reference),
        "k1": (own - reference, torch.ones_like(own)),
    }[anchor]
    loss, gradient, figures = run(LOGP, torch.zeros(6), REFERENCE, anchor=anchor, alpha=0.5)
    torch.testing.assert_close(loss.double(), 0.5 * value, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(gradient.double(), 0.5 * slope, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(figures["anchor"].double(), value, rtol=1e-5, atol=1e-7)
    assert not figures["anchor"].requires_grad


@pytest.mark.parametrize("anchor", ["is_fkl", "k2_reverse"])
def test_an_unbiased_anchor_rests_at_the_start(anchor):
    logits, _ = toy()
    torch.testing.assert_close(expected(logits, logits.log_softmax(-1), anchor), torch.zeros(7, dtype=torch.float64))


def test_the_pointwise_anchor_sharpens_at_the_start():
    """The expected descent direction is that of a reward p_ref, logit gradient p (p - |p|^2): likely tokens gain."""
    logits, _ = toy()
    p = logits.softmax(-1)
    gradient = expected(logits, logits.log_softmax(-1), "pointwise_fkl")
    torch.testing.assert_close(-gradient, p * (p - p.square().sum()))
    step = logits.clone()
    for _ in range(200):
        step -= 5.0 * expected(step, logits.log_softmax(-1), "pointwise_fkl")
    assert step.softmax(-1).max() > 0.9 > p.max()


@pytest.mark.parametrize(("anchor", "divergence"), [("is_fkl", "forward_kl"), ("k2_reverse", "reverse_kl")])
def test_an_unbiased_anchor_has_the_gradient_of_its_divergence(anchor, divergence):
    for seed in range(3):
        logits, log_ref = toy(seed)
        found = expected(logits, log_ref, anchor, importance_cap=1e9)
        torch.testing.assert_close(found, exact(logits, log_ref, divergence))


def test_the_pointwise_anchor_only_ever_raises_what_was_sampled():
    assert (run(LOGP, torch.zeros(6), REFERENCE, anchor="pointwise_fkl")[1] < 0).all()


def test_a_token_that_the_reference_has_not_is_left_alone():
    loss, gradient, _ = run(LOGP, torch.zeros(6), torch.full((6,), -200.0), anchor="pointwise_fkl", alpha=1.0)
    assert torch.equal(loss, torch.zeros(6))
    assert torch.equal(gradient, torch.zeros(6))


def test_as_a_cost_of_the_policy_gradient_k1_is_the_reverse_kl():
    logits, log_ref = toy()
    found = expected(logits, log_ref, "k1", policy_gradient=True)
    torch.testing.assert_close(found, exact(logits, log_ref, "reverse_kl"))
    as_loss = expected(logits, log_ref, "k1")
    torch.testing.assert_close(as_loss, torch.zeros(7, dtype=torch.float64))  # why it is refused there
    wrong = expected(logits, log_ref, "pointwise_fkl", policy_gradient=True)
    assert torch.dot(wrong, exact(logits, log_ref, "forward_kl")) < 0  # why it is refused here


def test_the_policy_gradient_weights_the_score_by_the_detached_loss():
    differs = {"anchor": "k1", "alpha": 0.1, "policy_gradient": True}
    value, _, _ = run(LOGP, GATE, REFERENCE, **{**differs, "policy_gradient": False})
    loss, gradient, _ = run(LOGP, GATE, REFERENCE, **differs)
    torch.testing.assert_close(loss, value)
    torch.testing.assert_close(gradient, value)
    old = LOGP - 0.1
    loss, gradient, _ = run(LOGP, GATE, REFERENCE, **differs, old_logps=old)
    torch.testing.assert_close(gradient, value * math.exp(0.1))
    torch.testing.assert_close(loss, value * math.exp(0.1))


def test_beyond_the_clamp_there_is_no_gradient_and_within_it_nothing_changes():
    gate = torch.tensor([1.0, 0.4, 0.8, 1.0, 0.6, 1.0])
    whole, slope, _ = run(LOGP, gate)
    loss, gradient, figures = run(LOGP, gate, clamp=0.5)
    beyond = whole.abs() > 0.5
    assert 0 < beyond.sum() < 6
    assert figures["penalty_clamped"].bool().tolist() == beyond.tolist()
    torch.testing.assert_close(loss, whole.clamp(max=0.5))
    torch.testing.assert_close(gradient, slope.masked_fill(beyond, 0.0))


def test_a_clamped_cost_of_the_policy_gradient_is_cut_off_and_keeps_its_gradient():
    """As a cost it is no function of the student: what moves the token is its ratio to the sampling policy."""
    gate = torch.tensor([1.0, 0.4, 0.8, 1.0, 0.6, 1.0])
    whole, _, _ = run(LOGP, gate, policy_gradient=True)
    loss, gradient, figures = run(LOGP, gate, policy_gradient=True, clamp=0.5)
    beyond = whole > 0.5
    assert figures["penalty_clamped"].bool().tolist() == beyond.tolist()
    assert 0 < beyond.sum() < 6
    torch.testing.assert_close(loss, whole.clamp(max=0.5))
    torch.testing.assert_close(gradient, whole.clamp(max=0.5))


@pytest.mark.parametrize("policy_gradient", [False, True])
def test_a_token_that_fell_too_far_is_dropped_and_one_that_rose_is_not(policy_gradient):
    ratio = torch.tensor([0.5, 0.79, 0.81, 1.0, 1.5, 9.0])
    changes = {"policy_gradient": policy_gradient, "old_logps": LOGP - ratio.log()}
    gate = torch.full((6,), 0.5)
    whole, slope, free = run(LOGP, gate, **changes)
    loss, gradient, figures = run(LOGP, gate, **changes, trust=0.2)
    kept = torch.tensor([False, False, True, True, True, True])
    assert torch.equal(loss, whole * kept)
    assert torch.equal(gradient, slope * kept)
    assert figures["trust_dropped"].tolist() == [1, 1, 0, 0, 0, 0]
    assert "trust_dropped" not in free
    assert "trust_dropped" not in run(LOGP, gate, trust=0.2)[2]  # one update a batch: the ratio is 1


def test_without_gate_and_anchor_there_is_nothing():
    loss, gradient, _ = run(LOGP, torch.zeros(6), REFERENCE, anchor="pointwise_fkl", alpha=0.0)
    assert torch.equal(loss, torch.zeros(6))
    assert torch.equal(gradient, torch.zeros(6))


def test_figures():
    gate, mark = GATE.clone(), torch.arange(6.0)
    _, _, figures = run(LOGP, gate, figure_reflection_rate=mark)
    assert torch.equal(figures["gate"], gate)
    assert figures["gate_share"].tolist() == [1, 1, 0, 1, 1, 1]
    torch.testing.assert_close(figures["penalty"], gate / (2 - LOGP.exp()))
    assert torch.equal(figures["reflection_rate"], mark)
    assert set(figures) == {"gate", "gate_share", "penalty", "reflection_rate"}
    assert not any(rows.requires_grad for rows in figures.values())


def test_the_anchor_none_is_zero():
    assert torch.equal(pull(LOGP, {**PLAIN, "reference": REFERENCE}), torch.zeros(6))
