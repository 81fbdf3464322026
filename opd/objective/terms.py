"""The closed set of term kinds, as pure functions of the student's log-probs at a few ids of each row.

Shape legend: c rows (trainable tokens), K ids a row. Log-probs are natural logs under the current student; everything
else in `inputs` is detached. A function returns each row's loss, in nats, and figures [c] to be averaged as metrics.
Third parties register a function for a further kind of their own with `register`.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from opd.objective.penalty import penalty

Inputs = Mapping[str, Any]
Figures = dict[str, Tensor]
SampledLoss = Callable[[Tensor, Inputs], tuple[Tensor, Figures]]


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
