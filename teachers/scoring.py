"""From last hidden states to what a request wants: pure functions on tensors.

Logits exist for one chunk of rows at a time. Shape legend: n tokens, c rows of a chunk, H hidden size, V ids in
use, m ids asked about and k of the model's own in a row, K = m + k.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from opd.kernels.chunks import chunk_rows, logits_buffer, row_chunks
from opd.kernels.gather import gather_stats
from opd.kernels.head import LogitForm, OutputHead


class Reading(NamedTuple):
    """What some rows of states say."""

    logps: Tensor  # [n] fp32, of the tokens
    ids: Tensor  # [n, K] int64: those asked about, then the most likely ones; -1 where absent or mentioned before
    topk_logps: Tensor  # [n, K] fp32, 0 where the id is -1
    tail: Tensor  # [n] fp32, the probability outside `ids`
    num_floored: Tensor  # [n] int64, log-probs of the row raised to the floor


def read_states(
    states: Float[Tensor, "n H"],
    head: OutputHead,
    token_ids: Int[Tensor, "n"],
    asked: Int[Tensor, "n m"],
    *,
    k: int,
    vocab: int,
    temperature: float,
    logp_floor: float,
    chunk_bytes: int,
) -> Reading:
    """Log-probs of softmax(logits / temperature) over the head's first `vocab` rows, `chunk_bytes` of logits at a time."""
    dtype = states.dtype if head.weight is None else head.weight.dtype
    chunks = row_chunks(len(states), chunk_rows(chunk_bytes, vocab, dtype.itemsize)) or [slice(0, 0)]
    buffer, form = logits_buffer(chunks, vocab, dtype, states.device), head.form(temperature)
    parts = []
    for rows in chunks:
        logits = head.raw(states[rows], vocab, out=buffer[: rows.stop - rows.start])
        parts.append(read_logits(logits, token_ids[rows], asked[rows], k, form, logp_floor))
    logps, ids, topk_logps, tail, num_floored = map(torch.cat, zip(*parts))
    return Reading(logps, ids, topk_logps, tail, num_floored)


def read_logits(
    logits: Float[Tensor, "c V"],
    token_ids: Int[Tensor, "c"],
    asked: Int[Tensor, "c m"],
    k: int,
    form: LogitForm,
    logp_floor: float,
) -> Reading:
    """The same of one chunk, from its raw logits."""
    top = logits.topk(min(k, logits.shape[1]), dim=-1).indices
    ids = torch.cat([asked, top], dim=1)
    logp = gather_stats(logits, torch.cat([token_ids[:, None], ids], dim=1), form).logp
    ids = mark_repeats(ids)
    present = ids >= 0
    tail = 1 - (logp[:, 1:].exp() * present).sum(-1)
    floored = logp.clamp(min=logp_floor)
    raised = floored != logp
    num_floored = raised[:, 0] + (raised[:, 1:] & present).sum(-1)
    return Reading(floored[:, 0], ids, floored[:, 1:].masked_fill(~present, 0.0), tail.clamp(min=0.0), num_floored)


def mark_repeats(ids: Int[Tensor, "c K"]) -> Int[Tensor, "c K"]:
    """`ids` with every second and later mention of an id in a row replaced by -1."""
    order = ids.sort(dim=-1, stable=True)
    repeated = torch.zeros_like(ids, dtype=torch.bool)
    repeated[:, 1:] = order.values[:, 1:] == order.values[:, :-1]
    return ids.masked_fill(torch.zeros_like(repeated).scatter_(-1, order.indices, repeated), -1)
