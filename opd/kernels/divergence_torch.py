"""Divergences between two softmaxes over the vocabulary, in torch: what the Triton kernels must give, and the CPU's path.

Works on blocks of rows that stay in cache. Shape legend: c rows, V columns. q is the student's softmax, p the teacher's;
m, n, x, w, z and y as in `opd.kernels.partials`.
Reverse KL: L = E_q[log q - log p], dL/ds_j = scale * q_j ((x_j - w_j) - E_q[x - w]). Forward KL: L = E_p[log p - log q],
dL/ds_j = scale * (q_j - p_j), formed as the larger of both times 1 - e^-|log q_j - log p_j|. JSD:
L = beta KL(p, r) + (1 - beta) KL(q, r) with r = beta p + (1 - beta) q
(Agarwal et al. 2023, arXiv 2306.13649, equation 1), dL/ds_j = scale * q_j (h_j - E_q[h]), h = (1 - beta) log(q / r).
"""

import torch
from torch import Tensor

from opd.kernels.blocks import Rows, Scratch, exponentials, row_blocks, scaled_, store, total
from opd.kernels.head import LogitForm
from opd.kernels.partials import NEAR_MAXIMA, DivergencePartials, DivergenceStats, Kind, divergence_stats_of
from opd.kernels.shapes import Bool, Float

FAR = 60.0  # e^x - e^w is not formed as e^w (e^(x - w) - 1) beyond: near rows have no such differences, and fp32 ends at 88


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
    scratch = Scratch(3 if kind == "reverse_kl" else 4, student, vocab)
    out = [torch.zeros(c, device=student.device, dtype=scratch.dtype) for _ in range(6)]
    for rows in row_blocks(c, vocab, student.device, scratch.count, live):
        x, w, d, *spare = scratch(rows)
        maxima = _read(student, teacher, rows, student_form, teacher_form, x, w, d)
        reverse = kind == "reverse_kl"
        found = _reverse_kl_sums(x, w, d, maxima)[0] if reverse else _sums(x, w, d, *spare, kind=kind, maxima=maxima)
        for field, value in zip(out, found):
            field[rows] = value
    return DivergencePartials(*out)


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
    scratch = Scratch(5, student, vocab)
    loss, mean = (torch.zeros(c, device=student.device, dtype=scratch.dtype) for _ in range(2))
    for rows in row_blocks(c, vocab, student.device, scratch.count, live):
        x, w, d, low, over_q = scratch(rows)
        _read(student, teacher, rows, student_form, teacher_form, x, w, d, stats)
        _mixture(d, stats.log_ratio[rows, None], beta, low, over_q)
        log_z, log_y = stats.log_z[rows, None], (stats.log_z - stats.log_ratio)[rows, None]
        mean[rows] = (beta - 1) * x.sub_(log_z).exp_().mul_(over_q).sum(-1)
        over_p = d.neg_().clamp_(min=0).add_(low)
        loss[rows] = mean[rows] - beta * w.sub_(log_y).exp_().mul_(over_p).sum(-1)
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
    live, upstream = upstream != 0, (upstream * student_form.scale)[:, None]
    scratch = Scratch({"reverse_kl": 3, "forward_kl": 4, "jsd": 5}[kind], student, vocab)
    for rows in row_blocks(c, vocab, student.device, scratch.count, live):
        x, w, g, *spare = scratch(rows)
        _read(student, teacher, rows, student_form, teacher_form, x, w, g, stats)
        log_z = stats.log_z[rows, None]
        if kind == "reverse_kl":
            torch.sub(x, log_z, out=w)
            g.sub_(stats.mean[rows, None]).mul_(w.exp_())
        elif kind == "forward_kl":
            log_ratio, (other,) = stats.log_ratio[rows, None], spare
            torch.maximum(w.sub_(log_z - log_ratio), torch.sub(x, log_z, out=other), out=w).exp_()  # the larger of p and q
            torch.abs(g.sub_(log_ratio), out=other).neg_().expm1_()
            torch.copysign(w.mul_(other), g, out=g)
        else:
            low, over_q = spare
            _mixture(g, stats.log_ratio[rows, None], beta, low, over_q)
            torch.sub(x, log_z, out=w)
            torch.mul(w.exp_(), over_q.mul_(beta - 1).sub_(stats.mean[rows, None]), out=g)
        store(out, rows, student_form.slope_(g.mul_(upstream[rows]), x, stats.max[rows, None]))
    if not live.all():
        out.masked_fill_(~live[:, None], 0.0)


