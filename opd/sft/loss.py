"""The loss of answers, without the logits of all their tokens at once, and examples laid end to end in one row.

Shape legend: T tokens of a row, N trained tokens, c rows of a chunk, H hidden size, V rows of the output head.
"""

from itertools import pairwise
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from opd.errors import UserError
from opd.models import OutputHead, decoder, output_head
from opd.records import Array

IGNORED = -100  # a label that is not trained


def answer_nll(
    hidden: Float[Tensor, "N H"], head: OutputHead, ids: Int[Tensor, " N"], chunk_bytes: int
) -> Float[Tensor, ""]:
    """Summed negative log-probs of `ids`, in nats, fp32. Logits are made anew in the backward pass, a chunk at a time.

    Under autocast the products have its type; the gradient of the head is added up in the type of the head.
    """
    kind = hidden.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype

    def chunk(states: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(kind, enabled=False):  # its cast of the weight would be one for all chunks, and so their sum
            logits = F.linear(states.to(dtype), head.weight.to(dtype)).float()
            return F.cross_entropy(logits * head.scale, targets, reduction="sum")

    size = max(1, chunk_bytes // (4 * head.weight.shape[0]))
    parts = zip(hidden.split(size), ids.split(size))
    return torch.stack([checkpoint(chunk, *part, use_reentrant=False) for part in parts]).sum()  # type: ignore[arg-type]


def return_answer_nll(model: nn.Module, chunk_bytes: int) -> None:
    """Makes `model(input_ids, position_ids, labels)` [1, T] return {"loss": `answer_nll` of its labels}.

    In place of the whole forward pass, so that what wraps the model (DDP, FSDP, autocast, peft) works as ever.
    """
    base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]

    def forward(self: Any, input_ids: Tensor, position_ids: Tensor, labels: Tensor, **_: Any) -> dict[str, Tensor]:
        states = decoder(self)(input_ids=input_ids, position_ids=position_ids, use_cache=False).last_hidden_state
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
    device = output_head(model).weight.device
    tokens = torch.as_tensor(ids, dtype=torch.long, device=device)[None, : 2 * half]
    positions = torch.arange(half, device=device)[None]
    layers, training = decoder(model), model.training
    model.eval()
    with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bfloat16"):
        packed = layers(input_ids=tokens, position_ids=positions.repeat(1, 2), use_cache=False).last_hidden_state[:, half:]
        alone = layers(input_ids=tokens[:, half:], position_ids=positions, use_cache=False).last_hidden_state
    model.train(training)
    rounding = 0.1 if precision == "bfloat16" or packed.dtype == torch.bfloat16 else 1e-3
    if (packed - alone).norm() > rounding * alone.norm():
        raise UserError(
            "packing: in this model, or with this student.attention, examples of one row see each other; set packing=false"
        )
