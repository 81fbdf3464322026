"""The kinds of terms as pure functions of log-probs."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from opd.objective import terms
from opd.objective.terms import policy_gradient, topk_divergence, unit_means

DIVERGENCES = [("reverse_kl", 0.5), ("forward_kl", 0.5), ("jsd", 0.1), ("jsd", 0.9)]
TAILS = ["tail", "renormalise", "truncate"]


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


def rows(c: int, vocab: int, seed: int = 0, sharpness: float = 2.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [c, V] of student and teacher, the latter not far away."""
    generator = torch.Generator().manual_seed(seed)
    student = sharpness * torch.randn(c, vocab, generator=generator)
    return student, student + torch.randn(c, vocab, generator=generator)


def inputs_at(teacher: torch.Tensor, ids: torch.Tensor, divergence: str, beta: float, tail: str) -> dict:
    """What a teacher tells of `ids` [c, K]; -1 is absent."""
    log_p, present = teacher.log_softmax(-1).gather(-1, ids.clamp(min=0)), ids >= 0
    mass = (log_p.double().exp() * present).sum(-1)
    named = {"target_logps": log_p.masked_fill(~present, 0.0), "target_tail": (1 - mass).clamp(min=0).float()}
    return {**named, "present": present, "divergence": divergence, "beta": beta, "tail": tail}


def topk(student, teacher, ids, divergence="reverse_kl", beta=0.5, tail="tail"):
    """(divergence of each row, gradient of their sum with respect to the student's logits)."""
    logits = student.clone().requires_grad_()
    log_q = logits.log_softmax(-1).gather(-1, ids.clamp(min=0))
    values = topk_divergence(log_q, inputs_at(teacher, ids, divergence, beta, tail))
    return values.detach(), torch.autograd.grad(values.sum(), logits)[0]


