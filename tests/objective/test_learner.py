"""Updates: equal to a plain one, whatever the micro-batches; and left out where there is nothing to learn from."""

import copy
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import peft
import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from opd.errors import UserError
from opd.models import decoder, output_head
from opd.objective.batching import Taught
from opd.objective.config import ObjectiveConfig, OptimizerConfig
from opd.objective.learner import Learner
from opd.passages import passages
from opd.records import Hidden, Rollout, Term, TopK, Turn

LENGTHS = [[(3, 5)], [(9, 1), (14, 6)], [(20, 12)], [(4, 3)]]
STEP = {"lr": 0.5, "eps": 1.0, "max_grad_norm": 0.0}  # a smooth first step: lr * g / (|g| + 1)
BUDGETS = [1, 40, 10**6]


@pytest.fixture(scope="module")
def accelerator():
    return Accelerator(cpu=True)


@pytest.fixture(scope="module")
def teacher(micro_model):
    return micro_model(1, hidden_size=48, num_attention_heads=4).requires_grad_(False)


@pytest.fixture
def student(micro_model):
    return micro_model(0)


@pytest.fixture
def make(accelerator, student, teacher, vocab):
    """`make(optimizer settings, **objective settings)`: a learner of `student`, or of a copy of it."""

    def build(optimizer=STEP, *, fresh=False, temperature=1.0, reference=None, learns=None, **objective) -> Learner:
        return Learner(
            learns or (copy.deepcopy(student) if fresh else student),
            ObjectiveConfig(**objective),
            OptimizerConfig(**optimizer),
            accelerator=accelerator,
            num_steps=20,
            heads={"t": output_head(teacher)},
            vocab=vocab,
            temperature=temperature,
            reference=reference,
        )

    return build


def logp(model: nn.Module, rollout: Rollout, vocab: int) -> list[Tensor]:
    """[n, V] of each turn, by a plain forward."""
    result = []
    for turn in rollout.turns:
        ids = torch.from_numpy(np.concatenate([turn.context_ids, turn.sampled_ids])).long()[None]
        first = len(turn.context_ids) - 1
        result.append(model(ids).logits[0, first : first + len(turn.sampled_ids), :vocab].log_softmax(-1))
    return result


def sampled_ids(rollout: Rollout) -> Tensor:
    return torch.from_numpy(np.concatenate([turn.sampled_ids for turn in rollout.turns])).long()[:, None]


def teach(rollout: Rollout, teacher: nn.Module, vocab: int, form: str, divergence: str = "reverse_kl") -> Term:
    with torch.no_grad():
        log_p = torch.cat(logp(teacher, rollout, vocab))
        states = []
        for turn in rollout.turns:
            ids = torch.from_numpy(np.concatenate([turn.context_ids, turn.sampled_ids])).long()[None]
            states.append(decoder(teacher)(input_ids=ids).last_hidden_state[0, len(turn.context_ids) - 1 : -1])
    inputs = {"divergence": divergence, "beta": 0.5, "tail": "tail"}
    if form == "full":
        of_passages = tuple(torch.cat(states)[passage.rows] for passage in passages(rollout))
        return Term("divergence", rollout.trainable, {**inputs, "target": Hidden(of_passages, "t")})
    if form == "topk":
        values, ids = log_p.topk(vocab)
        target = TopK(ids.int().numpy(), values.numpy(), np.zeros(len(ids), np.float32))
        return Term("divergence", rollout.trainable, {**inputs, "target": target})
    plain = {"self_coef": 1.0, "advantage_clip": None, "ratio_clip": 0.2, "importance_cap": None}
    return Term(
        "policy_gradient", rollout.trainable, {"reward": log_p.gather(-1, sampled_ids(rollout))[:, 0].numpy(), **plain}
    )


@pytest.fixture
def rollouts(random_rollout):
    return [random_rollout(seed, *turns) for seed, turns in enumerate(LENGTHS)]


@pytest.fixture
def taught(rollouts, teacher, vocab):
    """`taught(*forms)`: the rollouts with a term of each form."""
    return lambda *forms: [(r, [teach(r, teacher, vocab, form) for form in forms]) for r in rollouts]


def rewarded(rollout: Rollout, reward: float, mask: np.ndarray | None = None) -> Taught:
    """A constant reward, so that the loss is minus its mean."""
    rewards = np.full(rollout.num_tokens, reward, np.float32)
    inputs = {"reward": rewards, "self_coef": 0.0, "advantage_clip": None, "ratio_clip": None, "importance_cap": None}
    return rollout, [Term("policy_gradient", rollout.trainable if mask is None else mask, inputs)]


