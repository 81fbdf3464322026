"""Log-probs at given ids, entropy and normaliser of rows of logits, in Triton: the twin of `gather_torch`.

One read of the logits for the statistics, one and a write for the gradient. Shape legend: c rows, V columns, M ids a row; m,
q, x and z as in `opd.kernels.partials`. Inside the kernels u = s - m.
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from opd.kernels import grid
from opd.kernels.head import LogitForm
from opd.kernels.partials import GatherPartials, RowStats, merge_gather
from opd.kernels.shapes import Bool, Float, Int
from opd.kernels.tiles_triton import LOG2_E, LOW, read, slope


def partials(
    logits: Float[Tensor, "c V"], ids: Int[Tensor, "c M"], live: Bool[Tensor, " c"] | None, form: LogitForm
) -> GatherPartials:
    """One pass over the rows of which `live` is true. Ids of -1 are absent."""
    c, vocab = logits.shape
    grid.check_columns(logits)
    live = logits.new_ones(c, dtype=torch.bool) if live is None else live.contiguous()
    programs = grid.slices(c, vocab, logits.device)
    sums = torch.zeros(3, programs.num_slices, c, device=logits.device)
    programs.launch(_partials, logits, logits.stride(0), live, sums, c, form.scale, form.softcap, vocab=vocab)
    row_max, z, entropy_sum = sums
    if programs.num_slices == 1:
        row_max, z, entropy_sum = row_max[0], z[0], entropy_sum[0]
    else:  # without ids: which slice one lies in is not known here
        none = sums.new_zeros(programs.num_slices, c, 0)
        merged = merge_gather(GatherPartials(row_max, z, entropy_sum, none), none, form.scale)
        row_max, z, entropy_sum = merged.max, merged.z, merged.entropy_sum
    at = torch.zeros(ids.shape, device=logits.device)
    grid.entries(c, ids.shape[1]).launch(
        _at,
        *(logits, logits.stride(0), ids.contiguous(), live, row_max, at, vocab, form.scale, form.softcap),
        num_ids=ids.shape[1],
    )
    return GatherPartials(row_max, z, entropy_sum, at)


def grad(
    logits: Float[Tensor, "c V"],
    ids: Int[Tensor, "c M"],
    stats: RowStats,
    grad_logp: Float[Tensor, "c M"],
    grad_entropy: Float[Tensor, " c"] | None,
    grad_lse: Float[Tensor, " c"] | None,
    form: LogitForm,
    add: Float[Tensor, "c V"] | None,
    out: Float[Tensor, "c V"],
) -> None:
    """Writes the gradient with respect to `logits`, plus `add` where given, to `out`, which may be either of the two.

    The second kernel writes the columns of the ids anew, from the saved log-probs, since the first may have overwritten the
    logits: what a column gets is rounded once. The gradients of an id that is named twice add up in the order of the ids.
    Rows without any gradient are not read.
    """
    c, vocab = logits.shape
    grid.check_columns(logits, out) if add is None else grid.check_columns(logits, out, add)
    ids = ids.contiguous()
    grad_logp = grad_logp.masked_fill(ids < 0, 0.0).float().contiguous()
    outside = -grad_logp.sum(-1)  # the gradient that every q_j has in common
    if grad_lse is not None:
        outside += grad_lse
    grad_entropy = None if grad_entropy is None else grad_entropy.contiguous()
    add_at = None if add is None else add.gather(-1, ids.long().clamp(0, vocab - 1))  # `out` may be `add`
    shared = outside, grad_entropy, stats.entropy, stats.max, stats.log_z, out, out.stride(0), form.scale, form.softcap
    grid.tiles(c, vocab).launch(
        _grad, logits, logits.stride(0), add, 0 if add is None else add.stride(0), *shared, vocab=vocab
    )
    num_ids = ids.shape[1]
    grid.entries(c, num_ids).launch(
        _grad_at, ids, stats.logp.contiguous(), grad_logp, add_at, vocab, *shared, num_ids=num_ids
    )


@triton.jit
@no_type_check
def _partials(
    logits,
    stride,
    live,
    sums,
    num_rows,
    scale,
    softcap,
    vocab: tl.constexpr,
    num_slices: tl.constexpr,
    width: tl.constexpr,
    block: tl.constexpr,
):
    """`sums` [3, num_slices, num_rows]: the first fields of `GatherPartials`."""
    row = tl.program_id(0) // num_slices
    part = tl.program_id(0) % num_slices
    if not tl.load(live + row):
        return
    logits += row.to(tl.int64) * stride
    power = scale * LOG2_E
    m = LOW
    z = tl.zeros([block], tl.float32)
    entropy_sum = tl.zeros([block], tl.float32)
    for start in tl.range(0, width, block, num_stages=3):
        columns = part * width + start + tl.arange(0, block)
        mask = columns < vocab
        s = tl.where(mask, read(logits, columns, mask, softcap), LOW)
        m_new = tl.maximum(m, tl.max(s, 0))
        if m_new > m:  # seldom after the first tiles
            shift = m - m_new
            f = tl.exp2(power * shift)
            entropy_sum = f * (entropy_sum + z * shift)
            z *= f
            m = m_new
        u = s - m
        q = tl.exp2(power * u)
        entropy_sum += q * u
        z += q
    sums += part * num_rows + row
    field = num_slices * num_rows
    tl.store(sums, m)
    tl.store(sums + field, tl.sum(z, 0))
    tl.store(sums + 2 * field, scale * tl.sum(entropy_sum, 0))


@triton.jit
@no_type_check
def _at(
    logits,
    stride,
    ids,
    live,
    maxima,
    at,
    vocab,
    scale,
    softcap,
    num_ids: tl.constexpr,
    num_slices: tl.constexpr,
    width: tl.constexpr,
    block: tl.constexpr,
):
    """x at the ids."""
    row = (tl.program_id(0) // num_slices).to(tl.int64)
    entries = tl.program_id(0) % num_slices * width + tl.arange(0, block)
    if not tl.load(live + row):
        return
    column = tl.load(ids + row * num_ids + entries, mask=entries < num_ids, other=-1)
    s = read(logits + row * stride, column, (column >= 0) & (column < vocab), softcap)
    x = scale * (s - tl.load(maxima + row))
    tl.store(at + row * num_ids + entries, tl.where(column < vocab, x, float("nan")), mask=column >= 0)


@triton.jit
@no_type_check
def _grad(
    logits,
    stride,
    add,
    add_stride,
    outside,
    grad_entropy,
    entropies,
    maxima,
    log_zs,
    out,
    out_stride,
    scale,
    softcap,
    vocab: tl.constexpr,
    num_slices: tl.constexpr,
    width: tl.constexpr,
    block: tl.constexpr,
):
    """The gradient as if no id were named."""
    row = (tl.program_id(0) // num_slices).to(tl.int64)
    columns = tl.program_id(0) % num_slices * width + tl.arange(0, block)
    mask = columns < vocab
    weight = tl.load(outside + row)
    live = weight != 0.0
    if grad_entropy is not None:
        live |= tl.load(grad_entropy + row) != 0.0
    gradient = tl.zeros([block], tl.float32)
    if live:
        s = read(logits + row * stride, columns, mask, softcap)
        log_q = scale * tl.where(mask, s - tl.load(maxima + row), LOW) - tl.load(log_zs + row)
        factor = weight
        if grad_entropy is not None:
            factor = weight - tl.load(grad_entropy + row) * (log_q + tl.load(entropies + row))
        gradient = scale * factor * tl.exp(log_q)
        if softcap is not None:
            gradient *= slope(s, softcap)
    if add is not None:
        gradient += tl.load(add + row * add_stride + columns, mask=mask).to(tl.float32)
    tl.store(out + row * out_stride + columns, gradient.to(out.dtype.element_ty), mask=mask)


@triton.jit
@no_type_check
def _grad_at(
    ids,
    logps,
    grad_logp,
    add_at,
    vocab,
    outside,
    grad_entropy,
    entropies,
    maxima,
    log_zs,
    out,
    out_stride,
    scale,
    softcap,
    num_ids: tl.constexpr,
    num_slices: tl.constexpr,
    width: tl.constexpr,
    block: tl.constexpr,
):
    """The gradient in the columns of the ids. Programs that share an id write the same value."""
    row = (tl.program_id(0) // num_slices).to(tl.int64)
    entries = tl.program_id(0) % num_slices * width + tl.arange(0, block)
    first = row * num_ids
    column = tl.load(ids + first + entries, mask=entries < num_ids, other=-1)
    present = (column >= 0) & (column < vocab)
    named = tl.zeros([block], tl.float32)
    for start in range(0, num_ids, block):
        others = start + tl.arange(0, block)
        other_column = tl.load(ids + first + others, mask=others < num_ids, other=-1)
        weight = tl.load(grad_logp + first + others, mask=others < num_ids, other=0.0)
        named += tl.sum(tl.where(column[:, None] == other_column[None, :], weight[None, :], 0.0), 1)
    log_q = tl.load(logps + first + entries, mask=present, other=0.0)
    factor = tl.load(outside + row)
    if grad_entropy is not None:
        factor = factor - tl.load(grad_entropy + row) * (log_q + tl.load(entropies + row))
    gradient = scale * tl.where(factor == 0.0, named, named + factor * tl.exp(log_q))  # a NaN row that nobody asks about
    if softcap is not None:
        gradient *= slope((log_q + tl.load(log_zs + row)) / scale + tl.load(maxima + row), softcap)
    if add_at is not None:
        gradient += tl.load(add_at + first + entries, mask=present, other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + column, gradient.to(out.dtype.element_ty), mask=present)
