"""Loss and gradients of the chunked head against plain float64 autograd over the whole matrix of logits."""

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from opd.kernels.head import OutputHead
from opd.kernels.topk import topk_divergence
from opd.objective import terms
from opd.objective.batching import MicroBatch, PackedTerm, select_rows
from opd.objective.head_loss import LossSpec, RowSums, head_loss, row_logps
from opd.records import Hidden, TopK

VOCAB, ROWS, H, TEACHER_H = 50, 56, 16, 24
GENERATOR = torch.Generator()


@pytest.fixture(autouse=True)
def seed():
    GENERATOR.manual_seed(0)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=GENERATOR)


def padded(weight: Tensor) -> Tensor:
    """With rows of NaN beyond the vocabulary in use."""
    return torch.cat([weight, torch.full((ROWS - VOCAB, weight.shape[1]), torch.nan)])


@pytest.fixture
def heads():
    return {name: OutputHead(padded(normal(VOCAB, TEACHER_H)), 0.5) for name in ("first", "second")}


def spec_of(heads, rows: int = 1000, temperature: float = 0.7) -> LossSpec:
    """Chunks of `rows` rows in fp32."""
    return LossSpec(heads, VOCAB, temperature, chunk_bytes=rows * VOCAB * 4)


def sampled(n: int, **inputs) -> PackedTerm:
    plain = {"self_coef": 1.0, "advantage_clip": None, "ratio_clip": None, "importance_cap": None}
    scale, rewards = torch.rand(n, generator=GENERATOR), {"reward": normal(n), "teacher_sampled": normal(n)}
    return PackedTerm("policy_gradient", scale, {**rewards, **plain, **inputs})


def topk(n: int, k: int = 5, divergence: str = "reverse_kl", tail: str = "tail") -> PackedTerm:
    logp = (2 * normal(n, VOCAB)).log_softmax(-1)
    top = logp.topk(k)
    ids = top.indices.clone()
    ids[::3, -1] = -1  # an absent entry in some rows
    mass = (top.values.exp() * (ids >= 0)).sum(-1)
    target = TopK(ids, top.values.masked_fill(ids < 0, 0.0), 1 - mass)  # type: ignore[arg-type]
    inputs = {"divergence": divergence, "beta": 0.5, "tail": tail, "target": target}
    return PackedTerm("divergence", torch.rand(n, generator=GENERATOR), inputs)


def full(n: int, divergence: str = "reverse_kl", head: str = "first") -> PackedTerm:
    inputs = {"divergence": divergence, "beta": 0.3, "tail": "tail", "target": Hidden((normal(n, TEACHER_H),), head)}
    return PackedTerm("divergence", torch.rand(n, generator=GENERATOR), inputs)


def batch_of(n: int, *packed: PackedTerm, old: bool = False) -> MicroBatch:
    ids = torch.randint(0, VOCAB, (n,), generator=GENERATOR)
    old_logps = -1 - torch.rand(n, generator=GENERATOR) if old else None
    return MicroBatch(ids[None], torch.arange(n), ids, normal(n), packed, old_logps)


def reference(hidden: Tensor, weight: Tensor, scale: float, batch: MicroBatch, spec: LossSpec) -> Tensor:
    """The same loss in float64, from hidden and weight of that type."""
    log_q = (hidden @ weight[:VOCAB].T * scale / spec.temperature).log_softmax(-1)
    sampled_logp = log_q.gather(-1, batch.token_ids[:, None])[:, 0]
    loss = log_q.new_zeros(())
    for term in batch.terms:
        inputs, target = term.inputs, term.inputs.get("target")
        if isinstance(target, Hidden):
            head = spec.heads[target.head]
            teacher = target.states[0].double() @ head.weight[:VOCAB].double().T  # type: ignore
            log_p = (teacher * head.scale / spec.temperature).log_softmax(-1)
            log_m = (inputs["beta"] * log_p.exp() + (1 - inputs["beta"]) * log_q.exp()).log()
            rows = {
                "reverse_kl": log_q.exp() * (log_q - log_p),
                "forward_kl": log_p.exp() * (log_p - log_q),
                "jsd": inputs["beta"] * log_p.exp() * (log_p - log_m) + (1 - inputs["beta"]) * log_q.exp() * (log_q - log_m),
            }[inputs["divergence"]].sum(-1)
        elif isinstance(target, TopK):
            ids, logps, tail = (torch.as_tensor(part) for part in (target.ids, target.logps, target.tail))
            how = {"outside": inputs["tail"], "kind": inputs["divergence"], "beta": inputs["beta"]}
            rows = topk_divergence(log_q.gather(-1, ids.clamp(min=0)), logps.double(), tail.double(), ids >= 0, **how)
        else:
            advantage = inputs["reward"].double() - inputs["self_coef"] * sampled_logp.detach()
            if "unit_starts" in inputs:
                edges = [*inputs["unit_starts"].nonzero()[:, 0].tolist(), len(sampled_logp)]
                means = [sampled_logp.detach()[a:b].mean().expand(b - a) for a, b in itertools.pairwise(edges)]
                advantage = advantage - inputs["unit_coef"] * torch.cat(means)
                assert batch.reference_logps is not None
                advantage = advantage + inputs["reference_coef"] * batch.reference_logps.double()
            old = sampled_logp.detach() if batch.old_logps is None else batch.old_logps.double()
            rows = -(sampled_logp - old).exp() * advantage
        loss = loss + (term.scale.double() * rows).sum()
    return loss