def weights(learner: Learner) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in learner.student.named_parameters()}


def changed(learner: Learner, before: dict[str, Tensor]) -> bool:
    return any(not torch.equal(value, before[name]) for name, value in weights(learner).items())


def plain_step(student: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    """The weights after one step of AdamW with STEP, from the gradient alone."""
    loss.backward()
    named = dict(student.named_parameters())
    return {name: (p - STEP["lr"] * p.grad / (p.grad.abs() + STEP["eps"])).detach() for name, p in named.items()}  # type: ignore


def plain_loss(student: nn.Module, teacher: nn.Module, rollouts: Sequence[Rollout], vocab: int, form: str) -> Tensor:
    """Per-token mean of the divergence `form`, or of minus advantage times log pi, from whole matrices of log-probs."""
    rows = []
    for rollout in rollouts:
        log_q = torch.cat(logp(student, rollout, vocab))
        log_p = torch.cat(logp(teacher, rollout, vocab)).detach()
        if form == "reverse_kl":
            rows.append((log_q.exp() * (log_q - log_p)).sum(-1))
        elif form == "forward_kl":
            rows.append((log_p.exp() * (log_p - log_q)).sum(-1))
        else:
            q, p = (log.gather(-1, sampled_ids(rollout))[:, 0] for log in (log_q, log_p))
            rows.append(-(p - q).detach() * q)
    return torch.cat(rows).mean()


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize(
    ("form", "divergence"),
    [("full", "reverse_kl"), ("full", "forward_kl"), ("topk", "reverse_kl"), ("topk", "forward_kl"), ("sampled", "")],
)
def test_an_update_equals_a_plain_one(make, student, teacher, rollouts, vocab, form, divergence, budget):
    plain = copy.deepcopy(student)
    loss = plain_loss(plain, teacher, rollouts, vocab, divergence)
    expected = plain_step(plain, loss)
    learner = make(micro_batch_tokens=budget)
    metrics = learner.update([(r, [teach(r, teacher, vocab, form, divergence)]) for r in rollouts])
    for name, weight in weights(learner).items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-5, atol=2e-6)
    if form != "sampled":
        assert [metrics["loss"], metrics[divergence]] == pytest.approx([float(loss.detach())] * 2, rel=1e-5)
    norm = math.sqrt(sum(float(p.grad.square().sum()) for p in plain.parameters() if p.grad is not None))
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)


SIZES = [(3, 2), (2, 4), (4, 3), (5, 0)]


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("settings", [{}, {"reused": 2}, {"rerender": True}, {"rerender": True, "reused": 1}], ids=str)
@pytest.mark.parametrize("forms", [["full"], ["topk"], ["sampled"], ["sampled", "topk", "full"]], ids="-".join)
def test_an_episode_is_learned_as_its_turns(make, teacher, random_episode, random_rollout, vocab, forms, settings, budget):
    """Read once as a whole, or each turn after all that the student saw: the same loss, gradient and metrics."""
    episodes = [random_episode(seed, 6, *SIZES, **settings) for seed in range(2)]
    others = [random_rollout(9, (8, 4))]
    turns = [replace(r, turns=(turn,)) for r in episodes for turn in r.turns if turn.trainable.any()]
    results = []
    for rollouts in (episodes, turns):
        learner = make(fresh=True, micro_batch_tokens=budget)
        taught = [(r, [teach(r, teacher, vocab, form) for form in forms]) for r in [*rollouts, *others]]
        results.append((learner.update(taught), weights(learner)))
    (metrics, updated), (expected_metrics, expected) = results
    assert metrics == pytest.approx(expected_metrics, rel=1e-5, abs=1e-6)
    assert metrics["grad_norm"] > 0.1
    torch.testing.assert_close(updated, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("longest", "width"), [(None, 32), (30, 30)])
def test_widths_recur_within_what_the_model_can_read(make, taught, student, longest, width):
    if longest:
        student.config.max_position_embeddings = longest
    seen = []
    handle = decoder(student).register_forward_pre_hook(
        lambda _, args, inputs: seen.append(inputs["input_ids"].shape), with_kwargs=True
    )
    make(micro_batch_tokens=40).update([pair for pair in taught("sampled") if pair[0].num_tokens < 10])
    handle.remove()
    assert [shape[1] for shape in seen] == [width] * len(seen) != []


def test_on_the_cpu_a_batch_is_read_in_small_parts(make, random_rollout):
    learner = make()
    rollouts = [rewarded(random_rollout(seed, (100, 60)), 1.0) for seed in range(6)]
    seen = []
    handle = learner.loss.register_forward_pre_hook(lambda _, args: seen.append(args[0].input_ids.numel()))
    learner.update(rollouts)
    handle.remove()
    assert seen == [320, 320, 320]


