"""The kinds of terms as pure functions of log-probs."""

import math

import pytest
import torch

from opd.objective import terms
from opd.objective.terms import policy_gradient, unit_means


def loss_and_gradient(logp, **inputs):
    plain = {"self_coef": 1.0, "advantage_clip": None, "ratio_clip": None, "importance_cap": None}
    logp = logp.clone().requires_grad_()
    loss, figures = policy_gradient(logp, {**plain, **inputs})
    loss.sum().backward()
    assert logp.grad is not None
    return loss.detach(), logp.grad, figures


LOGP = torch.tensor([-0.5, -1.0, -3.0])
REWARD = torch.tensor([-2.0, -1.0, -0.5])


def test_the_gradient_is_minus_the_advantage():
    for self_coef, advantage in ((1.0, REWARD - LOGP), (0.0, REWARD), (1.5, REWARD - 1.5 * LOGP)):
        loss, gradient, figures = loss_and_gradient(LOGP, reward=REWARD, self_coef=self_coef)
        torch.testing.assert_close(gradient, -advantage)
        torch.testing.assert_close(loss, -advantage)
        torch.testing.assert_close(figures["advantage"], advantage)
        assert not figures["advantage"].requires_grad


def test_units_share_the_mean_of_their_log_probs():
    starts = torch.tensor([True, False, True])
    mean = torch.tensor([-0.75, -0.75, -3.0])
    torch.testing.assert_close(unit_means(LOGP, starts), mean)
    inputs = {"reward": REWARD, "self_coef": 0.5, "unit_coef": 2.0, "unit_starts": starts, "teacher_mean": REWARD}
    _, gradient, figures = loss_and_gradient(LOGP, **inputs)
    torch.testing.assert_close(gradient, -(REWARD - 0.5 * LOGP - 2.0 * mean))
    torch.testing.assert_close(figures["reverse_kl_mean"], mean - REWARD)
    assert unit_means(LOGP[:0], starts[:0]).shape == (0,)


def test_the_reference_pulls_back_without_a_gradient_of_its_own():
    reference = torch.tensor([-1.0, -1.0, -1.0], requires_grad=True)
    inputs = {"reward": REWARD, "self_coef": 0.5, "reference_coef": 0.5, "reference_logps": reference.detach()}
    _, gradient, figures = loss_and_gradient(LOGP, **inputs)
    torch.testing.assert_close(gradient, -(REWARD - 0.5 * (LOGP - reference.detach())))
    torch.testing.assert_close(figures["displacement"], LOGP - reference.detach())
    _, gradient, figures = loss_and_gradient(LOGP, reward=REWARD, reference_logps=None)
    torch.testing.assert_close(gradient, -(REWARD - LOGP))
    assert "displacement" not in figures


def test_advantages_are_clipped_and_counted():
    _, gradient, figures = loss_and_gradient(LOGP, reward=REWARD, advantage_clip=1.0)
    torch.testing.assert_close(gradient, torch.tensor([1.0, 0.0, -1.0]))
    assert figures["advantage_clipped"].tolist() == [1.0, 0.0, 1.0]


@pytest.mark.parametrize(
    ("advantage", "log_ratio", "teaches"),
    [(1.0, 0.0, True), (1.0, 0.5, False), (1.0, -0.5, True), (-1.0, 0.5, True), (-1.0, -0.5, False), (-1.0, 0.1, True)],
)
def test_a_ratio_beyond_the_clip_stops_teaching_where_it_went_too_far(advantage, log_ratio, teaches):
    logp = torch.tensor([-1.0])
    _, gradient, figures = loss_and_gradient(
        logp, reward=logp + advantage, old_logps=logp - log_ratio, ratio_clip=0.2, self_coef=1.0
    )
    expected = -advantage * math.exp(log_ratio) if teaches else 0.0
    assert gradient.item() == pytest.approx(expected)
    assert figures["ratio_clipped"].item() == (not teaches)


