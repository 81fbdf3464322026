"""A loss over the vocabulary from hidden states: chunk by chunk through the output head and, as a gradient, back through it.

One chunk of logits [c, V] exists at a time. The loss overwrites it by its gradient, which two products take at once to the
hidden states and to the weights. The head may have no weight: then the hidden states are the logits.

Shape legend: N rows, c rows of a chunk, H hidden size, R rows of the weight, V columns in use.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from opd.kernels.blocks import accumulator
from opd.kernels.head import OutputHead
from opd.kernels.shapes import Bool, Float

ChunkLoss = Callable[[Tensor, slice], Tensor]
"""Of raw logits [c, V] of some rows: their part of the loss, a scalar. Leaves the gradient in the place of the logits where
one is wanted."""

ROW_ALIGNMENT = 64  # columns: tensor cores want rows that start at multiples of 16 bytes, and vocabularies are odd
ADDED_BYTES = 2**20  # of a product at a time: a whole one in another type would first be copied into the sum's


class HeadGradients(NamedTuple):
    """A loss and its gradients; None where none was wanted."""

    loss: Tensor  # scalar, fp32 (float64 where the hidden states are)
    hidden: Tensor | None  # [N, H], in the type of the hidden states
    weight: Tensor | None  # [R, H], in the type of the weight; 0 beyond the columns in use
    bias: Tensor | None  # [R]


def default_bytes(device: torch.device, vocab: int, element_size: int) -> int:
    """Of a chunk of logits. On the CPU more than 192 rows make a product little faster, but each costs memory."""
    return min(64 * 2**20, 192 * vocab * element_size) if device.type == "cpu" else 2**30


def chunk_rows(max_bytes: int, vocab: int, element_size: int) -> int:
    """Rows of logits within `max_bytes`, at least one. Of a teacher's logits as many again exist at once."""
    return max(1, max_bytes // max(1, vocab * element_size))


def row_chunks(num_rows: int, size: int, unit_starts: Bool[Tensor, " N"] | None = None) -> list[slice]:
    """All rows, about `size` at a time: no unit is cut in two, so that a chunk may be longer by the rest of one. Without
    units, chunks of at most `size` that are as equal as they can be."""
    if unit_starts is None:
        count = -(-num_rows // size)
        bounds = [num_rows * chunk // count for chunk in range(count + 1)] if count else [0]
        return [slice(start, stop) for start, stop in pairwise(bounds)]
    allowed = [*unit_starts.nonzero()[:, 0].tolist(), num_rows]
    chunks, start = [], 0
    while start < num_rows:
        stop = allowed[min(bisect_left(allowed, start + size), len(allowed) - 1)]
        chunks.append(slice(start, stop))
        start = stop
    return chunks


def logits_buffer(chunks: Sequence[slice], vocab: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[longest chunk, V] for logits, uninitialised."""
    longest = max((rows.stop - rows.start for rows in chunks), default=0)
    width = -(-vocab // ROW_ALIGNMENT) * ROW_ALIGNMENT
    return torch.empty(longest, width, dtype=dtype, device=device)[:, :vocab]


@torch.no_grad()
def fused_head(
    hidden: Float[Tensor, "N H"],
    head: OutputHead,
    vocab: int,
    chunks: Sequence[slice],
    chunk_loss: ChunkLoss,
    want: tuple[bool, bool, bool],
) -> HeadGradients:
    """The sum of `chunk_loss` over `chunks`, which cover the rows, and its gradients with respect to hidden states, weight
    and bias, as far as `want`ed.

    Products are computed in the type of `hidden`, whatever the ambient autocast; a weight in another type is cast once.
    Its gradient is added up in the wider of the two, on CUDA in fp32.
    """
    want_hidden, want_weight, want_bias = want
    with torch.autocast(hidden.device.type, enabled=False):
        used = head if head.weight is None else replace(head, weight=head.weight[:vocab].to(hidden.dtype))
        logits = logits_buffer(chunks, vocab, hidden.dtype, hidden.device)
        loss = torch.zeros((), dtype=accumulator(hidden), device=hidden.device)
        grad_hidden = hidden.new_zeros(hidden.shape) if want_hidden else None
        grad_weight = grad_bias = None
        if want_weight and head.weight is not None:
            grad_weight = _WeightGradient(head.weight, vocab, hidden.dtype, len(chunks))
        if want_bias and head.bias is not None:
            grad_bias = torch.zeros_like(head.bias, dtype=loss.dtype)
        for rows in chunks:
            chunk = logits[: rows.stop - rows.start]
            used.raw(hidden[rows], vocab, out=chunk)
            loss += chunk_loss(chunk, rows)
            if grad_hidden is not None:
                if used.weight is None:
                    grad_hidden[rows, :vocab] = chunk
                else:
                    torch.mm(chunk, used.weight, out=grad_hidden[rows])
            if grad_weight is not None:
                grad_weight.add(chunk, hidden[rows])
            if grad_bias is not None:
                grad_bias[:vocab] += chunk.sum(0, dtype=grad_bias.dtype)
        if grad_bias is not None and head.bias is not None:
            grad_bias = grad_bias.to(head.bias.dtype)
        return HeadGradients(loss, grad_hidden, None if grad_weight is None else grad_weight.total(), grad_bias)


class _WeightGradient:
    """The sum over chunks of logits' gradient.T @ hidden states."""

    def __init__(self, weight: Float[Tensor, "R H"], vocab: int, product: torch.dtype, num_chunks: int) -> None:
        """`product`: type of the factors."""
        self.dtype, self.vocab = weight.dtype, vocab
        summed = torch.promote_types(weight.dtype, product)
        # cuBLAS adds a low-precision product to an fp32 sum as it is formed
        self.in_fp32 = weight.is_cuda and product.itemsize == 2 and (summed == torch.float32 or num_chunks > 1)
        self.sum = torch.zeros(weight.shape, dtype=torch.float32 if self.in_fp32 else summed, device=weight.device)
        self.product, self.block = None, None
        if product != summed and not self.in_fp32:
            self.product = torch.empty(vocab, weight.shape[1], dtype=product, device=weight.device)
            self.block = torch.empty_like(self.sum[: max(1, ADDED_BYTES // max(1, self.sum[0:1].nbytes))])

    def add(self, grad_logits: Float[Tensor, "c V"], hidden: Float[Tensor, "c H"]) -> None:
        used = self.sum[: self.vocab]
        if self.in_fp32:
            torch.addmm(used, grad_logits.t(), hidden, out_dtype=torch.float32, out=used)  # type: ignore[call-overload]
        elif self.product is None or self.block is None:
            used.addmm_(grad_logits.t(), hidden)
        else:
            torch.mm(grad_logits.t(), hidden, out=self.product)
            for part, added in zip(used.split(len(self.block)), self.product.split(len(self.block))):
                part.add_(self.block[: len(added)].copy_(added))

    def total(self) -> Float[Tensor, "R H"]:
        return self.sum.to(self.dtype)