def state_gradients(learner: Learner, taught: list[Taught]) -> list[Tensor]:
    """[B, T, H] of each sequence's last states, from one update."""
    found: list[Tensor] = []

    def keep(module: nn.Module, args: object, output) -> None:
        output.last_hidden_state.register_hook(lambda gradient: found.append(gradient))

    handle = decoder(learner.student).register_forward_hook(keep)
    learner.update(taught)
    handle.remove()
    return found


def other_token_at(rollout: Rollout, place: int, vocab: int) -> Rollout:
    """The same episode with another token at one place of its sequence."""

    def changed(turn: Turn) -> Turn:
        ids, num_context = np.concatenate([turn.context_ids, turn.sampled_ids]), len(turn.context_ids)
        ids[place : place + 1] = (ids[place : place + 1] + 1) % vocab
        return replace(turn, context_ids=ids[:num_context], sampled_ids=ids[num_context:])

    return replace(rollout, turns=tuple(map(changed, rollout.turns)))


@pytest.mark.parametrize("form", ["full", "topk", "sampled"])
def test_reused_and_observed_tokens_have_no_gradient_but_matter(make, teacher, random_episode, vocab, form):
    rollout = random_episode(0, 6, *SIZES, reused=1)
    term = teach(rollout, teacher, vocab, form)
    (passage,) = passages(rollout)
    (gradient,) = state_gradients(make(fresh=True), [(rollout, [term])])
    moved = gradient[0].abs().sum(-1).nonzero()[:, 0]
    assert moved.tolist() == (len(passage.context_ids) - 1 + passage.at).tolist()  # what predicts trainable tokens
    norm = make(fresh=True).update([(rollout, [term])])["grad_norm"]
    for place in (7, 10):  # a reused token, and an observed one
        changed = other_token_at(rollout, place, vocab)
        assert len(passages(changed)) == 1
        assert make(fresh=True).update([(changed, [term])])["grad_norm"] != pytest.approx(norm, rel=1e-4)


@pytest.mark.parametrize("normalizer", ["token_mean", "sequence_mean"])
def test_micro_batches_do_not_matter(make, taught, normalizer):
    results = []
    for budget in BUDGETS:
        learner = make(fresh=True, micro_batch_tokens=budget, normalizer=normalizer)
        results.append((learner.update(taught("sampled", "topk", "full")), weights(learner)))
    metrics, updated = results[-1]
    for other_metrics, other_weights in results[:-1]:
        assert other_metrics == pytest.approx(metrics, rel=1e-5, abs=1e-6)
        torch.testing.assert_close(other_weights, updated, rtol=1e-6, atol=1e-6)


def test_normalisers_by_hand(make, random_rollout):
    short, long = random_rollout(0, (3, 2)), random_rollout(1, (3, 4), (9, 2))
    both = [rewarded(short, 1.0), rewarded(long, 3.0)]
    for budget in BUDGETS:
        tokens = make(fresh=True, micro_batch_tokens=budget).update(both)
        assert tokens["loss"] == pytest.approx(-(2 * 1.0 + 6 * 3.0) / 8)
        sequences = make(fresh=True, micro_batch_tokens=budget, normalizer="sequence_mean").update(both)
        assert sequences["loss"] == pytest.approx(-(1.0 + 3.0) / 2)


def test_rollouts_without_a_trainable_token_change_nothing(make, taught, random_rollout):
    masked, empty = random_rollout(7, (5, 30)), random_rollout(8, (6, 0))
    nothing = [rewarded(masked, 9.0, np.zeros(30, bool)), rewarded(empty, 9.0), (masked, [])]
    for normalizer in ("token_mean", "sequence_mean"):
        alone, with_them = (make(fresh=True, normalizer=normalizer) for _ in range(2))
        metrics = alone.update(taught("sampled"))
        assert with_them.update(taught("sampled") + nothing) == pytest.approx(metrics)
        torch.testing.assert_close(weights(with_them), weights(alone), rtol=0, atol=1e-7)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_no_trainable_token_at_all(make, taught, random_rollout, weight_decay):
    learner = make({**STEP, "weight_decay": weight_decay})
    learner.update(taught("sampled"))  # moments that would move the weights
    before, rate = weights(learner), learner.scheduler.state_dict()
    masked = random_rollout(7, (5, 3))
    for nothing in ([], [rewarded(masked, 1.0, np.zeros(3, bool))], [rewarded(random_rollout(8, (6, 0)), 1.0)]):
        metrics = learner.update(nothing)
        assert (metrics["empty_updates"], metrics["loss"], metrics["nonfinite_updates"]) == (1, 0, 0)
        assert not changed(learner, before)
    assert learner.scheduler.state_dict() == rate


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_steps_that_are_not_finite_are_skipped_and_counted(make, rollouts, bad):
    learner = make(max_nonfinite_steps=2)
    before = weights(learner)
    good = [rewarded(rollout, 1.0) for rollout in rollouts]
    batch = [rewarded(rollouts[0], bad), *good[1:]]
    assert learner.update(batch)["nonfinite_updates"] == 1
    assert not changed(learner, before)
    assert learner.update(good)["nonfinite_updates"] == 0  # interrupts the row
    assert changed(learner, before)
    before = weights(learner)
    learner.update(batch)
    with pytest.raises(UserError, match=r"not finite in 2 steps in a row"):
        learner.update(batch)
    assert not changed(learner, before)