def check(hidden, weight, scale, batch, spec, rtol=1e-5, atol=3e-6, grad_output=1.0) -> tuple[Tensor, Tensor]:
    """Compares, and returns the gradients with respect to hidden and weight."""
    hidden, weight = hidden.requires_grad_(), weight.requires_grad_()
    loss, _ = head_loss(hidden, OutputHead(weight, scale), batch, spec)
    (grad_output * loss).backward()
    exact_hidden = hidden.detach().double().requires_grad_()
    exact_weight = weight.detach().to(hidden.dtype).double().requires_grad_()
    exact = reference(exact_hidden, exact_weight, scale, batch, spec)
    (grad_output * exact).backward()
    torch.testing.assert_close(loss.double(), exact, rtol=rtol, atol=atol)
    for ours, theirs in ((hidden, exact_hidden), (weight, exact_weight)):
        assert ours.grad.dtype == ours.dtype
        largest = float(theirs.grad.abs().max())  # type: ignore[union-attr]
        torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=rtol, atol=atol * largest)
    assert not weight.grad[VOCAB:].any()
    return hidden.grad, weight.grad


N = 7
MIXTURES = {
    "sampled": lambda: [sampled(N)],
    "topk": lambda: [topk(N)],
    "full": lambda: [full(N)],
    "sampled and topk": lambda: [sampled(N), topk(N, tail="truncate")],
    "two topk": lambda: [topk(N, 3, "forward_kl", "renormalise"), topk(N, 6, "jsd")],
    "two teachers in full": lambda: [full(N, "forward_kl"), full(N, "jsd", "second")],
    "everything": lambda: [full(N), sampled(N), topk(N), full(N, "jsd", "second"), topk(N, 2, "forward_kl")],
}


@pytest.mark.parametrize("rows", [1, 3, 1000])
@pytest.mark.parametrize("mixture", MIXTURES)
def test_mixtures_of_terms(heads, mixture, rows):
    batch = batch_of(N, *MIXTURES[mixture]())
    check(normal(N, H), padded(normal(VOCAB, H)), 1.0, batch, spec_of(heads, rows))


@pytest.mark.parametrize(("scale", "temperature"), [(0.25, 1.0), (2.0, 0.7), (1.0, 2.0)])
def test_scales_and_temperatures(heads, scale, temperature):
    batch = batch_of(N, *MIXTURES["everything"]())
    check(normal(N, H), padded(normal(VOCAB, H)), scale, batch, spec_of(heads, 3, temperature))


def test_the_loss_need_not_be_last(heads):
    batch = batch_of(N, *MIXTURES["everything"]())
    check(normal(N, H), padded(normal(VOCAB, H)), 1.0, batch, spec_of(heads, 3), grad_output=3.0)


def test_the_ratio_to_an_older_policy(heads):
    check(normal(N, H), padded(normal(VOCAB, H)), 1.0, batch_of(N, sampled(N), old=True), spec_of(heads))


@pytest.mark.parametrize("rows", [2, 1000])
def test_low_precision_states_with_master_weights(heads, rows):
    batch = batch_of(N, *MIXTURES["everything"]())
    hidden = normal(N, H).bfloat16()
    _, grad_weight = check(hidden, padded(normal(VOCAB, H)), 1.0, batch, spec_of(heads, rows), rtol=0.02, atol=0.02)
    assert grad_weight.dtype == torch.float32


def test_autocast_around_it_changes_nothing(heads):
    batch = batch_of(N, *MIXTURES["everything"]())
    with torch.autocast("cpu", torch.bfloat16):
        check(normal(N, H), padded(normal(VOCAB, H)), 1.0, batch, spec_of(heads))


