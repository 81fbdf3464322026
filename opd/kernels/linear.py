"""Losses over the vocabulary from hidden states and head weights: logits exist a chunk at a time, and their gradients in the
chunk's place, so that nothing of size [N, V] is ever held.

`linear_reverse_kl` compares the student with a teacher, known by its own hidden states, by its most likely tokens or by
its log-prob of the sampled token. `linear_gather_logprob` gives log-probs at a few ids. Two modes: `fused` forms all
gradients in the forward pass, for losses that are final; `recompute` keeps a few floats a row and computes the logits a
second time in the backward pass, for any upstream gradient.

Shape legend: N rows, H and T hidden sizes of student and teacher, V columns in use, M or K ids a row. Everything after the
products is computed in fp32 (float64 where the hidden states are), whatever the ambient autocast.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from opd.kernels.blocks import accumulator
from opd.kernels.checks import MODES, check_choice, check_divergence, check_shape, check_temperature
from opd.kernels.chunks import chunk_rows, default_bytes, row_chunks
from opd.kernels.head import OutputHead
from opd.kernels.linear_autograd import Chunked, ChunkedDivergence, ChunkedGather, Upstream
from opd.kernels.partials import RowStats
from opd.kernels.topk import OUTSIDE, topk_divergence

Values = Callable[[Tensor, slice], Tensor]  # the divergence [c] of some rows from log-probs [c, M]


class TeacherStates(NamedTuple):
    """The teacher's last hidden states and its head: its whole distribution."""

    hidden: Tensor  # [N, T]
    head: OutputHead


class TeacherTopK(NamedTuple):
    """The teacher's log-probs of its K most likely tokens, at the temperature of the loss."""

    ids: Tensor  # [N, K] int; -1 where absent, each named once
    logps: Tensor  # [N, K]
    tail: Tensor  # [N] its mass outside them
    outside: str = "tail"  # see `opd.kernels.topk.topk_divergence`


class TeacherSampled(NamedTuple):
    """The teacher's log-prob of the token that the student sampled, at the temperature of the loss."""

    ids: Tensor  # [N] int
    logps: Tensor  # [N]


Teacher = TeacherStates | TeacherTopK | TeacherSampled


class LinearLoss(NamedTuple):
    """`rows` carry a gradient with `mode="recompute"` alone."""

    loss: Tensor  # scalar: sum of weight * rows
    rows: Tensor  # [N] divergence in nats; 0 where the weight is


class LinearGathered(NamedTuple):
    """Of each row; 0 outside the mask."""

    logp: Tensor  # [N, M] natural log; 0 where the id is -1
    entropy: Tensor  # [N] nats
    lse: Tensor  # [N] log of the sum of the exponentials
    loss: Tensor | None  # scalar, with `mode="fused"`: sum of grad_logp * logp and of grad_entropy * entropy


def linear_reverse_kl(
    hidden: Tensor,
    head: OutputHead,
    teacher: Teacher,
    weight: Tensor | None = None,
    *,
    kind: str = "reverse_kl",
    beta: float = 0.5,
    temperature: float = 1.0,
    vocab: int | None = None,
    mode: str = "fused",
    max_bytes: int | None = None,
) -> LinearLoss:
    """Sum of weight [N] * divergence from the student to the teacher, in nats, of the rows of `hidden` [N, H].

    Differentiable in `hidden` and in the weight and bias of `head`. `kind`: `reverse_kl`, `forward_kl`, or `jsd` with
    `beta`, the teacher's share of the mixture. From `TeacherSampled` the reverse KL is estimated: log q - log p of the
    sampled token, with the gradient of its detached value times log q. Both models' logits are divided by `temperature`;
    columns from `vocab` on (by default those that only one of the two heads has) are padding. Rows of weight 0 are never
    multiplied. `max_bytes` bounds a chunk of logits; the student's and the teacher's exist at once. The gradients of
    `fused` can be taken once.

    Raises `ValueError` for shapes that do not agree, and for unknown or impossible options.
    """
    columns = _check_teacher(hidden, head, teacher, kind, beta)
    vocab = _check_options(vocab, columns, temperature, mode, max_bytes)
    check_shape("weight", weight, hidden.shape[:1])
    num_rows, keep = len(hidden), None if weight is None else _kept(weight != 0)
    weights = torch.ones(num_rows, device=hidden.device) if weight is None else weight.detach()
    weights = _rows(weights, keep).to(accumulator(hidden))
    hidden, teacher = _rows(hidden, keep), teacher._make(_rows(_detached(value), keep) for value in teacher)
    common = _common(hidden, head, vocab, temperature, max_bytes)
    values: Values | None = None
    if isinstance(teacher, TeacherStates):
        states, teacher_head = teacher
        job: Chunked = ChunkedDivergence(
            **common, teacher=states, teacher_head=teacher_head, weight=weights, how=(kind, beta)
        )
    else:
        values = _values(teacher, kind, beta)
        ids = teacher.ids[:, None] if isinstance(teacher, TeacherSampled) else teacher.ids
        job = ChunkedGather(**common, ids=ids, upstream=_upstream_of(values, weights), dtype=weights.dtype)
    fused = job.fused_loss(hidden) if mode == "fused" and any(job.want) else None
    rows, *_ = job.recomputed(hidden) if fused is None else job.outputs()
    rows = rows if values is None else values(rows, slice(None))
    return LinearLoss((weights * rows).sum() if fused is None else fused, _whole(rows, keep, num_rows))


