"""Divergences between two softmaxes over the vocabulary, in Triton: the twin of `divergence_torch`.

One read of both matrices for the statistics (the JSD takes a second), one and a write for the gradient. Shape legend: c
rows, V columns; q, p, m, n, x, w, z and y as in `opd.kernels.partials`. Inside the kernels u = s - m, v = t - n and `ratio`
is teacher_scale / scale: of x - w = scale * (u - ratio * v) a fused multiply-add leaves exactly 0 where the rows are equal.
"""

from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from opd.kernels import grid
from opd.kernels.head import LogitForm
from opd.kernels.partials import DivergencePartials, DivergenceStats, Kind, merge_divergence
from opd.kernels.shapes import Bool, Float
from opd.kernels.tiles_triton import LOG2_E, LOW, difference, log_mixture, minus, read, slope


def partials(
    student: Float[Tensor, "c V"],
    teacher: Float[Tensor, "c V"],
    live: Bool[Tensor, " c"] | None,
    kind: Kind,
    student_form: LogitForm,
    teacher_form: LogitForm,
) -> DivergencePartials:
    """One pass over the rows of which `live` is true."""
    c, vocab = student.shape
    programs = grid.slices(c, vocab, student.device)
    sums = torch.zeros(6, programs.num_slices, c, device=student.device)
    programs.launch(
        _partials,
        *(*_rows(student, teacher, live), sums, c),
        *_forms(student_form, teacher_form),
        vocab=vocab,
        kind=kind,
    )
    if programs.num_slices == 1:
        return DivergencePartials(*sums[:, 0])
    return merge_divergence(DivergencePartials(*sums), kind, student_form.scale, teacher_form.scale)


def jsd_sums(
    student: Float[Tensor, "c V"],
    teacher: Float[Tensor, "c V"],
    stats: DivergenceStats,
    live: Bool[Tensor, " c"] | None,
    beta: float,
    student_form: LogitForm,
    teacher_form: LogitForm,
) -> tuple[Tensor, Tensor]:
    """(JSD [c], E_q[h] [c]): sums over the columns, which add up over shards of the vocabulary."""
    c, vocab = student.shape
    programs = grid.slices(c, vocab, student.device)
    sums = torch.zeros(2, programs.num_slices, c, device=student.device)
    programs.launch(
        _jsd_sums,
        *(*_rows(student, teacher, live), *_figures(stats), sums, c),
        *(*_forms(student_form, teacher_form), beta),
        vocab=vocab,
    )
    loss, mean = sums.sum(1)
    return loss, mean


def grad(
    student: Float[Tensor, "c V"],
    teacher: Float[Tensor, "c V"],
    stats: DivergenceStats,
    upstream: Float[Tensor, " c"],
    kind: Kind,
    beta: float,
    student_form: LogitForm,
    teacher_form: LogitForm,
    out: Float[Tensor, "c V"],
) -> None:
    """Writes the gradient of sum(upstream * divergence) with respect to `student` to `out`, which may be either input.

    Rows whose upstream gradient is 0 become 0 and are not read.
    """
    c, vocab = student.shape
    grid.tiles(c, vocab).launch(
        _grad,
        *(*_rows(student, teacher, upstream), *_figures(stats), stats.mean, out, out.stride(0)),
        *(*_forms(student_form, teacher_form), beta),
        vocab=vocab,
        kind=kind,
    )


def _rows(student: Tensor, teacher: Tensor, live: Tensor | None) -> tuple[Any, ...]:
    grid.check_columns(student, teacher)
    live = student.new_ones(len(student), dtype=torch.bool) if live is None else live.contiguous()
    return student, teacher, student.stride(0), teacher.stride(0), live


def _figures(stats: DivergenceStats) -> tuple[Tensor, ...]:
    return stats.max, stats.log_z, stats.teacher_max, stats.log_ratio