def test_a_frozen_head_or_frozen_states(heads):
    batch, spec = batch_of(N, *MIXTURES["everything"]()), spec_of(heads, 3)
    hidden, weight = normal(N, H), padded(normal(VOCAB, H))
    grad_hidden, grad_weight = check(hidden.clone(), weight.clone(), 1.0, batch, spec)
    frozen, trained = weight.clone(), hidden.clone().requires_grad_()
    head_loss(trained, OutputHead(frozen), batch, spec)[0].backward()
    assert frozen.grad is None
    torch.testing.assert_close(trained.grad, grad_hidden)
    head = weight.clone().requires_grad_()
    head_loss(hidden, OutputHead(head), batch, spec)[0].backward()
    torch.testing.assert_close(head.grad, grad_weight)
    with torch.no_grad():
        assert not head_loss(trained, OutputHead(head), batch, spec)[0].requires_grad


def test_no_rows(heads):
    packed = [sampled(0), topk(0), full(0)]
    for batch in (batch_of(0), batch_of(0, *packed)):
        hidden, weight = normal(0, H).requires_grad_(), padded(normal(VOCAB, H)).requires_grad_()
        loss, sums = head_loss(hidden, OutputHead(weight), batch, spec_of(heads))
        loss.backward()
        assert loss == 0
        assert sums.values == {}
        assert hidden.grad is not None
        assert hidden.grad.shape == (0, H)
        assert weight.grad is not None
        assert not weight.grad.any()


def test_a_row_of_scale_zero_has_no_gradient(heads):
    packed = [sampled(N), topk(N), full(N)]
    for term in packed:
        term.scale[2] = 0.0
    grad_hidden, _ = check(normal(N, H), padded(normal(VOCAB, H)), 1.0, batch_of(N, *packed), spec_of(heads))
    assert not grad_hidden[2].any()
    assert grad_hidden[1].any()


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("divergence", ["reverse_kl", "forward_kl", "jsd"])
def test_a_student_equal_to_its_teacher_has_nothing_to_learn(divergence, temperature):
    hidden, weight = normal(N, H), padded(normal(VOCAB, H))
    spec = spec_of({"first": OutputHead(weight.clone())}, 3, temperature)
    term = full(N, divergence)
    term.inputs["target"].states[0].resize_(N, H).copy_(hidden)
    hidden.requires_grad_()
    loss, sums = head_loss(hidden, OutputHead(weight), batch_of(N, term), spec)
    loss.backward()
    assert abs(RowSums.means([sums])[divergence]) <= 1e-7
    torch.testing.assert_close(hidden.grad, torch.zeros(N, H), rtol=0, atol=1e-6)


def test_the_teacher_decides_the_gradient(heads):
    for term in (sampled(N), topk(N), full(N)):
        hidden, weight = normal(N, H), padded(normal(VOCAB, H))
        batch = batch_of(N, term)
        before, _ = check(hidden.clone(), weight.clone(), 1.0, batch, spec_of(heads))
        teachers = term.inputs["reward"] if "reward" in term.inputs else term.inputs["target"]
        perturbed = {Hidden: lambda t: t.states[0], TopK: lambda t: t.logps}.get(type(teachers), lambda t: t)(teachers)
        perturbed += 0.1 * normal(*perturbed.shape)
        after, _ = check(hidden.clone(), weight.clone(), 1.0, batch, spec_of(heads))
        assert (after - before).abs().max() > 1e-3


def test_figures_are_means_over_rows_whatever_the_chunks(heads):
    batch = batch_of(N, *MIXTURES["everything"]())
    hidden, weight = normal(N, H), padded(normal(VOCAB, H))
    means = [RowSums.means([head_loss(hidden, OutputHead(weight), batch, spec_of(heads, rows))[1]]) for rows in (1, 3, 1000)]
    for other in means[1:]:
        assert other == pytest.approx(means[0], rel=1e-5)
    log_q = (hidden @ weight[:VOCAB].T / 0.7).log_softmax(-1)
    sampled_logp = log_q.gather(-1, batch.token_ids[:, None])[:, 0]
    assert means[0]["entropy"] == pytest.approx(-float((log_q.exp() * log_q).sum(-1).mean()), rel=1e-5)
    assert means[0]["mismatch"] == pytest.approx(float((sampled_logp - batch.sampler_logps).abs().mean()), rel=1e-5)
    teacher = batch.terms[1].inputs["teacher_sampled"]
    assert means[0]["reverse_kl_sampled"] == pytest.approx(float((sampled_logp - teacher).mean()), rel=1e-4)


