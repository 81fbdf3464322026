"""Losses from hidden states and head weights against float64 autograd over full logits."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from opd.kernels import blocks, linear_autograd
from opd.kernels.head import OutputHead
from opd.kernels.linear import Teacher, TeacherSampled, TeacherStates, TeacherTopK, linear_gather_logprob, linear_reverse_kl

N, H, T, ROWS, VOCAB, K = 11, 8, 6, 150, 127, 5
SIDES = ["states", "tail", "renormalise", "truncate", "sampled"]
MODES = ["fused", "recompute"]
KINDS = [("reverse_kl", 0.5), ("forward_kl", 0.5), ("jsd", 0.3)]
CASES = [(side, *kind) for side in SIDES[:-1] for kind in KINDS] + [("sampled", "reverse_kl", 0.5)]
ALL = ("hidden", "weight", "bias")
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Blocks of two rows, so that several of them meet even here."""
    monkeypatch.setattr(blocks, "CACHE_BYTES", 8 * VOCAB * 2)
    monkeypatch.setattr(blocks, "MIN_ROWS", 1)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def uniform(*shape: int) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(1)) + 0.1


def head_of(width: int = H, seed: int = 0, dtype: torch.dtype = torch.float32, bias: bool = False, **more) -> OutputHead:
    """Rows beyond the vocabulary hold NaN."""
    weight, offsets = normal(ROWS, width, seed=seed, dtype=dtype), normal(ROWS, seed=seed, dtype=dtype)
    weight[VOCAB:] = offsets[VOCAB:] = torch.nan
    return OutputHead(weight, bias=offsets if bias else None, **more)


def cast(head: OutputHead, dtype: torch.dtype) -> OutputHead:
    assert head.weight is not None
    return replace(head, weight=head.weight.to(dtype), bias=None if head.bias is None else head.bias.to(dtype))


def exact_logits(hidden: Tensor, head: OutputHead, temperature: float = 1.0) -> Tensor:
    assert head.weight is not None
    logits = hidden.double() @ head.weight[:VOCAB].double().T
    if head.bias is not None:
        logits = logits + head.bias[:VOCAB].double()
    if head.softcap is not None:
        logits = head.softcap * torch.tanh(logits / head.softcap)
    return logits * head.scale / temperature


def teacher_of(side: str, temperature: float = 1.0, dtype: torch.dtype = torch.float32, **more) -> Teacher:
    """What that side knows of one and the same teacher."""
    hidden, head = normal(N, T, seed=5, dtype=dtype), head_of(T, 6, dtype, **more)
    if side == "states":
        return TeacherStates(hidden, head)
    log_p = exact_logits(hidden, head, temperature).log_softmax(-1)
    if side == "sampled":
        ids = torch.randint(VOCAB, (N,), generator=torch.Generator().manual_seed(3))
        return TeacherSampled(ids, log_p.gather(-1, ids[:, None])[:, 0].to(dtype))
    logps, ids = log_p.topk(K)
    ids[2, 3:] = ids[4] = -1  # a few entries absent, all of them in one row
    tail = 1 - (logps.exp() * (ids >= 0)).sum(-1)
    logps[ids < 0] = 7.0  # must not be looked at
    return TeacherTopK(ids, logps.to(dtype), tail.to(dtype), side)


def exact_rows(log_q: Tensor, teacher: Teacher, kind: str, beta: float, temperature: float) -> Tensor:
    """The divergence of each row; for a sampled token, a loss of the same gradient."""
    if isinstance(teacher, TeacherStates):
        return pointwise(log_q, exact_logits(*teacher, temperature).log_softmax(-1), kind, beta).sum(-1)
    if isinstance(teacher, TeacherSampled):
        return (log_q.gather(-1, teacher.ids[:, None])[:, 0] - teacher.logps.double()).square() / 2
    ids, present = teacher.ids.clamp(min=0), teacher.ids >= 0
    log_q, log_p = log_q.gather(-1, ids), teacher.logps.double().where(present, 0.0)
    if teacher.outside == "renormalise":
        log_q, log_p = (x - x.exp().mul(present).sum(-1, keepdim=True).clamp(min=1e-300).log() for x in (log_q, log_p))
    rows = (pointwise(log_q, log_p, kind, beta) * present).sum(-1)
    if teacher.outside != "tail":
        return rows
    q_tail = 1 - (log_q.exp() * present).sum(-1)
    return rows + pointwise(q_tail.clamp(min=1e-7).log(), teacher.tail.double().clamp(min=1e-7).log(), kind, beta)


