"""Term kind `penalty`: less of the tokens that a gate marks, held near a reference (NSD, arXiv 2609.11699).

Shape legend: c rows (sampled tokens). Log-probs are natural logs; all but the student's own are detached.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

MIN_COMPLEMENT = 1e-7  # of 1 - p in the unlikelihood, whose gradient would otherwise have no bound


def penalty(logp: Float[Tensor, " c"], inputs: Mapping[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """gate * push + alpha * pull of each sampled token, in nats (eq. 6); see `push` and `pull`.

    Inputs: `gate` [c], at least 0; `penalty`, the form of the push; `anchor`, that of the pull; `reference` [c], the
    reference's log-probs of the tokens; `alpha`; `importance_cap`, for `is_fkl`; `clamp`, the largest size of a token's loss
    or None: a loss beyond it is that size and has no gradient; `trust` or None: with several updates a batch a token whose
    probability has fallen below 1 - trust of what it was under `old_logps` [c] is dropped; `policy_gradient`: the loss is
    then no function of the student but a detached cost of the token, weighted by the ratio of the student to the policy that
    the batch began with (eq. 14). The gradient is then that of the ratio alone, so that a clamped cost keeps one, of the
    clamped size. Inputs `figure_NAME` [c] are averaged as the metric NAME.
    """
    pushed = inputs["gate"] * push(logp, inputs["penalty"])
    pulled = pull(logp, inputs)
    loss = pushed + inputs["alpha"] * pulled
    figures = {name.removeprefix("figure_"): rows for name, rows in inputs.items() if name.startswith("figure_")}
    figures |= {"gate": inputs["gate"], "gate_share": (inputs["gate"] > 0).float(), "penalty": pushed.detach()}
    if inputs["anchor"] != "none":
        figures["anchor"] = pulled.detach()
    if (limit := inputs["clamp"]) is not None:
        figures["penalty_clamped"] = (loss.detach().abs() > limit).float()
        loss = loss.clamp(-limit, limit)
    old = inputs.get("old_logps")
    log_ratio = logp - (logp.detach() if old is None else old)
    if inputs["policy_gradient"]:
        loss = loss.detach() * log_ratio.exp()
    if inputs["trust"] is not None and old is not None:
        fallen = log_ratio.detach() < math.log1p(-inputs["trust"])
        figures["trust_dropped"] = fallen.float()
        loss = loss.masked_fill(fallen, 0.0)
    return loss, figures


def push(logp: Float[Tensor, " c"], form: str) -> Float[Tensor, " c"]:
    """What lowers p: `unlikelihood`, -log(1 - p), or `bounded`, its sigmoid 1 / (2 - p).

    The gradient on the token's logit is p, or p (1 - p) / (2 - p)^2: at most 1/8, and none at either end.
    """
    p = logp.exp()
    if form == "bounded":
        return 1 / (2 - p)
    likely = (-torch.expm1(logp)).clamp(min=MIN_COMPLEMENT).log()  # either form loses the digits that the other keeps
    return -torch.where(p > 0.5, likely, torch.log1p(-p.clamp(max=0.5)))


def pull(logp: Float[Tensor, " c"], inputs: Mapping[str, Any]) -> Float[Tensor, " c"]:
    """How far the token is from the reference, by `anchor`.

    `pointwise_fkl`: p_ref log(p_ref / p), which is eq. 4 and no estimate of a KL divergence: under samples of the student
    its gradient is that of a reward p_ref, also at the reference itself. `is_fkl`: log(p_ref / p) weighted by the detached
    ratio p_ref / p, cut off at `importance_cap`; its gradient is that of the forward KL. `k2_reverse`: half the square of
    log(p / p_ref), with the gradient of the reverse KL. `k1`: log(p / p_ref), a cost for the policy gradient alone, where
    it is the reverse KL; as a loss its expected gradient is zero. `none`: 0.
    """
    reference, anchor = inputs["reference"], inputs["anchor"]
    gap = reference - logp
    if anchor == "pointwise_fkl":
        return reference.exp() * gap
    if anchor == "is_fkl":
        return gap.detach().exp().clamp(max=inputs["importance_cap"]) * gap
    if anchor == "k2_reverse":
        return gap.square() / 2
    if anchor == "k1":
        return -gap
    assert anchor == "none"
    return torch.zeros_like(gap)
