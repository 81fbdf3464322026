"""The loss of answers, without the logits of all their tokens at once, and examples laid end to end in one row.

Shape legend: T tokens of a row, N trained tokens, c rows of a chunk, H hidden size, V rows of the output head.
"""

from itertools import pairwise
from types import MethodType
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from opd.errors import UserError
from opd.kernels import OutputHead, linear_gather_logprob
from opd.models import decoder, last_states, output_head
from opd.records import Array

IGNORED = -100  # a label that is not trained


def answer_nll(
    hidden: Float[Tensor, "N H"], head: OutputHead, ids: Int[Tensor, " N"], chunk_bytes: int
) -> Float[Tensor, ""]:
    """Summed negative log-probs of `ids`, in nats, fp32, `chunk_bytes` of logits at a time.

    Under autocast the products have its type; the gradient of the head is added up in the type of the head.
    """
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind):
        hidden = hidden.to(torch.get_autocast_dtype(kind))
    minus = torch.full((len(ids), 1), -1.0, device=hidden.device)
    if not torch.is_grad_enabled():
        return -linear_gather_logprob(hidden, head, ids[:, None], max_bytes=chunk_bytes).logp.sum()
    loss = linear_gather_logprob(hidden, head, ids[:, None], mode="fused", grad_logp=minus, max_bytes=chunk_bytes).loss
    assert loss is not None
    return loss


def return_answer_nll(model: nn.Module, chunk_bytes: int) -> None:
    """Makes `model(input_ids, position_ids, labels)` [1, T] return {"loss": `answer_nll` of its labels}.

    In place of the whole forward pass, so that what wraps the model (DDP, FSDP, autocast, peft) works as ever.
    """
    base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]

    def forward(self: Any, input_ids: Tensor, position_ids: Tensor, labels: Tensor, **_: Any) -> dict[str, Tensor]:
        states = last_states(decoder(self)(input_ids=input_ids, position_ids=position_ids, use_cache=False))
        targets = labels[0, 1:]
        trained = (targets != IGNORED).nonzero()[:, 0]
        return {"loss": answer_nll(states[0, trained], output_head(self), targets[trained], chunk_bytes)}

    base.forward = MethodType(forward, base)


def pieces(batch: dict[str, Tensor], max_tokens: int) -> list[dict[str, Tensor]]:
    """A row [1, T] of whole examples, cut between examples into rows of at most `max_tokens` or one example."""
    position_ids = batch["position_ids"][0]
    starts = (position_ids == 0).nonzero()[:, 0].tolist()
    ends, first = [], 0
    for start, end in zip(starts, [*starts[1:], len(position_ids)]):
        if start > first and end - first > max_tokens:
            ends.append(start)
            first = start
    bounds = [0, *ends, len(position_ids)]
    return [{name: row[:, a:b] for name, row in batch.items()} for a, b in pairwise(bounds)]


@torch.no_grad()
def check_neighbours(model: nn.Module, ids: Array, precision: str) -> None:
    """Raises `UserError` for a model whose examples see those before them in a row, as with layers of a running state."""
    half = len(ids) // 2
    device = next(model.parameters()).device
    tokens = torch.as_tensor(ids, dtype=torch.long, device=device)[None, : 2 * half]
    positions = torch.arange(half, device=device)[None]
    layers, training = decoder(model), model.training
    model.eval()
    with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bfloat16"):
        packed = last_states(layers(input_ids=tokens, position_ids=positions.repeat(1, 2), use_cache=False))[:, half:]
        alone = last_states(layers(input_ids=tokens[:, half:], position_ids=positions, use_cache=False))
    model.train(training)
    rounding = 0.1 if precision == "bfloat16" or packed.dtype == torch.bfloat16 else 1e-3
    if (packed - alone).norm() > rounding * alone.norm():
        raise UserError(
            "packing: in this model, or with this student.attention, examples of one row see each other; set packing=false"
        )
