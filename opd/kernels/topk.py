"""Divergences against a teacher's most likely tokens alone.

No kernel of its own: log-probs at the K ids come from `gather_logprob`, which reads a row once and writes its gradient once,
and what is left is maths on [c, K]. Shape legend: c or N rows, V columns in use, K ids a row.
"""

import math

import torch
from torch import Tensor

from opd.kernels.checks import check_choice, check_divergence, check_shape
from opd.kernels.gather import gather_logprob
from opd.kernels.head import LogitForm
from opd.kernels.shapes import Bool, Float

OUTSIDE = ("tail", "renormalise", "truncate")

MIN_TAIL = 1e-7  # fp32 cannot tell a smaller mass from the rounding of 1 - sum


def topk_reverse_kl(
    logits: Tensor,
    ids: Tensor,
    logps: Tensor,
    tail: Tensor,
    weight: Tensor | None = None,
    *,
    outside: str = "tail",
    kind: str = "reverse_kl",
    beta: float = 0.5,
    temperature: float = 1.0,
    vocab: int | None = None,
    form: LogitForm | None = None,
    inplace: bool = False,
) -> Tensor:
    """weight * divergence of each row over the teacher's `ids` (-1 where absent, each named once), in nats.

    `logits` [N, R] are the student's, `logps` [N, K] the teacher's log-probs at the ids [N, K], `tail` [N] is its mass
    outside. `outside`: see `topk_divergence`; the other options: `gather_logprob`. Rows of weight 0 are not read.

    Raises `ValueError` for shapes that do not agree and unknown choices.
    """
    check_choice("outside", outside, OUTSIDE)
    check_divergence(kind, beta)
    check_shape("weight", weight, logits.shape[:1])
    if logps.shape != ids.shape or tail.shape != ids.shape[:1]:
        raise ValueError(f"logps, tail: of shapes {tuple(ids.shape)} and {tuple(ids.shape[:1])} as the ids are")
    mask = None if weight is None else weight != 0
    logp = gather_logprob(logits, ids, mask, temperature=temperature, vocab=vocab, form=form, inplace=inplace).logp
    rows = topk_divergence(logp, logps, tail, ids >= 0, outside=outside, kind=kind, beta=beta)
    return rows if weight is None else rows.where(weight != 0, 0.0) * weight


def topk_divergence(
    log_q: Float[Tensor, "c K"],
    log_p: Float[Tensor, "c K"],
    p_tail: Float[Tensor, " c"],
    present: Bool[Tensor, "c K"],
    *,
    outside: str = "tail",
    kind: str = "reverse_kl",
    beta: float = 0.5,
    unknown: Bool[Tensor, "c K"] | None = None,
) -> Float[Tensor, " c"]:
    """Divergence over the K tokens, in nats, from both models' log-probs at them and the teacher's mass outside.

    `outside`: `tail` adds the mass outside as one more token, so K = V is exact; `renormalise` conditions both models on
    the K tokens; `truncate` is the divergence of unnormalised measures, sum a log(a/b) - a + b, which is never negative.
    `unknown` are tokens that the teacher does not have: log_q is conditioned on their not being drawn.
    """
    if unknown is not None:
        known = 1 - (log_q.exp() * unknown).sum(-1, keepdim=True)
        log_q, present = log_q - known.clamp(min=MIN_TAIL).log(), present & ~unknown
    log_p = log_p.masked_fill(~present, 0.0)
    log_q = log_q.masked_fill(~present, 0.0)
    keep = present
    if outside == "tail":
        q_tail = 1 - (log_q.exp() * present).sum(-1, keepdim=True)
        log_q = torch.cat([log_q, q_tail.clamp(min=MIN_TAIL).log()], -1)
        log_p = torch.cat([log_p, p_tail[:, None].clamp(min=MIN_TAIL).log()], -1)
        keep = torch.cat([present, torch.ones_like(present[:, :1])], -1)
    elif outside == "renormalise":
        lowest = torch.finfo(log_q.dtype).min  # not -inf: a row may have no entry at all, and must not become NaN
        log_q = (log_q - log_q.masked_fill(~present, lowest).logsumexp(-1, keepdim=True)).masked_fill(~present, 0.0)
        log_p = (log_p - log_p.masked_fill(~present, lowest).logsumexp(-1, keepdim=True)).masked_fill(~present, 0.0)
    return (_pointwise(log_q, log_p, kind, beta) * keep).sum(-1)


def _pointwise(log_q: Tensor, log_p: Tensor, divergence: str, beta: float) -> Tensor:
    """Summands of the divergence of (possibly unnormalised) measures; the parts without a log cancel when both sum to 1."""
    q, p = log_q.exp(), log_p.exp()
    if divergence == "reverse_kl":
        return q * (log_q - log_p) - q + p
    if divergence == "forward_kl":
        return p * (log_p - log_q) - p + q
    mixture = torch.logaddexp(log_p + math.log(beta), log_q + math.log1p(-beta))  # p and q may both underflow
    return beta * p * (log_p - mixture) + (1 - beta) * q * (log_q - mixture)