def test_two_updates_of_a_batch_refer_to_the_policy_before_both(make, taught, student, rollouts, vocab, monkeypatch):
    old = {r.slot: torch.cat(logp(student, r, vocab)).gather(-1, sampled_ids(r))[:, 0].detach() for r in rollouts}
    learner = make(updates_per_batch=2, micro_batch_tokens=1)
    seen = []
    step = learner._step
    monkeypatch.setattr(learner, "_step", lambda tokens, batches, sums: seen.append(batches) or step(tokens, batches, sums))
    before = weights(learner)
    metrics = learner.update(taught("sampled"))
    assert changed(learner, before)
    assert len(seen) == 2
    assert metrics["ratio_clipped"] > 0  # of the second update: the first one moved the policy
    ours = torch.cat([batch.old_logps for part in seen for batch in part]).sort().values
    torch.testing.assert_close(ours, torch.cat(list(old.values())).sort().values, rtol=0, atol=1e-5)
    assert learner.scheduler.state_dict()["last_epoch"] == 2


def test_one_update_of_a_batch_has_no_ratio(make, taught):
    assert make().update(taught("sampled"))["ratio_clipped"] == 0


@pytest.mark.parametrize("form", ["topk", "full"])
def test_learning_brings_the_student_to_the_teacher(make, taught, form):
    learner = make({"lr": 3e-3})
    start = learner.measure(taught("full"))["reverse_kl"]
    for _ in range(12):
        learner.update(taught(form))
    assert learner.measure(taught("full"))["reverse_kl"] < 0.7 * start


def test_sampled_tokens_the_teacher_prefers_become_more_likely(make, taught, student, rollouts, vocab):
    batch = taught("sampled")
    before = torch.cat([torch.cat(logp(student, r, vocab)).gather(-1, sampled_ids(r))[:, 0] for r in rollouts]).detach()
    advantage = torch.cat([torch.from_numpy(terms[0].inputs["reward"]) for _, terms in batch]) - before
    learner = make({"lr": 1e-4})
    learner.update(batch)
    after = torch.cat([torch.cat(logp(student, r, vocab)).gather(-1, sampled_ids(r))[:, 0] for r in rollouts]).detach()
    assert float((advantage * (after - before)).sum()) > 0


def test_measuring_changes_nothing(make, taught, student, teacher, rollouts, vocab):
    learner = make()
    before = weights(learner)
    figures = learner.measure(taught("full", "sampled"))
    assert not changed(learner, before)
    exact = plain_loss(student, teacher, rollouts, vocab, "reverse_kl").detach()
    assert figures["reverse_kl"] == pytest.approx(float(exact), rel=1e-5)
    assert learner.measure([]) == {}


def test_the_temperature_of_the_loss(make, student, teacher, taught, rollouts, vocab):
    figures = make(temperature=0.5).measure(taught("full"))
    rows = []
    for rollout in rollouts:
        log_q, log_p = ((torch.cat(logp(m, rollout, vocab)) / 0.5).log_softmax(-1) for m in (student, teacher))
        rows.append((log_q.exp() * (log_q - log_p)).sum(-1))
    assert figures["reverse_kl"] == pytest.approx(float(torch.cat(rows).mean().detach()), rel=1e-5)


def test_gradients_are_scaled_down_to_the_largest_norm(make, taught):
    learner, free = make({**STEP, "max_grad_norm": 0.01}, fresh=True), make(STEP, fresh=True)
    before = weights(learner)
    assert learner.update(taught("full"))["grad_norm"] == free.update(taught("full"))["grad_norm"] > 0.1
    moved = {name: torch.linalg.vector_norm(value - before[name]) for name, value in weights(learner).items()}
    assert math.hypot(*(float(value) for value in moved.values())) <= STEP["lr"] * 0.0101


