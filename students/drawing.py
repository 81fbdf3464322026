"""One token a row from logits and one uniform number a row: pure functions on tensors.

Shape legend: B rows, V ids in use, K most likely tokens kept.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from opd.kernels.gather import gather_stats
from opd.kernels.head import LogitForm
from opd.records import Sampling

BLOCK = 1024  # columns summed at once by the two-level search of the cumulative distribution


def draw(
    logits: Float[Tensor, "B V"], uniform: Float[Tensor, " B"], sampling: Sampling
) -> tuple[Int[Tensor, " B"], Float[Tensor, " B"]]:
    """(ids, log-probs of the distribution sampled from), by inverting its cumulative distribution at `uniform`.

    Temperature first, then top-k, then top-p, as vLLM and transformers order them. Greedy has log-prob 0.
    """
    if sampling.temperature == 0.0:
        return logits.argmax(-1), torch.zeros(len(logits), device=logits.device)
    vocab = logits.shape[1]
    if sampling.top_p >= 1.0 and not 0 < sampling.top_k < vocab:
        shares = (logits.float() - logits.amax(-1, keepdim=True)).mul_(1 / sampling.temperature).exp_()
        ids = _invert(shares, uniform)
        return ids, gather_stats(logits, ids[:, None], LogitForm(1 / sampling.temperature)).logp[:, 0]
    k = sampling.top_k if 0 < sampling.top_k < vocab else vocab
    values, order = (logits.float() / sampling.temperature).topk(k, dim=-1)
    probs = values.softmax(-1)
    before = probs.cumsum(-1) - probs
    probs = probs.masked_fill(before >= sampling.top_p, 0.0)  # the first token always stays: nothing comes before it
    probs /= probs.sum(-1, keepdim=True)
    place = _invert(probs, uniform)
    return order.gather(-1, place[:, None])[:, 0], probs.gather(-1, place[:, None])[:, 0].log()


def student_topk(logits: Float[Tensor, "B V"], sampling: Sampling) -> tuple[Int[Tensor, "B K"], Float[Tensor, "B K"]]:
    """The `sampling.num_topk` most likely tokens and their untruncated log-probs at the sampling temperature."""
    ids = logits.topk(min(sampling.num_topk, logits.shape[1]), dim=-1).indices
    return ids, gather_stats(logits, ids, LogitForm(1 / (sampling.temperature or 1.0))).logp


def _invert(probs: Tensor, uniform: Tensor) -> Tensor:
    """[B]: the first column at which the cumulative sum exceeds `uniform` times the total, never one of probability 0.

    Summing blocks first and searching inside one afterwards reads the row once and keeps rounding away from the tail.
    """
    b, v = probs.shape
    padded = torch.nn.functional.pad(probs, (0, -v % BLOCK)).view(b, -1, BLOCK)
    sums = padded.sum(-1, dtype=torch.float64)
    ends = sums.cumsum(-1)
    target = uniform.double() * ends[:, -1]
    block = (ends <= target[:, None]).sum(-1).clamp(max=ends.shape[1] - 1)
    rest = (target - (ends.gather(-1, block[:, None]) - sums.gather(-1, block[:, None]))[:, 0]).clamp(min=0)
    inside = padded[torch.arange(b, device=probs.device), block]
    column = (inside.cumsum(-1, dtype=torch.float64) <= rest[:, None]).sum(-1)
    last = BLOCK - 1 - (inside > 0).flip(-1).int().argmax(-1)  # rounding may run past the last column with mass
    return block * BLOCK + torch.minimum(column, last)