def _forms(student: LogitForm, teacher: LogitForm) -> tuple[float | None, ...]:
    return student.scale, teacher.scale, teacher.scale / student.scale, student.softcap, teacher.softcap


@triton.jit
@no_type_check
def _partials(
    student,
    teacher,
    student_stride,
    teacher_stride,
    live,
    sums,
    num_rows,
    scale,
    teacher_scale,
    ratio,
    softcap,
    teacher_softcap,
    vocab: tl.constexpr,
    kind: tl.constexpr,
    num_slices: tl.constexpr,
    width: tl.constexpr,
    block: tl.constexpr,
):
    """`sums` [6, num_slices, num_rows]: the fields of `DivergencePartials`."""
    row = tl.program_id(0) // num_slices
    part = tl.program_id(0) % num_slices
    if not tl.load(live + row):
        return
    student += row.to(tl.int64) * student_stride
    teacher += row.to(tl.int64) * teacher_stride
    m, z, n, y, cross, gap = _sums_of(
        student, teacher, part * width, scale, teacher_scale, ratio, softcap, teacher_softcap, vocab, kind, width, block
    )
    sums += part * num_rows + row
    field = num_slices * num_rows
    tl.store(sums, m)
    tl.store(sums + field, tl.sum(z, 0))
    tl.store(sums + 2 * field, n)
    tl.store(sums + 3 * field, tl.sum(y, 0))
    tl.store(sums + 4 * field, scale * tl.sum(cross, 0))
    tl.store(sums + 5 * field, tl.sum(gap, 0))


@triton.jit
@no_type_check
def _sums_of(
    student,
    teacher,
    first,
    scale,
    teacher_scale,
    ratio,
    softcap,
    teacher_softcap,
    vocab: tl.constexpr,
    kind: tl.constexpr,
    width: tl.constexpr,
    block: tl.constexpr,
):
    """Over `width` columns from `first` on. The sums stay a tile wide, so that a tile costs two reductions over threads, not
    six."""
    power = scale * LOG2_E
    teacher_power = teacher_scale * LOG2_E
    m = LOW
    n = LOW
    z = tl.zeros([block], tl.float32)
    y = tl.zeros([block], tl.float32)
    cross = tl.zeros([block], tl.float32)
    gap = tl.zeros([block], tl.float32)
    for start in tl.range(0, width, block, num_stages=3):
        columns = first + start + tl.arange(0, block)
        mask = columns < vocab
        s = tl.where(mask, read(student, columns, mask, softcap), LOW)
        t = tl.where(mask, read(teacher, columns, mask, teacher_softcap), LOW)
        m_new, n_new = tl.maximum(m, tl.max(s, 0)), tl.maximum(n, tl.max(t, 0))
        if (m_new > m) | (n_new > n):  # seldom after the first tiles
            shift, teacher_shift = m - m_new, n - n_new
            f, g = tl.exp2(power * shift), tl.exp2(teacher_power * teacher_shift)
            apart = difference(m, n, m_new, n_new, ratio)
            if kind == "reverse_kl":
                cross = f * (cross + z * apart)
            else:
                if kind == "forward_kl":
                    cross = g * (cross - y * apart)
                gap = f * gap + y * minus(f, g, scale * apart)
            z, y = f * z, g * y
            m, n = m_new, n_new
        u, v = s - m, t - n
        q, p = tl.exp2(power * u), tl.exp2(teacher_power * v)
        d = difference(s, t, m, n, ratio)
        if kind == "reverse_kl":
            cross += q * d
        else:
            if kind == "forward_kl":
                cross -= p * d
            gap += minus(q, p, scale * d)
        z += q
        y += p
    return m, z, n, y, cross, gap