@pytest.mark.parametrize(("log_ratio", "teaches"), [(0.2, True), (0.3, False)])
def test_the_ratio_may_go_further_above_1_than_below(log_ratio, teaches):
    """DAPO's clip-higher; 1 + 0.28 lies between the two, and both beyond 1 + 0.1."""
    logp = torch.tensor([-1.0])
    inputs = {"reward": torch.ones(1), "self_coef": 0.0, "old_logps": logp - log_ratio}
    _, gradient, figures = loss_and_gradient(logp, **inputs, ratio_clip=0.1, ratio_clip_high=0.28)
    assert gradient.item() == pytest.approx(-math.exp(log_ratio) if teaches else 0.0)
    assert figures["ratio_clipped"].item() == (not teaches)
    for high in ({}, {"ratio_clip_high": None}):
        assert loss_and_gradient(logp, **inputs, ratio_clip=0.1, **high)[1].item() == 0.0
    below = {**inputs, "reward": -torch.ones(1), "old_logps": logp + 0.2}
    assert loss_and_gradient(logp, **below, ratio_clip=0.1, ratio_clip_high=0.28)[1].item() == 0.0


def test_the_advantage_may_have_a_name_of_its_own():
    _, _, figures = loss_and_gradient(LOGP, reward=REWARD, self_coef=0.0, figure="group_advantage")
    assert list(figures) == ["group_advantage"]
    torch.testing.assert_close(figures["group_advantage"], REWARD)


def test_importance_weights_are_cut_off():
    sampler_logps = LOGP - torch.tensor([0.0, math.log(1.5), math.log(9.0)])
    _, gradient, _ = loss_and_gradient(LOGP, reward=REWARD, sampler_logps=sampler_logps, importance_cap=2.0)
    torch.testing.assert_close(gradient, -(REWARD - LOGP) * torch.tensor([1.0, 1.5, 2.0]))


def test_importance_refers_to_the_policy_before_the_batch():
    old = LOGP - 0.1
    _, gradient, _ = loss_and_gradient(
        LOGP, reward=REWARD, old_logps=old, sampler_logps=old - math.log(1.5), importance_cap=2.0
    )
    torch.testing.assert_close(gradient, -(REWARD - LOGP) * math.exp(0.1) * 1.5)


def toy(vocab: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of the student [V], and log-probs of the teacher [V]."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(vocab, generator=generator), torch.randn(vocab, generator=generator).log_softmax(-1)


def exact_gradient(logits: torch.Tensor, log_p: torch.Tensor) -> torch.Tensor:
    exact = logits.double().requires_grad_()
    log_q = exact.log_softmax(-1)
    return torch.autograd.grad((log_q.exp() * (log_q - log_p.double())).sum(), exact)[0].float()


def expected_gradient(logits: torch.Tensor, log_p: torch.Tensor, sampler: torch.Tensor, **inputs) -> torch.Tensor:
    """Over tokens drawn from `sampler` [V], by enumeration."""
    logits = logits.clone().requires_grad_()
    log_q = logits.log_softmax(-1)
    inputs = {"self_coef": 1.0, "advantage_clip": None, "ratio_clip": None, "importance_cap": None, **inputs}
    loss, _ = policy_gradient(log_q, {"reward": log_p, "sampler_logps": sampler, **inputs})
    return torch.autograd.grad((sampler.exp() * loss).sum(), logits)[0]


def test_the_expected_gradient_is_that_of_the_reverse_kl():
    logits, log_p = toy()
    on_policy = logits.log_softmax(-1)
    torch.testing.assert_close(expected_gradient(logits, log_p, on_policy), exact_gradient(logits, log_p))


def test_importance_weights_make_up_for_another_sampler():
    logits, log_p = toy()
    other = (0.5 * logits).log_softmax(-1)
    exact = exact_gradient(logits, log_p)
    assert not torch.allclose(expected_gradient(logits, log_p, other), exact, atol=1e-2)
    torch.testing.assert_close(expected_gradient(logits, log_p, other, importance_cap=1e6), exact)


def test_a_further_kind_is_registered_once(monkeypatch):
    monkeypatch.setattr(terms, "KINDS", dict(terms.KINDS))
    terms.register("likelihood", lambda logp, inputs: (-logp, {}))
    assert terms.KINDS["likelihood"] is not None
    for kind in ("likelihood", "policy_gradient"):
        with pytest.raises(ValueError, match="exists already"):
            terms.register(kind, policy_gradient)
