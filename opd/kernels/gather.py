"""Log-probs at given ids, and their gradient, without a [c, V] log-softmax.

Shape legend: c rows, V columns of the vocabulary in use, M ids a row. All accumulation is in fp32.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from opd.kernels.blocks import Scratch, row_blocks


@dataclass(frozen=True)
class RowStats:
    """What a row of logits is known by. log q_j = scale * (s_j - max) - log_z keeps its digits under any offset."""

    logp: Tensor  # [c, M] fp32, natural log; 0 where the id is -1
    entropy: Tensor  # [c] fp32, nats
    max: Tensor  # [c] fp32
    log_z: Tensor  # [c] fp32, log of the sum of exp(scale * (s - max))


def gather_logprob(logits: Float[Tensor, "c V"], ids: Int[Tensor, "c M"], scale: float = 1.0) -> RowStats:
    """Log-probs of `ids` under softmax(scale * logits), with the row's entropy, in one pass.

    `ids` of -1 are absent. Accepts any float type and row stride; computes in fp32.
    """
    c, vocab = logits.shape
    out = [torch.empty(c, device=logits.device) for _ in range(3)]
    entropy, row_max, log_z = out
    logp = torch.empty(ids.shape, device=logits.device)
    scratch = Scratch(2, c, vocab, logits.device)
    for rows in row_blocks(c, vocab, logits.device):
        x, e = scratch(rows)
        x.copy_(logits[rows])
        row_max[rows] = x.amax(-1)
        x.sub_(row_max[rows, None]).mul_(scale)
        torch.exp(x, out=e)
        z = e.sum(-1)
        log_z[rows] = z.log()
        entropy[rows] = log_z[rows] - torch.linalg.vecdot(e, x) / z
        logp[rows] = x.gather(-1, ids[rows].clamp(min=0)) - log_z[rows, None]
    return RowStats(logp.masked_fill_(ids < 0, 0.0), entropy, row_max, log_z)


def gather_logprob_grad_(
    logits: Float[Tensor, "c V"],
    ids: Int[Tensor, "c M"],
    stats: RowStats,
    grad: Float[Tensor, "c M"],
    scale: float = 1.0,
    add: Tensor | None = None,
) -> None:
    """Overwrites `logits` by sum_k grad_k * d logp_k / d logits, plus `add` [c, V] where given.

    d logp_k / d s_j = scale * ([j = id_k] - q_j).
    """
    c, vocab = logits.shape
    grad = grad.masked_fill(ids < 0, 0.0) * scale
    total = grad.sum(-1, keepdim=True)
    scratch = Scratch(1, c, vocab, logits.device)
    for rows in row_blocks(c, vocab, logits.device):
        (x,) = scratch(rows)
        x.copy_(logits[rows]).sub_(stats.max[rows, None]).mul_(scale).sub_(stats.log_z[rows, None])
        x.exp_().mul_(-total[rows])
        x.scatter_add_(-1, ids[rows].clamp(min=0), grad[rows])
        if add is not None:
            x.add_(add[rows])
        logits[rows] = x
