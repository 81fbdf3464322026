"""The chunked loss, rows of packed examples, and that they do not see each other."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DataCollatorWithFlattening

from opd.errors import UserError
from opd.kernels.head import OutputHead
from opd.sft.loss import IGNORED, answer_nll, check_neighbours, pieces, return_answer_nll


@pytest.mark.parametrize("rows_a_chunk", [1, 3, 7, 100])
def test_answer_nll_and_its_gradient(rows_a_chunk):
    torch.manual_seed(0)
    hidden: Any
    weight: Any
    hidden, weight = torch.randn(7, 5, requires_grad=True), torch.randn(11, 5, requires_grad=True)
    ids = torch.randint(11, (7,))
    loss = answer_nll(hidden, OutputHead(weight, 0.7), ids, rows_a_chunk * 4 * 11)
    (2.5 * loss).backward()
    double: list[Any] = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    expected = F.cross_entropy(0.7 * double[0] @ double[1].T, ids, reduction="sum")
    (2.5 * expected).backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    torch.testing.assert_close(hidden.grad, double[0].grad.float(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(weight.grad, double[1].grad.float(), rtol=1e-5, atol=1e-6)


def flat(lengths, seed=0):
    """Examples of these lengths in one row, about half of each trained."""
    torch.manual_seed(seed)
    rows = []
    for n in lengths:
        ids = torch.randint(3, 30, (n,))
        labels = torch.where(torch.arange(n) >= n // 2, ids, IGNORED)
        rows.append({"input_ids": ids.numpy(), "labels": labels.numpy()})
    batch: Any = DataCollatorWithFlattening()(rows)
    return rows, batch


@settings(max_examples=50, deadline=None)
@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=9), most=st.integers(1, 30))
def test_pieces_hold_whole_examples(lengths, most):
    _, batch = flat(lengths)
    parts = pieces(batch, most)
    for name in batch:
        assert torch.equal(torch.cat([part[name] for part in parts], dim=1), batch[name])
    sizes = [part["input_ids"].shape[1] for part in parts]
    starts = [part["position_ids"][0, 0].item() for part in parts]
    assert not any(starts)
    assert all(size <= most or (part["position_ids"] == 0).sum() == 1 for size, part in zip(sizes, parts))
    firsts = [int((part["position_ids"][0] == 0).nonzero()[1:2].sum()) or size for size, part in zip(sizes, parts)]
    assert all(size + first > most for size, first in zip(sizes, firsts[1:]))  # no piece is cut early


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_packed_equals_one_by_one(micro_model, attention):
    """Loss and gradients of a row of six examples, whole and in pieces, against the model's own forward for each alone."""
    model = micro_model(1, attn_implementation=attention)
    rows, batch = flat([5, 9, 1, 2, 14, 3])
    alone = copy.deepcopy(model)
    total = torch.zeros(())
    for row in rows:
        ids, labels = (torch.as_tensor(row[name])[None] for name in ("input_ids", "labels"))
        if (labels[:, 1:] != IGNORED).any():
            logits = alone(input_ids=ids).logits[0, :-1]
            total = total + F.cross_entropy(logits, labels[0, 1:], ignore_index=IGNORED, reduction="sum")
    total.backward()
    return_answer_nll(model, 4 * 45 * 4)
    for most in (1000, 12, 1):
        model.zero_grad()
        losses = [model(**piece)["loss"] for piece in pieces(batch, most)]
        loss = torch.stack(losses).sum()
        loss.backward()
        assert loss.item() == pytest.approx(total.item(), rel=1e-5)
        for ours, theirs in zip(model.parameters(), alone.parameters()):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-5)


def test_an_example_does_not_see_its_neighbours(micro_model):
    model, (_, batch) = micro_model(1), flat([6, 8, 5])
    other = {**batch, "input_ids": batch["input_ids"].clone()}
    other["input_ids"][0, :6] = (other["input_ids"][0, :6] + 1) % 30
    before, after = (
        model.model(input_ids=b["input_ids"], position_ids=b["position_ids"], use_cache=False)[0][0] for b in (batch, other)
    )
    assert torch.equal(before[6:], after[6:])
    assert not torch.allclose(before[:6], after[:6])


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_model_with_a_running_state_is_refused(micro_model, precision):
    ids = np.arange(3, 35)
    model = micro_model(1)
    check_neighbours(model, ids, precision)
    model.model.embed_tokens.register_forward_hook(lambda module, inputs, output: output.cumsum(1))
    with pytest.raises(UserError, match="packing=false"):
        check_neighbours(model, ids, precision)


def test_a_row_without_trained_tokens_has_no_loss(micro_model):
    model, (_, batch) = micro_model(1), flat([4])
    return_answer_nll(model, 1000)
    loss = model(**{**batch, "labels": torch.full_like(batch["labels"], IGNORED)})["loss"]
    assert loss.item() == 0
    loss.backward()  # a process may have such a row while others have none


def test_under_autocast_the_head_s_gradient_is_added_up_in_its_own_type():
    torch.manual_seed(0)
    hidden, weight = torch.randn(1000, 16), torch.randn(20, 16, requires_grad=True)
    ids = torch.randint(5, (1000,))
    exact = weight.detach().double().requires_grad_()
    F.cross_entropy(hidden.double() @ exact.T, ids, reduction="sum").backward()
    with torch.autocast("cpu", torch.bfloat16):
        loss = answer_nll(hidden, OutputHead(weight), ids, 1)
    loss.backward()
    error: Any = (weight.grad - exact.grad).norm() / exact.grad.norm()  # type: ignore[operator,union-attr]
    assert 1e-4 < error < 4e-3  # products in bfloat16, their sum over 1000 chunks in fp32
