"""The driver from hidden states through chunks of logits and back, with losses whose gradients are known."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from opd.kernels.chunks import chunk_rows, default_bytes, fused_head, logits_buffer, row_chunks
from opd.kernels.head import OutputHead

N, H, ROWS, VOCAB = 11, 6, 40, 37
CPU = torch.device("cpu")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
EVERYTHING, NOTHING = (True, True, True), (False, False, False)


def normal(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64).to(dtype)


def head_of(dtype: torch.dtype = torch.float64, bias: bool = True) -> OutputHead:
    """Rows beyond the vocabulary hold NaN."""
    weight, offsets = normal(ROWS, H, dtype=dtype), normal(ROWS, dtype=dtype)
    weight[VOCAB:] = offsets[VOCAB:] = torch.nan
    return OutputHead(weight, bias=offsets if bias else None)


def cast(head: OutputHead, to: torch.dtype | str) -> OutputHead:
    assert head.weight is not None
    return replace(head, weight=head.weight.to(to), bias=None if head.bias is None else head.bias.to(to))


def cubes(logits: Tensor, rows: slice) -> Tensor:
    """A loss whose gradient depends on the logits: sum of (logits / 3) ** 3."""
    loss = (logits / 3).pow(3).sum(dtype=torch.float64 if logits.dtype == torch.float64 else torch.float32)
    logits.copy_((logits / 3).square_())
    return loss


def exact(hidden: Tensor, head: OutputHead) -> list[Tensor]:
    """Loss and gradients of `cubes` by autograd, in float64."""
    leaves = [leaf.double().clone().requires_grad_() for leaf in (hidden, head.weight, head.bias) if leaf is not None]
    logits = leaves[0] @ leaves[1][:VOCAB].T + (leaves[2][:VOCAB] if len(leaves) == 3 else 0.0)
    loss = (logits / 3).pow(3).sum()
    return [loss.detach(), *torch.autograd.grad(loss, leaves)]


def given(grads: Sequence[Tensor | None]) -> list[Tensor]:
    """Gradients of which none may be missing."""
    kept = [grad for grad in grads if grad is not None]
    assert len(kept) == len(grads)
    return kept


class Products(TorchDispatchMode):
    """Counts products by the shape of their result."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: Counter[tuple[int, ...]] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        if "mm" in str(func):
            self.shapes[tuple(result.shape)] += 1
        return result


@pytest.mark.parametrize("want", list(product([True, False], repeat=3)))
@pytest.mark.parametrize("size", [1, 4, N])
def test_gradients_that_are_wanted(size, want):
    hidden, head = normal(N, H), head_of()
    loss, *grads = fused_head(hidden, head, VOCAB, row_chunks(N, size), cubes, want)
    exact_loss, *expected = exact(hidden, head)
    torch.testing.assert_close(loss, exact_loss)
    for grad, wanted, value in zip(grads, want, expected):
        if wanted:
            torch.testing.assert_close(grad, value)
        else:
            assert grad is None


@pytest.mark.parametrize(
    ("want", "shapes"),
    [
        (NOTHING, {(4, VOCAB): 2, (3, VOCAB): 1}),
        ((True, False, False), {(4, VOCAB): 2, (3, VOCAB): 1, (4, H): 2, (3, H): 1}),
        ((False, True, False), {(4, VOCAB): 2, (3, VOCAB): 1, (VOCAB, H): 3}),
    ],
)
def test_no_product_is_computed_in_vain(want, shapes):
    hidden, head = normal(N, H), head_of(bias=False)
    with Products() as products:
        fused_head(hidden, head, VOCAB, [slice(0, 4), slice(4, 8), slice(8, 11)], cubes, want)
    assert products.shapes == shapes


def test_a_loss_sees_its_rows_in_order():
    hidden, head, seen = normal(N, H), head_of(), []

    def loss(logits: Tensor, rows: slice) -> Tensor:
        torch.testing.assert_close(logits, head.raw(hidden[rows], VOCAB))
        seen.append(rows)
        return logits.new_zeros(())

    fused_head(hidden, head, VOCAB, row_chunks(N, 4), loss, NOTHING)
    assert seen == row_chunks(N, 4)


def test_without_rows():
    head = head_of()
    loss, *grads = fused_head(normal(0, H), head, VOCAB, [], cubes, EVERYTHING)
    assert loss == 0
    assert [grad.shape for grad in given(grads)] == [(0, H), (ROWS, H), (ROWS,)]
    assert not any(grad.any() for grad in given(grads))