def full(student, teacher, divergence, beta):
    exact = student.double().requires_grad_()
    log_q, log_p = exact.log_softmax(-1), teacher.double().log_softmax(-1)
    q, p = log_q.exp(), log_p.exp()
    log_m = (beta * p + (1 - beta) * q).log()
    values = {
        "reverse_kl": q * (log_q - log_p),
        "forward_kl": p * (log_p - log_q),
        "jsd": beta * p * (log_p - log_m) + (1 - beta) * q * (log_q - log_m),
    }[divergence].sum(-1)
    return values.detach().float(), torch.autograd.grad(values.sum(), exact)[0].float()


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize(("divergence", "beta"), DIVERGENCES)
@pytest.mark.parametrize("vocab", [1, 2, 50, 1000])
def test_all_tokens_are_the_full_divergence(vocab, divergence, beta, tail):
    student, teacher = rows(4, vocab)
    ids = torch.argsort(torch.rand(4, vocab, generator=torch.Generator().manual_seed(1)), -1)
    values, gradient = topk(student, teacher, ids, divergence, beta, tail)
    exact, exact_gradient = full(student, teacher, divergence, beta)
    torch.testing.assert_close(values, exact, rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(gradient, exact_gradient, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize(("divergence", "beta"), DIVERGENCES)
def test_the_tail_bucket_approaches_the_full_divergence_from_below(divergence, beta):
    student, teacher = rows(20, 1000, sharpness=4.0)
    exact, exact_gradient = full(student, teacher, divergence, beta)
    errors, directions = [], []
    for k in (1, 8, 64, 512):
        values, gradient = topk(student, teacher, student.topk(k).indices, divergence, beta)
        assert (values <= exact + 1e-5).all()  # merging tokens loses information
        errors.append(float((exact - values).mean() / exact.mean()))
        directions.append(float(torch.cosine_similarity(gradient.flatten(), exact_gradient.flatten(), dim=0)))
    assert errors == sorted(errors, reverse=True)
    assert errors[2] < 0.05
    assert directions[2] > 0.99


@given(st.integers(0, 10**6), st.sampled_from(TAILS), st.sampled_from(DIVERGENCES), st.integers(1, 12))
@settings(max_examples=100, deadline=None, derandomize=True, database=None)
def test_never_negative(seed, tail, divergence, k):
    student, teacher = rows(8, 12, seed)
    ids = torch.argsort(torch.rand(8, 12, generator=torch.Generator().manual_seed(seed)), -1)[:, :k]
    values, gradient = topk(student, teacher, ids, divergence[0], divergence[1], tail)
    assert (values >= -3e-7).all()
    assert gradient.isfinite().all()


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize(("divergence", "beta"), DIVERGENCES)
def test_equal_distributions_have_no_divergence(divergence, beta, tail):
    student, _ = rows(5, 50)
    for k in (2, 50):
        values, gradient = topk(student, student, student.topk(k).indices, divergence, beta, tail)
        torch.testing.assert_close(values, torch.zeros(5), rtol=0, atol=3e-7)
        torch.testing.assert_close(gradient, torch.zeros(5, 50), rtol=0, atol=1e-6)


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize(("divergence", "beta"), DIVERGENCES)
def test_absent_entries_change_nothing(divergence, beta, tail):
    student, teacher = rows(3, 50)
    ids = student.topk(6).indices
    absent = torch.full((3, 2), -1)
    values, gradient = topk(student, teacher, ids, divergence, beta, tail)
    padded = topk(student, teacher, torch.cat([absent, ids[:, :3], absent, ids[:, 3:]], 1), divergence, beta, tail)
    torch.testing.assert_close(padded, (values, gradient))
    nothing = topk(student, teacher, absent, divergence, beta, tail)
    torch.testing.assert_close(nothing, (torch.zeros(3), torch.zeros(3, 50)))


def test_the_three_treatments_of_the_tail_by_hand():
    log_q, log_p = torch.tensor([[0.5, 0.2]]).log(), torch.tensor([[0.4, 0.4]]).log()
    present = torch.ones(1, 2, dtype=torch.bool)
    inputs = {"target_logps": log_p, "target_tail": torch.tensor([0.2]), "present": present, "beta": 0.5}
    value = {tail: topk_divergence(log_q, {**inputs, "divergence": "reverse_kl", "tail": tail}).item() for tail in TAILS}
    inside = 0.5 * math.log(0.5 / 0.4) + 0.2 * math.log(0.2 / 0.4)
    assert value["tail"] == pytest.approx(inside + 0.3 * math.log(0.3 / 0.2))
    assert value["truncate"] == pytest.approx(inside - 0.7 + 0.8)
    five, two = 5 / 7, 2 / 7
    assert value["renormalise"] == pytest.approx(five * math.log(five / 0.5) + two * math.log(two / 0.5))


def test_probabilities_that_underflow_are_no_nan():
    log_q = torch.tensor([[-0.1, -200.0]], requires_grad=True)
    inputs = {"target_logps": torch.tensor([[-0.2, -150.0]]), "target_tail": torch.tensor([0.0]), "beta": 0.5}
    present = torch.ones(1, 2, dtype=torch.bool)
    for divergence, _ in DIVERGENCES:
        for tail in TAILS:
            value = topk_divergence(log_q, {**inputs, "present": present, "divergence": divergence, "tail": tail})
            (gradient,) = torch.autograd.grad(value.sum(), log_q)
            assert value.isfinite().all()
            assert gradient.isfinite().all()


def test_a_further_kind_is_registered_once(monkeypatch):
    monkeypatch.setattr(terms, "KINDS", dict(terms.KINDS))
    terms.register("likelihood", lambda logp, inputs: (-logp, {}))
    assert terms.KINDS["likelihood"] is not None
    for kind in ("likelihood", "policy_gradient"):
        with pytest.raises(ValueError, match="exists already"):
            terms.register(kind, policy_gradient)


@pytest.mark.parametrize("tail", TAILS)
def test_tokens_that_the_target_does_not_have_are_conditioned_away(tail):
    logits, _ = toy(8)
    own, unknown = [0, 2, 3, 5], torch.tensor([[False, True, False, True]])
    log_p = torch.tensor([0.5, 0.3]).log()
    logits = logits.double().requires_grad_()
    inputs = {"target_logps": torch.tensor([[log_p[0], 0.0, log_p[1], 0.0]]).double(), "target_tail": torch.tensor([0.2])}
    inputs |= {"present": torch.ones(1, 4, dtype=torch.bool), "unknown": unknown, "tail": tail}
    inputs |= {"divergence": "reverse_kl", "beta": 0.5}
    loss = topk_divergence(logits.log_softmax(-1)[own][None], inputs)
    (gradient,) = torch.autograd.grad(loss.sum(), logits)
    kept = [0, 1, 3, 4, 6, 7]  # all but the two that the target does not have
    conditioned = logits.detach()[kept].requires_grad_()
    two = {**inputs, "target_logps": log_p[None].double(), "present": torch.ones(1, 2, dtype=torch.bool), "unknown": None}
    expected = topk_divergence(conditioned.log_softmax(-1)[[0, 2]][None], two)
    torch.testing.assert_close(loss, expected)
    (plain,) = torch.autograd.grad(expected.sum(), conditioned)
    torch.testing.assert_close(gradient[kept], plain)
    torch.testing.assert_close(gradient[[2, 5]], torch.zeros(2, dtype=torch.float64))  # nothing pushes these up or down