def linear_gather_logprob(
    hidden: Tensor,
    head: OutputHead,
    ids: Tensor,
    mask: Tensor | None = None,
    *,
    temperature: float = 1.0,
    vocab: int | None = None,
    mode: str = "recompute",
    grad_logp: Tensor | None = None,
    grad_entropy: Tensor | None = None,
    max_bytes: int | None = None,
) -> LinearGathered:
    """Log-probs of `ids` [N, M] (-1 where absent) with entropy and log-sum-exp of the rows of `hidden` [N, H].

    With `recompute` all three are differentiable in `hidden` and in the weight and bias of `head`. With `fused` the
    gradients that log-probs [N, M] and entropy [N] will get are given beforehand, and `loss` alone is differentiable, once.
    Rows outside `mask` [N] are never multiplied. The other options: `linear_reverse_kl`.

    Raises `ValueError` for shapes that do not agree, and for unknown or impossible options.
    """
    vocab = _check_options(vocab, _columns("hidden", hidden, head), temperature, mode, max_bytes)
    if ids.ndim != 2:
        raise ValueError(f"ids: a matrix with a row for each of {len(hidden)}, not {tuple(ids.shape)}")
    check_shape("ids", ids, (len(hidden), ids.shape[1]))
    check_shape("mask", mask, hidden.shape[:1])
    check_shape("grad_logp", grad_logp, ids.shape)
    check_shape("grad_entropy", grad_entropy, hidden.shape[:1])
    if (grad_logp is None and grad_entropy is None) == (mode == "fused"):
        raise ValueError("grad_logp, grad_entropy: one of them or both with mode='fused', and with it alone")
    num_rows, keep = len(hidden), None if mask is None else _kept(mask)
    hidden, ids = _rows(hidden, keep), _rows(ids, keep)
    by_logp, by_entropy = (
        None if grad is None else _rows(grad.detach(), keep).to(accumulator(hidden)) for grad in (grad_logp, grad_entropy)
    )
    common = _common(hidden, head, vocab, temperature, max_bytes)
    job = ChunkedGather(**common, ids=ids, upstream=_upstream_given(by_logp, by_entropy), dtype=accumulator(hidden))
    loss = job.fused_loss(hidden) if mode == "fused" and any(job.want) else None
    outputs = job.recomputed(hidden) if loss is None else job.outputs()
    if mode == "fused" and loss is None:
        loss = _weighed(outputs[0], outputs[1], by_logp, by_entropy)
    return LinearGathered(*(_whole(output, keep, num_rows) for output in outputs), loss=loss)


def _common(hidden: Tensor, head: OutputHead, vocab: int, temperature: float, max_bytes: int | None) -> dict[str, Any]:
    """The fields of `Chunked`."""
    size = hidden.element_size()
    max_bytes = default_bytes(hidden.device, vocab, size) if max_bytes is None else max_bytes
    chunks = row_chunks(len(hidden), chunk_rows(max_bytes, vocab, size))
    leaves = (hidden, head.weight, head.bias)
    want = tuple(torch.is_grad_enabled() and leaf is not None and leaf.requires_grad for leaf in leaves)
    return {"head": head, "vocab": vocab, "temperature": temperature, "chunks": chunks, "want": want}