def pointwise(log_q: Tensor, log_p: Tensor, kind: str, beta: float) -> Tensor:
    q, p = log_q.exp(), log_p.exp()
    if kind == "reverse_kl":
        return q * (log_q - log_p) - q + p
    if kind == "forward_kl":
        return p * (log_p - log_q) - p + q
    log_m = (beta * p + (1 - beta) * q).log()
    return beta * p * (log_p - log_m) + (1 - beta) * q * (log_q - log_m)


def leaves(hidden: Tensor, head: OutputHead, names: tuple[str, ...] = ALL) -> tuple[Tensor, OutputHead]:
    """Copies, of which those named are to get a gradient."""
    copies = [
        None if value is None else value.detach().clone().requires_grad_(name in names)
        for name, value in zip(ALL, (hidden, head.weight, head.bias))
    ]
    assert copies[0] is not None
    return copies[0], replace(head, weight=copies[1], bias=copies[2])


def gradients(hidden: Tensor, head: OutputHead) -> dict[str, Tensor]:
    """Of those that have one."""
    pairs = zip(ALL, (hidden, head.weight, head.bias))
    return {name: leaf.grad for name, leaf in pairs if leaf is not None and leaf.grad is not None}


def assert_near(own: dict[str, Tensor], expected: dict[str, Tensor], share: float = 1e-5) -> None:
    """Within a share of the largest."""
    assert own.keys() == expected.keys()
    for name, grad in own.items():
        assert grad.shape == expected[name].shape
        assert grad.isfinite().all()
        if grad.numel():
            assert (grad.double() - expected[name]).abs().max() <= share * expected[name].abs().max() + 1e-9, name


def check(
    hidden: Tensor,
    head: OutputHead,
    teacher: Teacher,
    weight: Tensor | None = None,
    upstream: float = 1.0,
    names: tuple[str, ...] = ALL,
    **options: Any,
) -> None:
    """Loss, rows and gradients against float64."""
    options = {"vocab": VOCAB, "kind": "reverse_kl", "beta": 0.5, "temperature": 1.0, **options}
    kind, beta, temperature = options["kind"], options["beta"], options["temperature"]
    exact, exact_head = leaves(hidden.double(), cast(head, torch.float64), names)
    log_q = exact_logits(exact, exact_head, temperature).log_softmax(-1)
    rows = exact_rows(log_q, teacher, kind, beta, temperature)
    live = torch.ones(len(hidden)) if weight is None else weight
    total = (rows * live.double()).where(live != 0, 0.0).sum()
    if total.requires_grad:
        (total * upstream).backward()
    if isinstance(teacher, TeacherSampled):
        rows = log_q.gather(-1, teacher.ids[:, None])[:, 0] - teacher.logps.double()
    rows = rows.detach().where(live != 0, 0.0)

    ours, own_head = leaves(hidden, head, names)
    loss, own_rows = linear_reverse_kl(ours, own_head, teacher, weight, **options)
    if total.requires_grad:
        (loss * upstream).backward()
    torch.testing.assert_close(own_rows.double(), rows, rtol=2e-5, atol=2e-6)
    torch.testing.assert_close(loss.detach().double(), (rows * live).sum(), rtol=2e-5, atol=2e-5)
    assert_near(gradients(ours, own_head), gradients(exact, exact_head))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize(("side", "kind", "beta"), CASES)
