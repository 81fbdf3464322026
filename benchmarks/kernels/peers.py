"""Other implementations of the losses: plain torch, Liger as released, and TRL's way as its code is described.

Each function returns a call without arguments: of the loss, a scalar, or of the log-probs [N, 1] for `gather`.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from benchmarks.kernels.cases import Case, Inputs

Call = Callable[[], Tensor]
TRL_CHUNK, TRL_ROWS = 256, 512
MIN_TAIL = 1e-7


def plain(case: Case, inputs: Inputs, dtype: torch.dtype = torch.float32, rounded: torch.dtype | None = None) -> Call:
    """log_softmax in fp32 and kl_div over whole matrices. In float64 from float64 inputs, with a head's logits `rounded`
    once to the type that every provider has them in, it is the reference of all errors."""

    def product(hidden: Tensor, head: Tensor) -> Tensor:
        logits = hidden @ head.t()
        return logits if rounded is None else logits + (logits.to(rounded) - logits).detach()

    def logits() -> tuple[Tensor, Tensor]:
        assert inputs.teacher is not None
        if inputs.head is None:
            return inputs.leaves[0], inputs.teacher
        assert inputs.teacher_head is not None
        return product(inputs.leaves[0], _head(inputs)), product(inputs.teacher, inputs.teacher_head)

    if case.kind in ("logits", "linear"):
        return lambda: (_rows(*logits(), dtype) * inputs.weight).sum()
    if case.kind == "gather":
        return lambda: _log_probs(inputs, dtype)
    return lambda: (_topk_rows(inputs, dtype) * inputs.weight).sum()


def compiled(case: Case, inputs: Inputs) -> Call:
    """`plain` through torch.compile."""
    return torch.compile(plain(case, inputs), dynamic=False)


def trl(case: Case, inputs: Inputs) -> Call:
    """`linear`: checkpointed chunks of 256 tokens, both heads' logits in fp32. `gather`: log_softmax in the type of the
    logits, 512 rows at a time; on CUDA TRL has a Triton kernel of its own, which is not this."""
    if case.kind == "gather":
        return lambda: _log_probs(inputs, getattr(torch, case.dtype), TRL_ROWS)

    def chunk(hidden: Tensor, head: Tensor, teacher: Tensor, weight: Tensor) -> Tensor:
        assert inputs.teacher_head is not None
        with torch.no_grad():
            targets = (teacher @ inputs.teacher_head.t()).float()
        return (_rows((hidden @ head.t()).float(), targets, torch.float32) * weight).sum()

    def call() -> Tensor:
        assert inputs.teacher is not None
        head, loss = _head(inputs), torch.zeros((), device=inputs.weight.device)
        parts = zip(*(value.split(TRL_CHUNK) for value in (inputs.leaves[0], inputs.teacher, inputs.weight)))
        for hidden, teacher, weight in parts:
            loss = loss + checkpoint(chunk, hidden, head, teacher, weight, use_reentrant=False)
        return loss

    return call


def liger(case: Case, inputs: Inputs, chunk: int, compiled: bool) -> Call:
    """LigerFusedLinearJSDLoss with beta 1, the reverse KL, and no hard loss. Masked rows have the label that it ignores."""
    from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss  # type: ignore[import-not-found]

    loss = LigerFusedLinearJSDLoss(weight_hard_loss=0.0, weight_soft_loss=1.0, beta=1.0, compiled=compiled, chunk_size=chunk)
    labels = torch.where(inputs.weight > 0, 0, -100)
    return lambda: loss(inputs.leaves[0], _head(inputs), inputs.teacher, inputs.teacher_head, labels)


def liger_triton(case: Case, inputs: Inputs) -> Call:
    """LigerFusedLinearJSD, its Triton kernel; CUDA only."""
    from liger_kernel.transformers import LigerFusedLinearJSD  # type: ignore[import-not-found]

    loss = LigerFusedLinearJSD(jsd_beta=1.0)
    labels = torch.where(inputs.weight > 0, 0, -100)
    return lambda: loss(inputs.leaves[0], _head(inputs), inputs.teacher, inputs.teacher_head, labels)


def _head(inputs: Inputs) -> Tensor:
    assert inputs.head is not None
    return inputs.head


def _rows(student: Tensor, teacher: Tensor, dtype: torch.dtype) -> Tensor:
    """Reverse KL of each row, in nats."""
    log_q, log_p = (F.log_softmax(logits, -1, dtype=dtype) for logits in (student, teacher))
    return F.kl_div(log_p, log_q, reduction="none", log_target=True).sum(-1)


def _log_probs(inputs: Inputs, dtype: torch.dtype, rows: int | None = None) -> Tensor:
    assert inputs.ids is not None
    logits = inputs.leaves[0]
    parts = zip(logits.split(rows or len(logits)), inputs.ids.split(rows or len(logits)))
    return torch.cat([F.log_softmax(part, -1, dtype=dtype).gather(-1, ids) for part, ids in parts])


def _topk_rows(inputs: Inputs, dtype: torch.dtype) -> Tensor:
    """Reverse KL over the K tokens and the rest as one more token."""
    assert inputs.ids is not None
    assert inputs.logps is not None
    assert inputs.tail is not None
    log_q = F.log_softmax(inputs.leaves[0], -1, dtype=dtype).gather(-1, inputs.ids)
    q_tail = (1 - log_q.exp().sum(-1)).clamp(min=MIN_TAIL)
    over_tail = q_tail * (q_tail.log() - inputs.tail.clamp(min=MIN_TAIL).log())
    return (log_q.exp() * (log_q - inputs.logps)).sum(-1) + over_tail