@triton.jit
@no_type_check
def _jsd_sums(
    student,
    teacher,
    student_stride,
    teacher_stride,
    live,
    maxima,
    log_zs,
    teacher_maxima,
    log_ratios,
    sums,
    num_rows,
    scale,
    teacher_scale,
    ratio,
    softcap,
    teacher_softcap,
    beta,
    vocab: tl.constexpr,
    num_slices: tl.constexpr,
    width: tl.constexpr,
    block: tl.constexpr,
):
    """`sums` [2, num_slices, num_rows]: the divergence and E_q[h]."""
    row = tl.program_id(0) // num_slices
    part = tl.program_id(0) % num_slices
    if not tl.load(live + row):
        return
    student += row.to(tl.int64) * student_stride
    teacher += row.to(tl.int64) * teacher_stride
    m, n = tl.load(maxima + row), tl.load(teacher_maxima + row)
    log_z, normalisers = tl.load(log_zs + row), tl.load(log_ratios + row)
    log_y = log_z - normalisers
    loss = tl.zeros([block], tl.float32)
    mean = tl.zeros([block], tl.float32)
    for start in tl.range(0, width, block, num_stages=3):
        columns = part * width + start + tl.arange(0, block)
        mask = columns < vocab
        s = tl.where(mask, read(student, columns, mask, softcap), LOW)
        t = tl.where(mask, read(teacher, columns, mask, teacher_softcap), LOW)
        log_ratio = normalisers - scale * difference(s, t, m, n, ratio)
        q, p = tl.exp(scale * (s - m) - log_z), tl.exp(teacher_scale * (t - n) - log_y)
        low = log_mixture(log_ratio, beta)
        h = (beta - 1.0) * (low + tl.maximum(log_ratio, 0.0))
        mean += q * h
        loss += q * h - beta * p * (low + tl.maximum(-log_ratio, 0.0))
    sums += part * num_rows + row
    tl.store(sums, tl.sum(loss, 0))
    tl.store(sums + num_slices * num_rows, tl.sum(mean, 0))


@triton.jit
@no_type_check
def _grad(
    student,
    teacher,
    student_stride,
    teacher_stride,
    upstream,
    maxima,
    log_zs,
    teacher_maxima,
    log_ratios,
    means,
    out,
    out_stride,
    scale,
    teacher_scale,
    ratio,
    softcap,
    teacher_softcap,
    beta,
    vocab: tl.constexpr,
    kind: tl.constexpr,
    num_slices: tl.constexpr,
    width: tl.constexpr,
    block: tl.constexpr,
):
    row = tl.program_id(0) // num_slices
    columns = tl.program_id(0) % num_slices * width + tl.arange(0, block)
    mask = columns < vocab
    weight = tl.load(upstream + row).to(tl.float32) * scale
    gradient = tl.zeros([block], tl.float32)
    if weight != 0.0:
        m, n, log_z = tl.load(maxima + row), tl.load(teacher_maxima + row), tl.load(log_zs + row)
        s = read(student + row.to(tl.int64) * student_stride, columns, mask, softcap)
        t = read(teacher + row.to(tl.int64) * teacher_stride, columns, mask, teacher_softcap)
        d = tl.where(mask, difference(s, t, m, n, ratio), 0.0)
        q = tl.exp(scale * tl.where(mask, s - m, LOW) - log_z)
        if kind == "reverse_kl":
            gradient = q * (scale * d - tl.load(means + row))
        else:
            normalisers = tl.load(log_ratios + row)
            log_ratio = normalisers - scale * d  # log(p / q)
            if kind == "forward_kl":
                p = tl.exp(teacher_scale * tl.where(mask, t - n, LOW) - (log_z - normalisers))
                gradient = minus(q, p, -log_ratio)
            else:
                h = (beta - 1.0) * (log_mixture(log_ratio, beta) + tl.maximum(log_ratio, 0.0))
                gradient = q * (h - tl.load(means + row))
        gradient *= weight
        if softcap is not None:
            gradient *= slope(s, softcap)
    tl.store(out + row.to(tl.int64) * out_stride + columns, gradient.to(out.dtype.element_ty), mask=mask)
