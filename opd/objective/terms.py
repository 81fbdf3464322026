"""The closed set of term kinds, as pure functions of the student's log-probs at a few ids of each row.

Shape legend: c rows (trainable tokens), K ids a row. Log-probs are natural logs under the current student; everything
else in `inputs` is detached. A function returns each row's loss, in nats, and figures [c] to be averaged as metrics.
Third parties register a function for a further kind of their own with `register`.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from opd.objective.penalty import penalty

Inputs = Mapping[str, Any]
Figures = dict[str, Tensor]
SampledLoss = Callable[[Tensor, Inputs], tuple[Tensor, Figures]]

MIN_TAIL = 1e-7  # fp32 cannot tell a smaller mass from the rounding of 1 - sum


def policy_gradient(logp: Float[Tensor, " c"], inputs: Inputs) -> tuple[Tensor, Figures]:
    """-ratio * (A - baseline) with a detached advantage A, pessimistically clipped as in PPO (arXiv 1707.06347, eq. 7).

    Inputs: those of `advantages` and `clipped`; `baseline`, 0 where absent; `ratio_clip` or None, and `ratio_clip_high`
    where it is another one above 1; `importance_cap` or None; `old_logps` [c], the trainer's under the policy that the batch
    began with; `sampler_logps` [c]. Inputs `teacher_NAME` [c] are a teacher's log-probs by which the figure
    `reverse_kl_NAME` is measured. `figure` is the name of the advantage among the figures, `advantage` where absent.
    """
    own, starts = logp.detach(), inputs.get("unit_starts")
    whole = advantages(own, inputs)
    advantage = clipped(whole, inputs)
    figures = {inputs.get("figure", "advantage"): whole}
    if inputs["advantage_clip"] is not None:
        figures["advantage_clipped"] = (advantage != whole).float()
    unit = own if starts is None else unit_means(own, starts)
    for name, teacher in inputs.items():
        if name.startswith("teacher_"):
            figures[name.replace("teacher_", "reverse_kl_", 1)] = unit - teacher
    if inputs.get("reference_coef"):
        figures["displacement"] = own - inputs["reference_logps"]
    advantage = advantage - inputs.get("baseline", 0.0)
    old = inputs.get("old_logps")
    ratio = (logp - (logp.detach() if old is None else old)).exp()
    gain = ratio * advantage
    if (low := inputs["ratio_clip"]) is not None:
        high = inputs.get("ratio_clip_high") or low
        bounded = ratio.clamp(1 - low, 1 + high) * advantage
        figures["ratio_clipped"] = (bounded < gain).float()
        gain = torch.minimum(gain, bounded)
    if inputs["importance_cap"] is not None:
        trainer = logp.detach() if old is None else old
        gain = gain * (trainer - inputs["sampler_logps"]).exp().clamp(max=inputs["importance_cap"])
    return -gain, figures


def advantages(logp: Float[Tensor, " c"], inputs: Inputs) -> Float[Tensor, " c"]:
    """reward - self_coef * log pi - unit_coef * (mean of log pi over the token's unit) + reference_coef * log pi_ref.

    Inputs: `reward` [c]; `self_coef`; `unit_coef` and `reference_coef`, 0 where absent; `unit_starts` [c] bool, the first
    token of each unit of tokens judged together (without it each token is one); `reference_logps` [c], of the student's
    frozen start.
    """
    advantage = inputs["reward"] - inputs["self_coef"] * logp
    if inputs.get("unit_coef"):
        starts = inputs.get("unit_starts")
        advantage = advantage - inputs["unit_coef"] * (logp if starts is None else unit_means(logp, starts))
    if inputs.get("reference_coef"):
        advantage = advantage + inputs["reference_coef"] * inputs["reference_logps"]
    return advantage


def clipped(advantage: Float[Tensor, " c"], inputs: Inputs) -> Float[Tensor, " c"]:
    """Within plus or minus `advantage_clip`, where that is not None."""
    limit = inputs["advantage_clip"]
    return advantage if limit is None else advantage.clamp(-limit, limit)


def unit_means(values: Float[Tensor, " c"], starts: Bool[Tensor, " c"]) -> Float[Tensor, " c"]:
    """Each row's mean over its unit; `starts` marks the units' first rows, the first row among them."""
    unit = starts.long().cumsum(0) - 1
    sums = values.new_zeros(len(values)).index_add_(0, unit, values)
    sizes = values.new_zeros(len(values)).index_add_(0, unit, torch.ones_like(values))
    return (sums / sizes.clamp(min=1))[unit]


def topk_divergence(log_q: Float[Tensor, "c K"], inputs: Inputs) -> Tensor:
    """Divergence over the K tokens of `target`, in nats.

    Inputs: `target_logps` [c, K], `target_tail` [c], `present` [c, K] bool, `tail` (tail | renormalise | truncate),
    `divergence` (reverse_kl | forward_kl | jsd), `beta`. `tail` adds the mass outside as one more token, so K = V is
    exact; `truncate` is the divergence of unnormalised measures, sum a log(a/b) - a + b, which is never negative. `unknown`
    [c, K] bool, where given, are tokens that the target does not have: log_q is conditioned on their not being drawn.
    """
    present, tail = inputs["present"], inputs["tail"]
    if (unknown := inputs.get("unknown")) is not None:
        known = 1 - (log_q.exp() * unknown).sum(-1, keepdim=True)
        log_q, present = log_q - known.clamp(min=MIN_TAIL).log(), present & ~unknown
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


KINDS: dict[str, SampledLoss | None] = {  # None: see head_loss
    "policy_gradient": policy_gradient,
    "penalty": penalty,
    "divergence": None,
}


def register(kind: str, loss: SampledLoss) -> None:
    """Adds a kind: `loss(logp [c], inputs)` gives each row's loss [c] and figures. Raises `ValueError` if it exists."""
    if kind in KINDS:
        raise ValueError(f"term kind {kind!r} exists already")
    KINDS[kind] = loss
