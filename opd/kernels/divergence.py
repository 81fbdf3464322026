"""Divergences between two softmaxes over the whole vocabulary, and their gradients, one cache-sized block at a time.

Shape legend: c rows, V columns of the vocabulary in use. q is the student's softmax, p the teacher's. All in fp32.
Reverse KL: L = E_q[log q - log p], dL/ds_j = scale * q_j ((log q_j - log p_j) - L). Forward KL: L = E_p[log p - log q],
dL/ds_j = scale * (q_j - p_j). JSD: L = beta KL(p, m) + (1 - beta) KL(q, m) with m = beta p + (1 - beta) q
(Agarwal et al. 2023, arXiv 2306.13649, equation 1), dL/ds_j = scale * q_j (h_j - E_q[h]), h = (1 - beta) log(q / m).
"""

import math
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from opd.kernels.blocks import Scratch, row_blocks

Block = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def full_divergence_(
    student: Float[Tensor, "c V"],
    teacher: Float[Tensor, "c V"],
    weight: Float[Tensor, " c"],
    kind: str = "reverse_kl",
    beta: float = 0.5,
    student_scale: float = 1.0,
    teacher_scale: float = 1.0,
) -> Float[Tensor, " c"]:
    """Divergence of each row, in nats. Overwrites `teacher` by the gradient of sum(weight * divergence) with respect to
    `student`, which is left as it is.

    The scales (one over the temperature, times the model's own logit scale) multiply the logits before the softmax.
    """
    c, vocab = student.shape
    out = torch.empty(c, device=student.device)
    scratch = Scratch(3, c, vocab, student.device)
    block = {"reverse_kl": _reverse_kl, "forward_kl": _forward_kl}.get(kind) or _jsd(beta)
    for rows in row_blocks(c, vocab, student.device):
        x, y, e = scratch(rows)
        x.copy_(student[rows]).mul_(student_scale)
        y.copy_(teacher[rows]).mul_(teacher_scale)
        x.sub_(x.amax(-1, keepdim=True))
        y.sub_(y.amax(-1, keepdim=True))
        out[rows] = block(x, y, e, (weight[rows] * student_scale)[:, None])
        teacher[rows] = y
    return out


def _reverse_kl(x: Tensor, y: Tensor, e: Tensor, weight: Tensor) -> Tensor:
    """Row maxima are 0. Leaves the gradient in `y`. The log-ratio d = x - y is formed before the normalisers come in, so
    that equal rows give exactly 0 and near rows keep their digits."""
    torch.exp(y, out=e)
    y_sum = e.sum(-1)
    torch.exp(x, out=e)
    z = e.sum(-1)
    torch.sub(x, y, out=y)
    mean = torch.linalg.vecdot(e, y) / z
    y.sub_(mean[:, None]).mul_(e).mul_(weight / z[:, None])
    return mean - (z / y_sum).log()


def _forward_kl(x: Tensor, y: Tensor, e: Tensor, weight: Tensor) -> Tensor:
    torch.exp(y, out=e)
    y_sum = e.sum(-1)
    torch.sub(y, x, out=y)
    mean = torch.linalg.vecdot(e, y) / y_sum
    torch.exp(x, out=x)
    z = x.sum(-1)
    torch.mul(x, 1 / z[:, None], out=y)
    y.sub_(e.mul_(1 / y_sum[:, None])).mul_(weight)
    return mean + (z / y_sum).log()


def _jsd(beta: float) -> Block:
    def block(x: Tensor, y: Tensor, e: Tensor, weight: Tensor) -> Tensor:
        log_q, log_p = x.log_softmax(-1), y.log_softmax(-1)
        log_m = torch.logaddexp(log_p + math.log(beta), log_q + math.log1p(-beta))
        q, h = log_q.exp(), (1 - beta) * (log_q - log_m)
        mean = (q * h).sum(-1)
        y.copy_(q * (h - mean[:, None]) * weight)
        return beta * (log_p.exp() * (log_p - log_m)).sum(-1) + mean

    return block
