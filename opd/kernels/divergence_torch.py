"""Divergences between two softmaxes over the vocabulary, in torch: what the Triton kernels must give, and the CPU's path.

Works on blocks of rows that stay in cache. Shape legend: c rows, V columns. q is the student's softmax, p the teacher's;
m, n, x, w, z and y as in `opd.kernels.partials`.
Reverse KL: L = E_q[log q - log p], dL/ds_j = scale * q_j ((x_j - w_j) - E_q[x - w]). Forward KL: L = E_p[log p - log q],
dL/ds_j = scale * (q_j - p_j). JSD: L = beta KL(p, r) + (1 - beta) KL(q, r) with r = beta p + (1 - beta) q
(Agarwal et al. 2023, arXiv 2306.13649, equation 1), dL/ds_j = scale * q_j (h_j - E_q[h]), h = (1 - beta) log(q / r).
"""

import torch
from torch import Tensor

from opd.kernels.blocks import Rows, Scratch, exponentials, row_blocks, store
from opd.kernels.head import LogitForm
from opd.kernels.partials import DivergencePartials, DivergenceStats, Kind, divergence_stats_of
from opd.kernels.shapes import Bool, Float


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
    scratch = Scratch(3, student, vocab)
    out = [torch.zeros(c, device=student.device, dtype=scratch.dtype) for _ in range(6)]
    for rows in row_blocks(c, vocab, student.device, live):
        x, w, e = scratch(rows)
        row_max, teacher_max = _centred(student, rows, student_form, x), _centred(teacher, rows, teacher_form, w)
        for total, value in zip(out, (row_max, *_sums(x, w, e, kind, teacher_max))):
            total[rows] = value
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
    scratch = Scratch(2, student, vocab)
    loss, mean = (torch.zeros(c, device=student.device, dtype=scratch.dtype) for _ in range(2))
    for rows in row_blocks(c, vocab, student.device, live):
        x, w = scratch(rows)
        _centred(student, rows, student_form, x, stats.max)
        _centred(teacher, rows, teacher_form, w, stats.teacher_max)
        q, p, over_q, over_p = _mixture(x, w, rows, stats, beta)
        mean[rows] = (beta - 1) * q.mul_(over_q).sum(-1)
        loss[rows] = mean[rows] - beta * p.mul_(over_p).sum(-1)
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
    scratch = Scratch(3, student, vocab)
    for rows in row_blocks(c, vocab, student.device, live):
        x, w, g = scratch(rows)
        _centred(student, rows, student_form, x, stats.max)
        _centred(teacher, rows, teacher_form, w, stats.teacher_max)
        log_z = stats.log_z[rows, None]
        if kind == "reverse_kl":
            torch.sub(x, w, out=g)
            torch.sub(x, log_z, out=w)
            g.sub_(stats.mean[rows, None]).mul_(w.exp_())
        elif kind == "forward_kl":
            torch.sub(x, log_z, out=g)
            g.exp_().sub_(w.sub_(stats.teacher_log_z[rows, None]).exp_())
        else:
            q, _, over_q, _ = _mixture(x.clone(), w, rows, stats, beta)
            torch.mul(q, over_q.mul_(beta - 1).sub_(stats.mean[rows, None]), out=g)
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
    sums = [torch.zeros(c, device=student.device, dtype=scratch.dtype) for _ in range(6)]
    for rows in row_blocks(c, vocab, student.device, live):
        x, d, e = scratch(rows)
        row_max, teacher_max = _centred(student, rows, student_form, x), _centred(teacher, rows, teacher_form, d)
        for total, value in zip(sums, (row_max, *_sums(x, d, e, "reverse_kl", teacher_max))):
            total[rows] = value
        z, cross = sums[1][rows, None], sums[4][rows, None]
        d.sub_(cross / z).mul_(e).mul_(upstream[rows] / e.sum(-1, keepdim=True))
        if student_form.softcap is not None:
            _centred(student, rows, student_form, x)
        store(out, rows, student_form.slope_(d, x, row_max[:, None]))
    if not live.all():
        out.masked_fill_(~live[:, None], 0.0)
    return divergence_stats_of(DivergencePartials(*sums), "reverse_kl")


def _centred(logits: Tensor, rows: Rows, form: LogitForm, out: Tensor, row_max: Tensor | None = None) -> Tensor:
    """Writes x or w of some rows to `out`; the maxima of these rows, which are found unless those of all rows are given."""
    form.capped_(out.copy_(logits[rows]))
    found = out.amax(-1) if row_max is None else row_max[rows]
    out.sub_(found[:, None])
    if form.scale != 1.0:
        out.mul_(form.scale)
    return found


def _sums(x: Tensor, w: Tensor, e: Tensor, kind: Kind, teacher_max: Tensor) -> tuple[Tensor, ...]:
    """The fields of `DivergencePartials` behind the first; overwrites all three blocks. The log-ratio is formed before
    normalisers come in, so that equal rows give exactly 0 and near rows keep their digits. Reverse KL leaves a multiple of q
    in `e` and x - w in `w`."""
    factor = exponentials(w, e)
    y = e.sum(-1) / factor
    cross = torch.zeros_like(y)
    if kind == "forward_kl":
        cross = w.sub_(x).mul_(e).sum(-1) / factor
    factor = exponentials(x, e)
    z = e.sum(-1) / factor
    if kind == "reverse_kl":
        torch.sub(x, w, out=w)
    entropy_sum = x.mul_(e).sum(-1) / factor
    if kind == "reverse_kl":
        cross = torch.mul(e, w, out=x).sum(-1) / factor
    return z, teacher_max, y, cross, entropy_sum


def _mixture(x: Tensor, w: Tensor, rows: Rows, stats: DivergenceStats, beta: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(q, p, log(r / q), log(r / p)) with r = beta p + (1 - beta) q. Overwrites `x` and `w`."""
    log_z, log_y = stats.log_z[rows, None], stats.teacher_log_z[rows, None]
    d = (w - x).sub_(log_y - log_z)  # log(p / q), exactly 0 where the rows are equal
    q, p = x.sub_(log_z).exp_(), w.sub_(log_y).exp_()
    low = torch.where(d > 0, 1 - beta, beta).to(d.dtype)
    low.mul_(torch.expm1(-d.abs())).log1p_()  # log(r / max(p, q))
    return q, p, low + d.relu(), low + (-d).relu()
