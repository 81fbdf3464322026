"""Divergences between two softmaxes over the vocabulary, row by row: reverse KL, forward KL, JSD.

`divergence` and `reverse_kl` are differentiable in the student's logits; the other functions are what they are made of, for
those who hold the logits of one chunk at a time. Kernels: `divergence_triton` on CUDA, `divergence_torch` elsewhere.
Shape legend: N or c rows, V columns in use, R and S columns of the student's and the teacher's matrix.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from opd.kernels import divergence_torch
from opd.kernels.blocks import accumulator, row_blocks
from opd.kernels.checks import MODES, check_choice, check_divergence, check_shape, check_temperature
from opd.kernels.dispatch import on_triton
from opd.kernels.head import PLAIN, LogitForm
from opd.kernels.partials import DivergencePartials, DivergenceStats, Kind, astuple_of, divergence_stats_of
from opd.kernels.shapes import Bool, Float


def divergence(
    student: Tensor,
    teacher: Tensor,
    weight: Tensor | None = None,
    *,
    kind: str = "reverse_kl",
    beta: float = 0.5,
    temperature: float = 1.0,
    vocab: int | None = None,
    student_form: LogitForm | None = None,
    teacher_form: LogitForm | None = None,
    mode: str | None = None,
    inplace: bool = False,
) -> Tensor:
    """weight * divergence of each row [N], in nats, fp32; differentiable in `student` alone.

    `student` [N, R] and `teacher` [N, S]: logits in fp32, bf16, fp16 or float64, of any row stride; `weight` [N]. Columns
    from `vocab` on (by default those that only one of the two has) are never read, nor are rows of weight 0. `beta` is the
    teacher's share of the JSD's mixture. The forms say what is done to the logits before the softmax; by default they are
    divided by the temperature. `mode`: `recompute` saves
    four floats a row (the JSD five) and computes the gradient in the backward pass; `fused` computes it in the forward pass,
    which costs fewer passes over a row in cache; by default `fused` on the CPU and `recompute` elsewhere. `inplace` writes
    the gradient over `student`, whose values are lost with the forward pass (`fused`) or with the backward pass.

    Raises `ValueError` for shapes that do not agree, and unknown kinds and modes.
    """
    vocab = min(student.shape[-1], teacher.shape[-1]) if vocab is None else vocab
    _check(student, teacher, weight, kind, beta, vocab)
    check_temperature(temperature)
    if mode is not None:
        check_choice("mode", mode, MODES)
    weight = torch.ones(len(student), device=student.device) if weight is None else weight
    weight = weight.detach().to(accumulator(student))
    forms = tuple(LogitForm(1 / temperature) if form is None else form for form in (student_form, teacher_form))
    fused = mode == "fused" or (mode is None and student.device.type == "cpu" and not on_triton(student))
    if not (torch.is_grad_enabled() and student.requires_grad):
        fused = False  # statistics alone
    return _Divergence.apply(student, teacher, weight, kind, beta, vocab, forms, fused, inplace)  # type: ignore[return-value]


def reverse_kl(student: Tensor, teacher: Tensor, weight: Tensor | None = None, **options: Any) -> Tensor:
    """weight * KL(student, teacher) of each row [N]. Arguments: see `divergence`."""
    return divergence(student, teacher, weight, kind="reverse_kl", **options)


def forward_kl(student: Tensor, teacher: Tensor, weight: Tensor | None = None, **options: Any) -> Tensor:
    """weight * KL(teacher, student) of each row [N]. Arguments: see `divergence`."""
    return divergence(student, teacher, weight, kind="forward_kl", **options)


def jsd(student: Tensor, teacher: Tensor, weight: Tensor | None = None, **options: Any) -> Tensor:
    """weight * generalised Jensen-Shannon divergence of each row [N]. Arguments: see `divergence`."""
    return divergence(student, teacher, weight, kind="jsd", **options)


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, student, teacher, weight, kind, beta, vocab, forms, fused, inplace):  # type: ignore[no-untyped-def]
        used = student.detach()[:, :vocab], teacher.detach()[:, :vocab]
        ctx.options, ctx.vocab, ctx.fused, ctx.inplace = (kind, beta, *forms), vocab, fused, inplace
        if fused:
            whole = _gradient_of(student, inplace, vocab)
            stats = divergence_with_grad(*used, weight, *ctx.options, out=whole[:, :vocab])
            ctx.save_for_backward(whole)
        else:
            stats = divergence_stats(*used, weight != 0, *ctx.options)
            ctx.save_for_backward(student)
            ctx.others = teacher, weight, *stats.saved(kind)  # none has a gradient, and some may be inference tensors
        return weight * stats.divergence

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream):  # type: ignore[no-untyped-def]
        if ctx.fused:
            (whole,) = ctx.saved_tensors
            if whole.device.type != "cpu" or not bool((upstream == 1).all()):
                whole = torch.mul(whole, upstream[:, None], out=whole if ctx.inplace else torch.empty_like(whole))
        else:
            (student,), (teacher, weight, *saved) = ctx.saved_tensors, ctx.others
            stats = DivergenceStats.restored(ctx.options[0], tuple(saved))
            used = student.detach()[:, : ctx.vocab], teacher.detach()[:, : ctx.vocab]
            whole = _gradient_of(student, ctx.inplace, ctx.vocab)
            divergence_grad(*used, stats, upstream * weight, *ctx.options, out=whole[:, : ctx.vocab])
        return whole, *[None] * 8


def _gradient_of(logits: Tensor, inplace: bool, vocab: int) -> Tensor:
    """Where the gradient goes: zero already in the columns that are padding."""
    whole = logits.detach() if inplace else torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    whole[:, vocab:] = 0.0
    return whole


def divergence_stats(
    student: Float[Tensor, "c V"],
    teacher: Float[Tensor, "c V"],
    live: Bool[Tensor, " c"] | None = None,
    kind: Kind = "reverse_kl",
    beta: float = 0.5,
    student_form: LogitForm = PLAIN,
    teacher_form: LogitForm = PLAIN,
) -> DivergenceStats:
    """Divergence and what the gradient needs; 0 in rows that are not live."""
    stats = divergence_stats_of(divergence_partials(student, teacher, live, kind, student_form, teacher_form), kind)
    if kind == "jsd":
        loss, mean = jsd_sums(student, teacher, stats, live, beta, student_form, teacher_form)
        stats = replace(stats, divergence=loss, mean=mean)
    return stats


def divergence_partials(
    student: Float[Tensor, "c V"],
    teacher: Float[Tensor, "c V"],
    live: Bool[Tensor, " c"] | None,
    kind: Kind,
    student_form: LogitForm,
    teacher_form: LogitForm,
) -> DivergencePartials:
    """One pass over these columns, which may be some of a row's alone."""
    return _twin(student).partials(student, teacher, live, kind, student_form, teacher_form)