def test_every_teacher_and_divergence(side, kind, beta, temperature, mode):
    teacher = teacher_of(side, temperature)
    options = {"kind": kind, "beta": beta, "temperature": temperature, "mode": mode, "max_bytes": 4 * VOCAB * 4}
    check(normal(N, H), head_of(), teacher, uniform(N), upstream=-0.7, **options)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize(
    "form", [{"softcap": 3.0}, {"bias": True}, {"scale": 0.25}, {"softcap": 2.0, "bias": True, "scale": 1.5}]
)
def test_heads_with_soft_cap_bias_and_scale(form, side, mode):
    teacher = teacher_of(side, 0.7, **{**form, "scale": 0.8})
    check(normal(N, H), head_of(**form), teacher, uniform(N), temperature=0.7, mode=mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("live", [[0, 3, 5, 10], [], [5]])
def test_masked_rows_are_not_looked_at(live, side, mode):
    weight, rows = torch.zeros(N), torch.tensor(live, dtype=torch.long)
    weight[rows] = uniform(len(live))
    hidden, teacher = normal(N, H), teacher_of(side)
    check(hidden, head_of(), teacher, weight, mode=mode, max_bytes=2 * VOCAB * 4)
    hidden[weight == 0] = torch.nan
    ours, head = leaves(hidden, head_of())
    loss, divergences = linear_reverse_kl(ours, head, teacher, weight, vocab=VOCAB, mode=mode)
    loss.backward()
    assert loss.isfinite()
    assert divergences.nonzero()[:, 0].tolist() == live
    assert all(grad.isfinite().all() for grad in gradients(ours, head).values())
    assert not gradients(ours, head)["hidden"][weight == 0].any()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("side", SIDES)
def test_without_rows(side, mode):
    teacher = teacher_of(side)
    none = teacher._make(value[:0] if isinstance(value, Tensor) else value for value in teacher)
    ours, head = leaves(normal(0, H), head_of(bias=True))
    loss, rows = linear_reverse_kl(ours, head, none, torch.ones(0), vocab=VOCAB, mode=mode)
    loss.backward()
    assert loss == 0
    assert rows.shape == (0,)
    assert not any(grad.any() for grad in gradients(ours, head).values())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("side", ["states", "tail"])
@pytest.mark.parametrize("names", [(), ("hidden",), ("weight",), ("bias",), ("weight", "bias")])
def test_frozen_leaves_get_no_gradient(names, side, mode):
    check(normal(N, H), head_of(bias=True), teacher_of(side), uniform(N), names=names, mode=mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("side", SIDES)
def test_the_size_of_chunks_changes_nothing(side, mode):
    """Beyond the order of sums."""
    results = []
    for max_bytes in (1, 3 * VOCAB * 8, 4 * VOCAB * 8, None):
        ours, head = leaves(normal(N, H, dtype=torch.float64), cast(head_of(bias=True), torch.float64))
        loss, rows = linear_reverse_kl(
            ours, head, teacher_of(side, dtype=torch.float64), vocab=VOCAB, mode=mode, max_bytes=max_bytes
        )
        loss.backward()
        results.append([loss.detach(), rows.detach(), *gradients(ours, head).values()])
    for other in results[1:]:
        for one, two in zip(results[0], other):
            torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("side", SIDES)
def test_rows_may_be_weighed_after_they_are_known(side):
    """`recompute`: upstream gradients of loss and rows add up."""
    later, weight = uniform(N) - 0.5, uniform(N).requires_grad_()
    exact, exact_head = leaves(normal(N, H).double(), cast(head_of(), torch.float64))
    log_q = exact_logits(exact, exact_head).log_softmax(-1)
    (exact_rows(log_q, teacher_of(side), "reverse_kl", 0.5, 1.0) * (later + 3 * weight.detach())).sum().backward()
    ours, head = leaves(normal(N, H), head_of())
    loss, rows = linear_reverse_kl(ours, head, teacher_of(side), weight, vocab=VOCAB, mode="recompute")
    (3 * loss + (rows * later).sum()).backward()
    assert_near(gradients(ours, head), gradients(exact, exact_head))
    assert weight.grad is None  # a given number


def test_fused_rows_carry_no_gradient_and_the_loss_can_be_used_once():
    ours, head = leaves(normal(N, H), head_of())
    loss, rows = linear_reverse_kl(ours, head, teacher_of("states"), vocab=VOCAB)
    assert not rows.requires_grad
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("side", ["states", "tail", "sampled"])
def test_without_autograd_there_are_values_alone(side, monkeypatch):
    ours, head = leaves(normal(N, H), head_of())
    results = [linear_reverse_kl(ours, head, teacher_of(side), uniform(N), vocab=VOCAB, mode=mode) for mode in MODES]
    monkeypatch.setattr(linear_autograd, "divergence_with_grad", None)  # nor is a gradient computed
    monkeypatch.setattr(linear_autograd, "gather_grad", None)
    with torch.no_grad():
        bare = [linear_reverse_kl(ours, head, teacher_of(side), uniform(N), vocab=VOCAB, mode=mode) for mode in MODES]
    for result in (results[1], *bare):
        torch.testing.assert_close(result.loss, results[0].loss)
        torch.testing.assert_close(result.rows, results[0].rows)
    assert not any(result.loss.requires_grad or result.rows.requires_grad for result in bare)


@pytest.mark.parametrize("kind", ["reverse_kl", "forward_kl", "jsd"])
def test_recompute_saves_a_few_floats_a_row(kind):
    saved = []
    ours, head = leaves(normal(N, H), head_of())
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: saved.append(tensor.numel()) or tensor, lambda tensor: tensor
    ):
        linear_reverse_kl(ours, head, teacher_of("states"), uniform(N), vocab=VOCAB, mode="recompute", kind=kind)
    assert head.weight is not None
    assert max(size for size in saved if size != head.weight.numel()) == N * H


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("side", ["states", "tail", "sampled"])
def test_bfloat16_rounds_logits_and_gradients_alone(side, mode):
    """The statistics are those of the rounded logits to fp32's precision."""
    hidden, head, teacher = normal(N, H).bfloat16(), head_of(dtype=torch.bfloat16), teacher_of(side)
    if isinstance(teacher, TeacherStates):
        teacher = TeacherStates(teacher.hidden.bfloat16(), cast(teacher.head, torch.bfloat16))
        rounded = TeacherStates(teacher.head.raw(teacher.hidden, VOCAB).double(), OutputHead(torch.eye(VOCAB)))
    else:
        rounded = teacher
    logits = head.raw(hidden, VOCAB).double().requires_grad_()
    rows = exact_rows(logits.log_softmax(-1), rounded, "reverse_kl", 0.5, 1.0)
    rows.sum().backward()
    if isinstance(teacher, TeacherSampled):
        rows = logits.log_softmax(-1).gather(-1, teacher.ids[:, None])[:, 0] - teacher.logps
    assert head.weight is not None
    assert logits.grad is not None
    expected = {
        "hidden": logits.grad @ head.weight[:VOCAB].double(),
        "weight": torch.zeros(ROWS, H, dtype=torch.float64),
    }
    expected["weight"][:VOCAB] = logits.grad.T @ hidden.double()
    ours, own_head = leaves(hidden, head)
    loss, own_rows = linear_reverse_kl(ours, own_head, teacher, vocab=VOCAB, mode=mode)
    loss.backward()
    assert loss.dtype == own_rows.dtype == torch.float32
    torch.testing.assert_close(own_rows.detach().double(), rows.detach(), rtol=1e-5, atol=1e-5)
    assert ours.grad is not None
    assert ours.grad.dtype == torch.bfloat16
    assert_near(gradients(ours, own_head), expected, share=2**-6)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("max_bytes", [3 * VOCAB * 2, None])
def test_master_weights_with_bfloat16_states(max_bytes, mode):
    """Products in bf16, gradients of the weights in fp32."""
    hidden, head, teacher = normal(N, H).bfloat16(), head_of(), teacher_of("states")
    low, low_head = leaves(hidden, cast(head, torch.bfloat16))
    linear_reverse_kl(low, low_head, teacher, vocab=VOCAB, mode=mode).loss.backward()
    ours, own_head = leaves(hidden, head)
    linear_reverse_kl(ours, own_head, teacher, vocab=VOCAB, mode=mode, max_bytes=max_bytes).loss.backward()
    own = gradients(ours, own_head)
    assert own["weight"].dtype == torch.float32
    assert own["hidden"].dtype == torch.bfloat16
    assert_near(own, {name: grad.double() for name, grad in gradients(low, low_head).items()}, share=2**-6)


@pytest.mark.parametrize("mode", MODES)
def test_ambient_autocast_changes_nothing(mode):
    results = []
    for enabled in (False, True):
        ours, head = leaves(normal(N, H), head_of())
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            loss, _ = linear_reverse_kl(ours, head, teacher_of("states"), uniform(N), vocab=VOCAB, mode=mode)
            loss.backward()
        results.append([loss.detach(), *gradients(ours, head).values()])
    assert all(torch.equal(one, other) for one, other in zip(*results))


@pytest.mark.parametrize("mode", MODES)
def test_hidden_states_that_are_logits(mode):
    """Heads without a weight: what is left of a model whose logits come from elsewhere."""
    student, teacher = normal(N, ROWS), normal(N, VOCAB, seed=1)
    student[:, VOCAB:] = torch.nan
    exact = student[:, :VOCAB].double().requires_grad_()
    rows = pointwise(exact.log_softmax(-1), teacher.double().log_softmax(-1), "reverse_kl", 0.5).sum(-1)
    rows.sum().backward()
    assert exact.grad is not None
    ours = student.clone().requires_grad_()
    loss, own = linear_reverse_kl(ours, OutputHead(None), TeacherStates(teacher, OutputHead(None)), mode=mode)
    loss.backward()
    torch.testing.assert_close(own.double(), rows, rtol=2e-5, atol=2e-6)
    assert ours.grad is not None
    assert_near({"logits": ours.grad[:, :VOCAB]}, {"logits": exact.grad})
    assert not ours.grad[:, VOCAB:].any()


@pytest.mark.parametrize("mode", MODES)
def test_strided_hidden_states(mode):
    wide = normal(N, 2 * H)
    check(wide[:, ::2], head_of(), teacher_of("states"), mode=mode)
    check(normal(H, N).T, head_of(), teacher_of("states"), mode=mode)


def small(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Hidden states, weight and bias of which gradcheck can go through every number."""
    return [normal(*shape, dtype=dtype).requires_grad_() for shape in ((3, 2), (7, 2), (7,))]


@pytest.mark.parametrize(("side", "kind"), [(s, k) for s in ["states", "tail", "renormalise", "truncate"] for k, _ in KINDS])
def test_gradcheck_of_divergences(side, kind):
    """`recompute`, with a soft cap, a bias and a masked row."""
    states, ids = normal(3, 4, seed=9, dtype=torch.float64), torch.tensor([[0, 6], [3, 2], [5, 1]])
    head = OutputHead(normal(7, 4, seed=8, dtype=torch.float64))
    log_p = (states @ head.weight.T).log_softmax(-1).gather(-1, ids)  # type: ignore[union-attr]
    teacher = TeacherStates(states, head) if side == "states" else TeacherTopK(ids, log_p, 1 - log_p.exp().sum(-1), side)
    weight = torch.tensor([0.5, 0.0, 2.0], dtype=torch.float64)

    def loss(hidden: Tensor, matrix: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        own = OutputHead(matrix, bias=bias, softcap=2.0)
        options = {"kind": kind, "beta": 0.3, "temperature": 0.7, "mode": "recompute", "max_bytes": 56}
        return linear_reverse_kl(hidden, own, teacher, weight, **options)

    assert torch.autograd.gradcheck(loss, small())


def test_gradcheck_of_log_probs():
    ids = torch.tensor([[0, 0, -1], [3, 2, 6], [5, -1, -1]])
    mask = torch.tensor([True, False, True])

    def outputs(hidden: Tensor, matrix: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        own = OutputHead(matrix, bias=bias, softcap=2.0)
        return linear_gather_logprob(hidden, own, ids, mask, temperature=0.7, max_bytes=56)[:3]

    assert torch.autograd.gradcheck(outputs, small())


IDS = torch.randint(VOCAB, (N, 3), generator=torch.Generator().manual_seed(2))
IDS[0], IDS[1, 1], IDS[2, 0], IDS[3] = torch.tensor([4, 4, 9]), -1, VOCAB - 1, -1  # duplicates and absent ones


def exact_gathered(hidden: Tensor, head: OutputHead, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    logits = exact_logits(hidden, head, temperature)
    log_q = logits.log_softmax(-1)
    logp = log_q.gather(-1, IDS.clamp(min=0)).where(IDS >= 0, 0.0)
    return logp, -(log_q.exp() * log_q).sum(-1), logits.logsumexp(-1)


@pytest.mark.parametrize("max_bytes", [1, 4 * VOCAB * 4, None])
@pytest.mark.parametrize("form", [{}, {"softcap": 3.0, "bias": True, "scale": 0.5}])
@pytest.mark.parametrize("used", [(0,), (1,), (2,), (0, 1, 2)])
def test_gathered_values_and_gradients(used, form, max_bytes):
    upstream = normal(N, 3, seed=1), normal(N, seed=2), normal(N, seed=3)
    exact, exact_head = leaves(normal(N, H).double(), cast(head_of(**form), torch.float64))
    expected = exact_gathered(exact, exact_head, 0.7)
    torch.autograd.backward([expected[index] for index in used], [upstream[index].double() for index in used])
    ours, head = leaves(normal(N, H), head_of(**form))
    result = linear_gather_logprob(ours, head, IDS, temperature=0.7, vocab=VOCAB, max_bytes=max_bytes)
    torch.autograd.backward([result[index] for index in used], [upstream[index] for index in used])
    assert result.loss is None
    for own, value in zip(result[:3], expected):
        torch.testing.assert_close(own.detach().double(), value.detach(), rtol=1e-5, atol=3e-6)
    assert_near(gradients(ours, head), gradients(exact, exact_head))


@pytest.mark.parametrize("given", [("grad_logp",), ("grad_entropy",), ("grad_logp", "grad_entropy")])
@pytest.mark.parametrize("mask", [None, torch.arange(N) % 3 != 1, torch.zeros(N, dtype=torch.bool)])
def test_gathered_loss_from_gradients_known_beforehand(mask, given):
    grads = {"grad_logp": normal(N, 3, seed=1), "grad_entropy": normal(N, seed=2)}
    grads = {name: grads[name] for name in given}
    live = torch.ones(N, dtype=torch.bool) if mask is None else mask
    exact, exact_head = leaves(normal(N, H).double(), cast(head_of(), torch.float64))
    logp, entropy, lse = exact_gathered(exact, exact_head, 1.0)
    logp, entropy, lse = (logp.where(live[:, None], 0.0), entropy.where(live, 0.0), lse.where(live, 0.0))
    total = sum((grad * {"grad_logp": logp, "grad_entropy": entropy}[name]).sum() for name, grad in grads.items())
    assert isinstance(total, Tensor)
    (total * 1.7).backward()
    ours, head = leaves(normal(N, H), head_of())
    options = {"vocab": VOCAB, "mode": "fused", "max_bytes": 2 * VOCAB * 4, **grads}
    result = linear_gather_logprob(ours, head, IDS, mask, **options)
    assert result.loss is not None
    (result.loss * 1.7).backward()
    for own, value in zip(result, (logp, entropy, lse, total)):
        assert own is not None
        torch.testing.assert_close(own.detach().double(), value.detach(), rtol=1e-5, atol=1e-5)
    assert not any(own.requires_grad for own in result[:3] if own is not None)
    assert_near(gradients(ours, head), gradients(exact, exact_head))
    with torch.no_grad():
        bare = linear_gather_logprob(ours, head, IDS, mask, **options)
    assert all(torch.allclose(one, two, atol=1e-6) for one, two in zip(bare, result) if one is not None and two is not None)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"weight": torch.ones(N + 1)}, r"weight: of shape \(11,\), not \(12,\)"),
        ({"hidden": normal(N, H + 1)}, "the weight of the head of hidden: of shape"),
        ({"hidden": normal(N)}, r"hidden: a matrix, not \(11,\)"),
        ({"teacher": TeacherStates(normal(N + 1, T), head_of(T))}, "teacher.hidden: of shape"),
        ({"teacher": TeacherStates(normal(N, T), head_of(T + 1))}, "the weight of the head of teacher.hidden: of shape"),
        ({"teacher": teacher_of("tail")._replace(tail=torch.ones(N, 1))}, "teacher.tail: of shape"),
        ({"teacher": teacher_of("tail")._replace(logps=torch.ones(N, 1))}, "teacher.logps: of shape"),
        ({"teacher": teacher_of("tail")._replace(outside="else")}, "teacher.outside: one of tail"),
        ({"teacher": teacher_of("sampled")._replace(ids=torch.ones(N + 1).long())}, "teacher.ids: of shape"),
        ({"teacher": teacher_of("sampled"), "kind": "forward_kl"}, "kind: reverse_kl from a sampled token"),
        ({"kind": "forward"}, "kind: one of reverse_kl, forward_kl, jsd, not 'forward'"),
        ({"beta": 1.0}, "beta: between 0 and 1"),
        ({"mode": "fast"}, "mode: one of fused, recompute, not 'fast'"),
        ({"temperature": 0.0}, "temperature: above 0"),
        ({"max_bytes": 0}, "max_bytes: a whole number, at least 1"),
        ({"vocab": ROWS + 1}, "vocab: between 1 and 150, not 151"),
    ],
)
def test_refused_divergences(options, words):
    usual = {"hidden": normal(N, H), "head": head_of(), "teacher": teacher_of("states"), "vocab": VOCAB}
    with pytest.raises(ValueError, match=words):
        linear_reverse_kl(**{**usual, **options})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"ids": IDS[1:]}, "ids: of shape"),
        ({"ids": IDS[:, 0]}, "ids: a matrix with a row for each"),
        ({"mask": torch.ones(N + 1, dtype=torch.bool)}, "mask: of shape"),
        ({"mode": "fused"}, "grad_logp, grad_entropy: one of them or both with mode='fused'"),
        ({"grad_entropy": torch.ones(N)}, "grad_logp, grad_entropy: one of them or both with mode='fused'"),
        ({"mode": "fused", "grad_logp": torch.ones(N)}, "grad_logp: of shape"),
        ({"mode": "fused", "grad_entropy": torch.ones(N, 3)}, "grad_entropy: of shape"),
    ],
)
def test_refused_log_probs(options, words):
    with pytest.raises(ValueError, match=words):
        linear_gather_logprob(**{"hidden": normal(N, H), "head": head_of(), "ids": IDS, "vocab": VOCAB, **options})


MEMORY = """
import sys
import torch
from opd.kernels.head import OutputHead
from opd.kernels.linear import TeacherSampled, TeacherStates, TeacherTopK, linear_reverse_kl

torch.set_num_threads(1)
rows, vocab, width, (side, mode, trained) = 256, 200_000, 16, sys.argv[1:]
hidden, weight = torch.randn(rows, width, requires_grad=True), torch.randn(vocab, width, requires_grad=trained == "trained")
teacher = {
    "states": TeacherStates(torch.randn(rows, width), OutputHead(torch.randn(vocab, width))),
    "topk": TeacherTopK(torch.arange(5).repeat(rows, 1), torch.full((rows, 5), -3.0), torch.full((rows,), 0.75)),
    "sampled": TeacherSampled(torch.zeros(rows, dtype=torch.long), torch.full((rows,), -3.0)),
}[side]

def resident(name):
    return next(int(line.split()[1]) / 1024 for line in open("/proc/self/status") if line.startswith(name))

open("/proc/self/clear_refs", "w").write("5")  # the peak starts here
before = resident("VmRSS")
linear_reverse_kl(hidden, OutputHead(weight), teacher, mode=mode, max_bytes=4 * 2**20).loss.backward()
print(resident("VmHWM") - before)
"""


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("side", "trained"), [("states", "trained"), ("states", "frozen"), ("topk", "frozen")])
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's peak of resident memory")
def test_nothing_of_the_size_of_all_logits(side, trained, mode):
    """256 rows of 200,000 columns are 195 MiB in fp32. A chunk has 4 MiB, scratch 15, the weight's gradient 12."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", MEMORY, side, mode, trained]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    chunks, scratch, gradient, heap = 2 * 4, 15, 13 if trained == "trained" else 0, 40
    assert float(done.stdout) < chunks + scratch + gradient + heap