def _values(teacher: TeacherTopK | TeacherSampled, kind: str, beta: float) -> Values:
    if isinstance(teacher, TeacherTopK):
        ids, logps, tail, outside = teacher

        def topk(logp: Tensor, rows: slice) -> Tensor:
            target = logps[rows].to(logp.dtype), tail[rows].to(logp.dtype), ids[rows] >= 0
            return topk_divergence(logp, *target, outside=outside, kind=kind, beta=beta)

        return topk

    def sampled(logp: Tensor, rows: slice) -> Tensor:
        own = logp[:, 0]
        advantage = own.detach() - teacher.logps[rows].to(logp.dtype)
        loss = advantage + advantage * (own - own.detach())  # the first summand is the value, the second the gradient
        return loss * (teacher.ids[rows] >= 0)

    return sampled


def _upstream_of(values: Values, weight: Tensor) -> Upstream:
    def upstream(stats: RowStats, rows: slice) -> tuple[Tensor, Tensor, None]:
        with torch.enable_grad():
            logp = stats.logp.detach().requires_grad_()
            loss = (weight[rows] * values(logp, rows)).sum()
        (grad,) = torch.autograd.grad(loss, logp)
        return loss.detach(), grad, None

    return upstream


def _upstream_given(grad_logp: Tensor | None, grad_entropy: Tensor | None) -> Upstream:
    def upstream(stats: RowStats, rows: slice) -> tuple[Tensor, Tensor, Tensor | None]:
        by_logp, by_entropy = (None if grad is None else grad[rows] for grad in (grad_logp, grad_entropy))
        loss = _weighed(stats.logp, stats.entropy, by_logp, by_entropy)
        return loss, torch.zeros_like(stats.logp) if by_logp is None else by_logp, by_entropy

    return upstream


def _weighed(logp: Tensor, entropy: Tensor, grad_logp: Tensor | None, grad_entropy: Tensor | None) -> Tensor:
    pairs = (grad_logp, logp), (grad_entropy, entropy)
    return torch.stack([(grad * value).sum() for grad, value in pairs if grad is not None]).sum()


def _kept(live: Tensor) -> Tensor | None:
    """Indices of the live rows; None where that is all of them."""
    keep = live.nonzero()[:, 0]
    return None if len(keep) == len(live) else keep


def _rows(value: Any, keep: Tensor | None) -> Any:
    return value.index_select(0, keep) if isinstance(value, Tensor) and keep is not None else value


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _whole(value: Tensor, keep: Tensor | None, num_rows: int) -> Tensor:
    return value if keep is None else value.new_zeros(num_rows, *value.shape[1:]).index_copy(0, keep, value)


def _check_teacher(hidden: Tensor, head: OutputHead, teacher: Teacher, kind: str, beta: float) -> int:
    """Columns that both sides have. Raises `ValueError`."""
    columns = _columns("hidden", hidden, head)
    check_divergence(kind, beta)
    if isinstance(teacher, TeacherStates):
        check_shape("teacher.hidden", teacher.hidden, (len(hidden), *teacher.hidden.shape[1:2]))
        return min(columns, _columns("teacher.hidden", *teacher))
    columns_of_ids = teacher.ids.shape[1:2] if isinstance(teacher, TeacherTopK) else ()
    check_shape("teacher.ids", teacher.ids, (len(hidden), *columns_of_ids))
    check_shape("teacher.logps", teacher.logps, teacher.ids.shape)
    if isinstance(teacher, TeacherTopK):
        check_shape("teacher.tail", teacher.tail, hidden.shape[:1])
        check_choice("teacher.outside", teacher.outside, OUTSIDE)
    elif kind != "reverse_kl":
        raise ValueError(f"kind: reverse_kl from a sampled token, not {kind}: that needs more of the teacher's distribution")
    return columns


def _columns(name: str, hidden: Tensor, head: OutputHead) -> int:
    """Of the head's logits. Raises `ValueError`."""
    if hidden.ndim != 2:
        raise ValueError(f"{name}: a matrix, not {tuple(hidden.shape)}")
    if head.weight is None:
        return hidden.shape[1]
    check_shape(f"the weight of the head of {name}", head.weight, (len(head.weight), hidden.shape[1]))
    check_shape(f"the bias of the head of {name}", head.bias, head.weight.shape[:1])
    return len(head.weight)


def _check_options(vocab: int | None, columns: int, temperature: float, mode: str, max_bytes: int | None) -> int:
    """Columns in use. Raises `ValueError`."""
    check_choice("mode", mode, MODES)
    check_temperature(temperature)
    if max_bytes is not None and not (isinstance(max_bytes, int) and max_bytes >= 1):
        raise ValueError(f"max_bytes: a whole number, at least 1, not {max_bytes}")
    if vocab is not None and not 1 <= vocab <= columns:
        raise ValueError(f"vocab: between 1 and {columns}, not {vocab}")
    return columns if vocab is None else vocab