@pytest.mark.parametrize("size", [1, 4, N])
def test_hidden_states_that_are_logits(size):
    hidden = normal(N, ROWS)
    hidden[:, VOCAB:] = torch.nan
    before = hidden.clone()
    loss, *grads = fused_head(hidden, OutputHead(None), VOCAB, row_chunks(N, size), cubes, (True, False, False))
    (grad,) = given(grads[:1])
    torch.testing.assert_close(loss, (hidden[:, :VOCAB] / 3).pow(3).sum())
    torch.testing.assert_close(grad[:, :VOCAB], (hidden[:, :VOCAB] / 3).square())
    assert not grad[:, VOCAB:].any()
    assert grads[1:] == [None, None]
    torch.testing.assert_close(hidden, before, equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", [2, N])
@pytest.mark.parametrize("weight", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("states", [torch.float32, torch.bfloat16, torch.float64])
def test_mixed_precision(states, weight, size, device):
    """Products round in the type of the hidden states, sums in the wider type; gradients come in their leaf's own."""
    hidden, head = normal(N, H, dtype=states).to(device), cast(head_of(weight), device)
    loss, *grads = fused_head(hidden, head, VOCAB, row_chunks(N, size), cubes, EVERYTHING)
    assert [grad.dtype for grad in given(grads)] == [states, weight, weight]
    exact_loss, *expected = exact(hidden, cast(head, states))
    rounding = {torch.bfloat16: 2**-6, torch.float32: 1e-6, torch.float64: 1e-14}
    assert abs(float(loss - exact_loss)) <= rounding[states] * N * VOCAB
    for grad, value in zip(given(grads), expected):
        worst = max(rounding[states], rounding[grad.dtype])
        assert float((grad.double() - value).abs().max()) <= worst * float(value.abs().max())


@pytest.mark.parametrize("device", DEVICES)
def test_a_master_weight_keeps_the_digits_of_its_gradient(device):
    """A bf16 sum of 300 chunks would stop growing at 256."""

    def ones(logits: Tensor, rows: slice) -> Tensor:
        logits.fill_(1.0)
        return logits.new_zeros((), dtype=torch.float32)

    hidden, head = torch.ones(300, H, dtype=torch.bfloat16, device=device), cast(head_of(torch.float32), device)
    grads = fused_head(hidden, head, VOCAB, row_chunks(300, 1), ones, EVERYTHING)
    assert grads.weight is not None
    assert grads.bias is not None
    assert (grads.weight[:VOCAB] == 300).all()
    assert (grads.bias[:VOCAB] == 300).all()


def test_autocast_is_off_inside():
    def loss(logits: Tensor, rows: slice) -> Tensor:
        assert not torch.is_autocast_enabled("cpu")
        return logits.new_zeros(())

    with torch.autocast("cpu", torch.bfloat16):
        fused_head(normal(N, H), head_of(), VOCAB, row_chunks(N, 4), loss, EVERYTHING)


@pytest.mark.parametrize("size", range(1, 26))
def test_chunks_are_equal_and_cover_the_rows(size):
    chunks = row_chunks(23, size)
    assert [chunk.start for chunk in chunks] == [0, *(chunk.stop for chunk in chunks[:-1])]
    assert chunks[-1].stop == 23
    sizes = {chunk.stop - chunk.start for chunk in chunks}
    assert max(sizes) <= size
    assert max(sizes) - min(sizes) <= 1
    assert len(chunks) == -(-23 // size)


@pytest.mark.parametrize("size", range(1, 30))
def test_no_chunk_cuts_a_unit(size):
    starts = torch.zeros(23, dtype=torch.bool)
    starts[[0, 1, 5, 7, 16, 17, 21]] = True
    chunks = row_chunks(23, size, starts)
    assert [chunk.start for chunk in chunks] == [0, *(chunk.stop for chunk in chunks[:-1])]
    assert chunks[-1].stop == 23
    assert all(starts[chunk.start] for chunk in chunks)
    assert all(chunk.stop - chunk.start < size + 9 for chunk in chunks)


def test_no_rows_no_chunks():
    assert row_chunks(0, 2) == row_chunks(0, 2, torch.zeros(0, dtype=torch.bool)) == []


def test_budgets():
    assert chunk_rows(64 * 2**20, 151_936, 2) == 220
    assert chunk_rows(1, 151_936, 2) == 1
    assert default_bytes(CPU, 32_768, 2) == 192 * 32_768 * 2
    assert default_bytes(CPU, 151_936, 4) == 64 * 2**20
    assert default_bytes(torch.device("cuda"), 32_768, 2) == 2**30


@pytest.mark.parametrize("vocab", [1, 64, 151_669])
def test_rows_of_a_buffer_start_where_tensor_cores_want_them(vocab):
    buffer = logits_buffer([slice(0, 2), slice(2, 5)], vocab, torch.bfloat16, CPU)
    assert buffer.shape == (3, vocab)
    assert buffer.stride(0) * buffer.element_size() % 16 == 0
    assert buffer.stride(1) == 1