def jsd_sums(
    student: Float[Tensor, "c V"],
    teacher: Float[Tensor, "c V"],
    stats: DivergenceStats,
    live: Bool[Tensor, " c"] | None,
    beta: float,
    student_form: LogitForm,
    teacher_form: LogitForm,
) -> tuple[Tensor, Tensor]:
    """(JSD, mean) of these columns, whose sums over all columns of a row are `divergence` and `mean` of its statistics."""
    return _twin(student).jsd_sums(student, teacher, stats, live, beta, student_form, teacher_form)


def divergence_grad(
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
    """Writes the gradient of sum(upstream * divergence) with respect to `student` to `out`, which may be either input."""
    _twin(student).grad(student, teacher, stats, upstream, kind, beta, student_form, teacher_form, out)


def divergence_with_grad(
    student: Float[Tensor, "c V"],
    teacher: Float[Tensor, "c V"],
    weight: Float[Tensor, " c"],
    kind: Kind,
    beta: float,
    student_form: LogitForm,
    teacher_form: LogitForm,
    out: Float[Tensor, "c V"],
) -> DivergenceStats:
    """Both, for a `weight` that is known: writes the gradient of sum(weight * divergence) to `out`."""
    if on_triton(student):
        stats = divergence_stats(student, teacher, weight != 0, kind, beta, student_form, teacher_form)
        divergence_grad(student, teacher, stats, weight, kind, beta, student_form, teacher_form, out)
        return stats
    if kind == "reverse_kl":
        return divergence_torch.reverse_kl_with_grad(student, teacher, weight, student_form, teacher_form, out)
    blocks = []
    for rows in row_blocks(len(student), student.shape[1], student.device, 5):
        assert isinstance(rows, slice)
        forms = student_form, teacher_form
        stats = divergence_stats(student[rows], teacher[rows], weight[rows] != 0, kind, beta, *forms)
        divergence_grad(student[rows], teacher[rows], stats, weight[rows], kind, beta, *forms, out=out[rows])
        blocks.append(stats)
    blocks = blocks or [divergence_stats(student, teacher, None, kind, beta)]
    return DivergenceStats(*(torch.cat(column) for column in zip(*map(astuple_of, blocks))))


def _twin(logits: Tensor) -> Any:
    """The module that computes on this device."""
    if on_triton(logits):
        from opd.kernels import divergence_triton

        return divergence_triton
    return divergence_torch


def _check(student: Tensor, teacher: Tensor, weight: Tensor | None, kind: str, beta: float, vocab: int) -> None:
    check_divergence(kind, beta)
    if student.ndim != 2 or teacher.ndim != 2 or len(student) != len(teacher):
        raise ValueError(f"logits: two matrices with as many rows, not {tuple(student.shape)} and {tuple(teacher.shape)}")
    if not 1 <= vocab <= min(student.shape[1], teacher.shape[1]):
        raise ValueError(f"vocab: between 1 and the columns of both ({student.shape[1]}, {teacher.shape[1]}), not {vocab}")
    check_shape("weight", weight, student.shape[:1])