def reverse_kl_with_grad(
    student: Float[Tensor, "c V"],
    teacher: Float[Tensor, "c V"],
    weight: Float[Tensor, " c"],
    student_form: LogitForm,
    teacher_form: LogitForm,
    out: Float[Tensor, "c V"],
) -> DivergenceStats:
    """Statistics and gradient while a block is in cache: `partials` and `grad` with one exponential fewer."""
    c, vocab = student.shape
    live, upstream = weight != 0, (weight * student_form.scale)[:, None]
    scratch = Scratch(3, student, vocab)
    fields = [torch.zeros(c, device=student.device, dtype=scratch.dtype) for _ in range(6)]
    for rows in row_blocks(c, vocab, student.device, scratch.count, live):
        x, w, d = scratch(rows)
        maxima = _read(student, teacher, rows, student_form, teacher_form, x, w, d)
        found, mass = _reverse_kl_sums(x, w, d, maxima)
        for field, value in zip(fields, found):
            field[rows] = value
        mean = fields[4][rows, None] / fields[1][rows, None]
        g = x.addcmul_(w, -mean).mul_(upstream[rows] / mass)
        if student_form.softcap is not None:
            student_form.capped_(d.copy_(student[rows])).sub_(maxima[0][:, None]).mul_(student_form.scale)
        store(out, rows, student_form.slope_(g, d, maxima[0][:, None]))
    if not live.all():
        out.masked_fill_(~live[:, None], 0.0)
    return divergence_stats_of(DivergencePartials(*fields), "reverse_kl")


def _read(
    student: Tensor,
    teacher: Tensor,
    rows: Rows,
    student_form: LogitForm,
    teacher_form: LogitForm,
    x: Tensor,
    w: Tensor,
    d: Tensor,
    stats: DivergenceStats | None = None,
) -> tuple[Tensor, Tensor]:
    """Writes d = x - w of some rows, and x and w; gives their maxima, those of `stats` where given. Without `stats` x and w
    may have a constant a row that their softmax does not feel.

    Where the maxima are close, s - t is formed before they are taken off: it is exact between near-equal rows, while s - m
    and t - n have rounding errors of their own. Where they are not, as with unlike offsets, it is the other way.
    """
    student_form.capped_(x.copy_(student[rows]))
    teacher_form.capped_(w.copy_(teacher[rows]))
    row_max = x.amax(-1) if stats is None else stats.max[rows]
    teacher_max = w.amax(-1) if stats is None else stats.teacher_max[rows]
    scale, m, n = student_form.scale, row_max[:, None], teacher_max[:, None]
    if scale != teacher_form.scale:
        torch.sub(scaled_(x.sub_(m), scale), scaled_(w.sub_(n), teacher_form.scale), out=d)
        return row_max, teacher_max
    far = (m - n).abs() > NEAR_MAXIMA
    some_far, all_far = bool(far.any()), bool(far.all())
    if some_far:
        x.sub_(m.masked_fill(~far, 0.0))
        w.sub_(n.masked_fill(~far, 0.0))
    torch.sub(x, w, out=d)
    if not all_far:
        d.sub_((m - n).masked_fill_(far, 0.0))
        if scale != 1.0 or stats is not None:
            x.sub_(m.masked_fill(far, 0.0))
            w.sub_(n.masked_fill(far, 0.0))
    for block in (x, w, d):
        scaled_(block, scale)
    return row_max, teacher_max


def _reverse_kl_sums(x: Tensor, w: Tensor, d: Tensor, maxima: tuple[Tensor, Tensor]) -> tuple[tuple[Tensor, ...], Tensor]:
    """(fields of `DivergencePartials`, M [c, 1]). Leaves M q in `w` and M q d in `x`. The log-ratio d is formed before
    normalisers come in: equal rows give exactly 0, near rows keep their digits."""
    factor = exponentials(w, w)
    y = (total(w) / factor).to(w.dtype)
    factor = exponentials(x, w)
    mass = total(w)
    z, cross = (mass / factor).to(w.dtype), torch.mul(w, d, out=x).sum(-1) / factor
    return (maxima[0], z, maxima[1], y, cross, torch.zeros_like(y)), mass[:, None].to(w.dtype)


def _sums(
    x: Tensor, w: Tensor, d: Tensor, spare: Tensor, *, kind: Kind, maxima: tuple[Tensor, Tensor]
) -> tuple[Tensor, ...]:
    """The fields of `DivergencePartials` for the forward KL and the JSD; overwrites everything."""
    factor = exponentials(w, w)
    y = (total(w) / factor).to(w.dtype)
    cross = -torch.mul(w, d, out=spare).sum(-1) / factor if kind == "forward_kl" else torch.zeros_like(y)
    overflowing = d.amax(-1) > FAR
    gap = d.clamp_(max=FAR).expm1_().mul_(w).sum(-1).div_(factor).masked_fill_(overflowing, torch.inf)
    factor = exponentials(x, w)
    return maxima[0], (total(w) / factor).to(w.dtype), maxima[1], y, cross, gap


def _mixture(d: Tensor, log_ratio: Tensor, beta: float, low: Tensor, over_q: Tensor) -> None:
    """With r = beta p + (1 - beta) q: turns d = x - w into log(p / q), exactly 0 where the rows are equal, and writes
    log(r / max(p, q)) to `low` and log(r / q) to `over_q`."""
    torch.gt(d.neg_().add_(log_ratio), 0, out=over_q).mul_(1 - 2 * beta).add_(beta)  # the smaller one's share of r
    torch.abs(d, out=low).neg_().expm1_().mul_(over_q).log1p_()
    torch.clamp(d, min=0, out=over_q).add_(low)