def test_figures_leave_out_rows_that_the_term_does_not_train(heads):
    term = sampled(N)
    term.scale[::2] = 0.0
    hidden, weight, batch = normal(N, H), padded(normal(VOCAB, H)), batch_of(N, term)
    sums = head_loss(hidden, OutputHead(weight), batch, spec_of(heads))[1]
    logps = row_logps(hidden, OutputHead(weight), batch, spec_of(heads))
    expected = float((logps - term.inputs["teacher_sampled"])[1::2].mean())
    assert RowSums.means([sums])["reverse_kl_sampled"] == pytest.approx(expected, rel=1e-5)


def units_of(n: int, *sizes: int) -> Tensor:
    """[n] bool: starts of units of these sizes in turn."""
    starts, place = torch.zeros(n, dtype=torch.bool), 0
    for size in itertools.cycle(sizes):
        if place >= n:
            return starts
        starts[place] = True
        place += size
    raise AssertionError


@pytest.mark.parametrize("rows", [1, 3, 4, 1000])
def test_units_are_judged_together_whatever_the_chunks(heads, rows):
    starts = units_of(N, 1, 4, 2)
    term = sampled(N, self_coef=0.3, unit_coef=0.7, unit_starts=starts, reference_coef=0.2)
    batch = replace(batch_of(N, term, topk(N)), reference_logps=normal(N))
    check(normal(N, H), padded(normal(VOCAB, H)), 0.5, batch, spec_of(heads, rows))


def test_parts_of_several_processes_are_averaged_over_all_rows():
    parts = [RowSums(), RowSums(), RowSums()]
    parts[0].add("a", torch.tensor([1.0, 2.0, 3.0]))
    parts[1].add("a", torch.tensor([10.0]))
    parts[1].add("b", torch.tensor([5.0]))
    assert RowSums.means(parts) == {"a": 4.0, "b": 5.0}


def test_row_logps(heads):
    batch, hidden, weight = batch_of(N), normal(N, H), padded(normal(VOCAB, H))
    exact = (hidden.double() @ weight[:VOCAB].double().T * 2.0 / 0.7).log_softmax(-1)
    for rows in (1, 3, 1000):
        logps = row_logps(hidden, OutputHead(weight, 2.0), batch, spec_of(heads, rows))
        torch.testing.assert_close(logps.double(), exact.gather(-1, batch.token_ids[:, None])[:, 0], rtol=0, atol=5e-6)
    assert row_logps(hidden[:0], OutputHead(weight, 2.0), select_rows(batch, slice(0, 0)), spec_of(heads)).shape == (0,)


def test_a_kind_of_a_third_party(heads, monkeypatch):
    monkeypatch.setattr(terms, "KINDS", terms.KINDS)
    monkeypatch.setitem(terms.KINDS, "likelihood", lambda logp, inputs: (-inputs["by"] * logp, {"likelihood": logp}))
    term = PackedTerm("likelihood", torch.ones(N), {"by": 2.0})
    batch, hidden, weight = batch_of(N, term), normal(N, H).requires_grad_(), padded(normal(VOCAB, H))
    loss, sums = head_loss(hidden, OutputHead(weight), batch, spec_of(heads, 3))
    log_q = (hidden @ weight[:VOCAB].T / 0.7).log_softmax(-1)
    exact = -2.0 * log_q.gather(-1, batch.token_ids[:, None]).sum()
    torch.testing.assert_close(loss, exact)
    torch.testing.assert_close(torch.autograd.grad(loss, hidden), torch.autograd.grad(exact, hidden))
    assert sums.counts["likelihood"] == N


class Widest(TorchDispatchMode):
    """The most rows of any matrix with a column for each token that comes up within."""

    num_rows = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        weight = isinstance(out, Tensor) and out.shape[:1] in ((H,), (TEACHER_H,))
        if isinstance(out, Tensor) and out.dim() == 2 and out.shape[1] >= VOCAB and not weight:
            self.num_rows = max(self.num_rows, out.shape[0])
        return out


@pytest.mark.parametrize("kind", ["sampled", "topk", "full", "everything"])
def test_only_a_chunk_of_logits_exists_at_a_time(heads, kind):
    batch = batch_of(N, *MIXTURES[kind]())
    hidden, head = normal(N, H).requires_grad_(), OutputHead(padded(normal(VOCAB, H)).requires_grad_())
    with Widest() as widest:
        head_loss(hidden, head, batch, spec_of(heads, 2))[0].backward()
    assert widest.num_rows == 2
