"""The closed set of term kinds, as pure functions of the student's log-probs at a few ids of each row.

Shape legend: c rows (trainable tokens), K ids a row. Log-probs are natural logs under the current student; everything
else in `inputs` is detached. A function returns each row's loss, in nats, and figures [c] to be averaged as metrics.
Third parties register a function for a further kind of their own with `register`.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

Inputs = Mapping[str, Any]
Figures = dict[str, Tensor]
SampledLoss = Callable[[Tensor, Inputs], tuple[Tensor, Figures]]

MIN_TAIL = 1e-7  # fp32 cannot tell a smaller mass from the rounding of 1 - sum


def policy_gradient(logp: Float[Tensor, " c"], inputs: Inputs) -> tuple[Tensor, Figures]:
    """-ratio * A with A = sg(reward - self_coef * log pi), pessimistically clipped as in PPO (arXiv 1707.06347, eq. 7).

    Inputs: `reward` [c]; `self_coef`; `advantage_clip` or None; `ratio_clip` or None; `importance_cap` or None;
    `old_logps` [c], the trainer's under the policy that the batch began with; `sampler_logps` [c].
    """
    advantage = inputs["reward"] - inputs["self_coef"] * logp.detach()
    figures = {"advantage": advantage}
    if inputs["advantage_clip"] is not None:
        clipped = advantage.clamp(-inputs["advantage_clip"], inputs["advantage_clip"])
        figures["advantage_clipped"] = (clipped != advantage).float()
        advantage = clipped
    old = inputs.get("old_logps")
    ratio = (logp - (logp.detach() if old is None else old)).exp()
    gain = ratio * advantage
    if inputs["ratio_clip"] is not None:
        bounded = ratio.clamp(1 - inputs["ratio_clip"], 1 + inputs["ratio_clip"]) * advantage
        figures["ratio_clipped"] = (bounded < gain).float()
        gain = torch.minimum(gain, bounded)
    if inputs["importance_cap"] is not None:
        trainer = logp.detach() if old is None else old
        gain = gain * (trainer - inputs["sampler_logps"]).exp().clamp(max=inputs["importance_cap"])
    return -gain, figures


def topk_divergence(log_q: Float[Tensor, "c K"], inputs: Inputs) -> Tensor:
    """Divergence over the K tokens of `target`, in nats.

    Inputs: `target_logps` [c, K], `target_tail` [c], `present` [c, K] bool, `tail` (tail | renormalise | truncate),
    `divergence` (reverse_kl | forward_kl | jsd), `beta`. `tail` adds the mass outside as one more token, so K = V is
    exact; `truncate` is the divergence of unnormalised measures, sum a log(a/b) - a + b, which is never negative.
    """
    present, tail = inputs["present"], inputs["tail"]
    log_p = inputs["target_logps"].masked_fill(~present, 0.0)
    log_q = log_q.masked_fill(~present, 0.0)
    keep = present
    if tail == "tail":
        q_tail = 1 - (log_q.exp() * present).sum(-1, keepdim=True)
        p_tail = inputs["target_tail"][:, None]
        log_q = torch.cat([log_q, q_tail.clamp(min=MIN_TAIL).log()], -1)
        log_p = torch.cat([log_p, p_tail.clamp(min=MIN_TAIL).log()], -1)
        keep = torch.cat([present, torch.ones_like(present[:, :1])], -1)
    elif tail == "renormalise":
        lowest = torch.finfo(log_q.dtype).min  # not -inf: a row may have no entry at all, and must not become NaN
        log_q = (log_q - log_q.masked_fill(~present, lowest).logsumexp(-1, keepdim=True)).masked_fill(~present, 0.0)
        log_p = (log_p - log_p.masked_fill(~present, lowest).logsumexp(-1, keepdim=True)).masked_fill(~present, 0.0)
    return (_pointwise(log_q, log_p, inputs["divergence"], inputs["beta"]) * keep).sum(-1)


def _pointwise(log_q: Tensor, log_p: Tensor, divergence: str, beta: float) -> Tensor:
    """Summands of the divergence of (possibly unnormalised) measures; the parts without a log cancel when both sum to 1."""
    q, p = log_q.exp(), log_p.exp()
    if divergence == "reverse_kl":
        return q * (log_q - log_p) - q + p
    if divergence == "forward_kl":
        return p * (log_p - log_q) - p + q
    mixture = torch.logaddexp(log_p + math.log(beta), log_q + math.log1p(-beta))  # p and q may both underflow
    return beta * p * (log_p - mixture) + (1 - beta) * q * (log_q - mixture)


KINDS: dict[str, SampledLoss | None] = {"policy_gradient": policy_gradient, "divergence": None}  # None: see head_loss


def register(kind: str, loss: SampledLoss) -> None:
    """Adds a kind: `loss(logp [c], inputs)` gives each row's loss [c] and figures. Raises `ValueError` if it exists."""
    if kind in KINDS:
        raise ValueError(f"term kind {kind!r} exists already")
    KINDS[kind] = loss
