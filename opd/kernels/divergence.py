"""Divergences between two softmaxes over the whole vocabulary, and their gradients, one cache-sized block at a time.

Shape legend: c rows, V columns of the vocabulary in use. q is the student's softmax, p the teacher's. All in fp32.
Reverse KL: L = E_q[log q - log p], dL/ds_j = scale * q_j ((log q_j - log p_j) - L). Forward KL: L = E_p[log p - log q],
dL/ds_j = scale * (q_j - p_j). JSD: L = beta KL(p, m) + (1 - beta) KL(q, m) with m = beta p + (1 - beta) q
(Agarwal et al. 2023, arXiv 2306.13649, equation 1), dL/ds_j = scale * q_j (h_j - E_q[h]), h = (1 - beta) log(q / m).
"""

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
    block = {"reverse_kl": _reverse_kl, "forward_kl": _forward_kl, "jsd": _jsd(beta)}[kind]
    for rows in row_blocks(c, vocab, student.device):
        x, y, e = scratch(rows)
        for scaled, logits, scale in ((x, student, student_scale), (y, teacher, teacher_scale)):
            scaled.copy_(logits[rows])
            scaled.sub_(scaled.amax(-1, keepdim=True)).mul_(scale)  # in this order an offset costs no digits
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
        y_sum = torch.exp(y, out=e).sum(-1, keepdim=True)
        d = y.sub_(x)
        z = x.exp_().sum(-1, keepdim=True)
        d.sub_((y_sum / z).log())  # log(p / q), exactly 0 where the rows are equal
        p, q = e.div_(y_sum), x.div_(z)
        low = torch.where(d > 0, 1 - beta, beta).mul_(torch.expm1(-d.abs())).log1p_()  # log(m / max(p, q))
        over_p, h = low + (-d).relu_(), low.add_(d.relu()).mul_(beta - 1)  # log(m / p), and h of the module
        mean = torch.linalg.vecdot(q, h)
        torch.mul(q, h.sub_(mean[:, None]), out=y).mul_(weight)
        return mean - beta * torch.linalg.vecdot(p, over_p)

    return block