def test_the_schedule(make, taught):
    learner = make({**STEP, "schedule": "linear", "warmup_ratio": 0.1})
    rates = [learner.update(taught("full"))["lr"] for _ in range(4)]
    assert rates == pytest.approx([0.0, 0.25, 0.5, 0.5 * 17 / 18])
    constant = make({**STEP, "warmup_ratio": 0.1}, fresh=True)
    assert [constant.update(taught("full"))["lr"] for _ in range(4)] == pytest.approx([0.0, 0.25, 0.5, 0.5])
    resumed = make({**STEP, "schedule": "linear", "warmup_ratio": 0.1}, fresh=True)
    resumed.load_state_dict(learner.state_dict())
    assert resumed.optimizer.param_groups[0]["lr"] == pytest.approx(0.5 * 16 / 18)
    assert resumed.update(taught("full"))["lr"] == pytest.approx(0.5 * 16 / 18)


def test_low_precision_keeps_master_weights(make, taught):
    exact, low = make(fresh=True), make(fresh=True, precision="bfloat16")
    figures = [learner.update(taught("full", "sampled")) for learner in (exact, low)]
    assert figures[0] != figures[1]
    assert figures[1]["reverse_kl"] == pytest.approx(figures[0]["reverse_kl"], rel=0.05)
    assert {p.dtype for p in low.student.parameters()} == {torch.float32}
    for ours, theirs in zip(weights(low).values(), weights(exact).values()):
        assert torch.cosine_similarity(ours.flatten(), theirs.flatten(), dim=0) > 0.99


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft asks for a renamed property
@pytest.mark.parametrize("kind", ["copy", "adapters"])
def test_the_reference_is_the_frozen_start(make, student, rollouts, vocab, kind):
    start, learns = copy.deepcopy(student), None
    if kind == "adapters":
        config = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
        learns = peft.get_peft_model(copy.deepcopy(student), config)  # type: ignore[arg-type]
    reference = "adapters off" if kind == "adapters" else copy.deepcopy(student)
    learner = make({"lr": 1e-2}, temperature=0.7, reference=reference, learns=learns, updates_per_batch=2)
    inputs = {"self_coef": 0.5, "reference_coef": 0.5, "advantage_clip": None, "ratio_clip": 0.2, "importance_cap": None}

    def taught(reward: float) -> list[Taught]:
        rewards = [np.full(rollout.num_tokens, reward, np.float32) for rollout in rollouts]
        return [(r, [Term("policy_gradient", r.trainable, {**inputs, "reward": x})]) for r, x in zip(rollouts, rewards)]

    first = learner.update(taught(1.0))
    assert first["displacement"] != 0.0  # the second of the two updates sees a student that has moved
    displaced = []
    with torch.no_grad():
        for rollout in rollouts:
            now, before = (torch.cat(logp(model, rollout, vocab)) for model in (learner.student, start))
            scaled = [(x / 0.7).log_softmax(-1).gather(-1, sampled_ids(rollout))[:, 0] for x in (now, before)]
            displaced.append(scaled[0] - scaled[1])
    one = make({"lr": 0.0}, temperature=0.7, reference=reference, learns=learner.student)
    found = one.update(taught(0.0))
    assert found["displacement"] == pytest.approx(float(torch.cat(displaced).mean()), rel=1e-4)
    assert found["advantage"] == pytest.approx(-0.5 * found["displacement"], rel=1e-4)
    assert abs(found["displacement"]) > 1e-3


@pytest.mark.parametrize("budget", BUDGETS)
def test_with_a_baseline_the_same_reward_for_all_teaches_nothing(make, rollouts, budget):
    def taught(shift: float) -> list[Taught]:
        inputs = {"self_coef": 1.0, "advantage_clip": None, "ratio_clip": 0.2, "importance_cap": None, "baseline": "mean"}
        found = []
        for rollout in rollouts:
            rewards = np.random.default_rng(rollout.slot).normal(size=rollout.num_tokens).astype(np.float32)
            found.append((rollout, [Term("policy_gradient", rollout.trainable, {**inputs, "reward": rewards + shift})]))
        return found

    learners = [make(fresh=True, micro_batch_tokens=budget, updates_per_batch=2) for _ in range(2)]
    for learner, shift in zip(learners, (0.0, 5.0)):
        learner.update(taught(shift))
    for name, value in weights(learners[0]).items():
        torch.testing.assert_close(value, weights(learners[1])[name], rtol=0, atol=1e-5)
