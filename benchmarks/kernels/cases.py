"""What is measured: shapes, random inputs, and the least work that each case takes.

Shape legend: N rows (tokens), V columns of the vocabulary, H hidden size, K a teacher's ids a row.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

Kind = Literal["logits", "linear", "gather", "topk"]


@dataclass(frozen=True)
class Case:
    """`logits`: reverse KL from two matrices of logits. `linear`: from hidden states and heads. `gather`: log-probs of
    sampled ids, without gradients. `topk`: reverse KL to a teacher's K log-probs and the mass of the rest."""

    name: str
    kind: Kind
    rows: int
    vocab: int
    dtype: str = "bfloat16"
    hidden: int = 0
    teacher_hidden: int = 0
    trained: bool = False  # whether the head has a gradient
    masked: bool = False  # every other row does not count
    k: int = 0

    @property
    def live_rows(self) -> int:
        return self.rows // 2 if self.masked else self.rows

    def tiny(self) -> "Case":
        """The same call at a size that only loads the libraries."""
        size = {"hidden": min(self.hidden, 64), "teacher_hidden": min(self.teacher_hidden, 64), "k": min(self.k, 4)}
        return replace(self, rows=min(self.rows, 4), vocab=min(self.vocab, 256), **size)


@dataclass(frozen=True)
class Inputs:
    """Tensors of a case; those of other kinds are None. `leaves` are differentiated."""

    leaves: tuple[Tensor, ...]  # student's logits [N, V], or hidden states [N, H] and perhaps the head [V, H]
    weight: Tensor  # [N] fp32: one over the number of rows that count, 0 in others
    head: Tensor | None = None  # [V, H], one of the leaves where it is trained
    teacher: Tensor | None = None  # logits [N, V] or hidden states [N, H_teacher]
    teacher_head: Tensor | None = None  # [V, H_teacher]
    ids: Tensor | None = None  # [N, 1] sampled or [N, K] the teacher's
    logps: Tensor | None = None  # [N, K] fp32
    tail: Tensor | None = None  # [N] fp32, the teacher's mass beside its K ids


@dataclass(frozen=True)
class Work:
    """The least that a case takes on any implementation."""

    flop: float
    bytes: float
    exps: float


def make_inputs(case: Case, device: str, seed: int = 0) -> Inputs:
    """Random inputs: logits of standard deviation 2, as far apart as two models that never met."""
    torch.manual_seed(seed)
    dtype, n, vocab = getattr(torch, case.dtype), case.rows, case.vocab

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*shape, device=device).mul_(scale).to(dtype)

    live = torch.arange(n, device=device) % 2 == 0 if case.masked else torch.ones(n, device=device, dtype=torch.bool)
    weight = live / live.sum()
    if case.kind == "linear":
        hidden, head = normal(n, case.hidden).requires_grad_(), normal(vocab, case.hidden, scale=2 * case.hidden**-0.5)
        teacher_head = normal(vocab, case.teacher_hidden, scale=2 * case.teacher_hidden**-0.5)
        leaves = (hidden, head.requires_grad_()) if case.trained else (hidden,)
        return Inputs(leaves, weight, head, normal(n, case.teacher_hidden), teacher_head)
    logits = normal(n, vocab, scale=2.0)
    if case.kind == "logits":
        return Inputs((logits.requires_grad_(),), weight, teacher=normal(n, vocab, scale=2.0))
    if case.kind == "gather":
        return Inputs((logits,), weight, ids=torch.randint(vocab, (n, 1), device=device))
    first = torch.randint(vocab, (n, 1), device=device)
    ids = (first + torch.arange(case.k, device=device) * (vocab // case.k)) % vocab  # distinct
    logps = torch.log_softmax(torch.randn(n, case.k + 1, device=device) * 2, -1)
    return Inputs((logits.requires_grad_(),), weight, ids=ids, logps=logps[:, :-1].contiguous(), tail=logps[:, -1].exp())


def take(case: Case, inputs: Inputs, rows: Tensor, dtype: torch.dtype | None = None) -> Inputs:
    """Copies of the inputs at some rows, all of which count; floating values in another type where one is given."""

    def copied(value: Tensor | None, index: Tensor | slice) -> Tensor | None:
        if value is None:
            return None
        part = value.detach()[index]
        return part.to(dtype) if dtype is not None and part.is_floating_point() else part.clone()

    everything = slice(None)
    head = copied(inputs.head, everything)
    first = copied(inputs.leaves[0], rows)
    assert first is not None
    leaves = (first, head) if head is not None and case.trained else (first,)
    if case.kind != "gather":
        for leaf in leaves:
            leaf.requires_grad_()
    weight = torch.full((len(rows),), 1 / len(rows), device=first.device, dtype=dtype or torch.float32)
    teacher_head = copied(inputs.teacher_head, everything)
    by_row = (copied(value, rows) for value in (inputs.ids, inputs.logps, inputs.tail))
    return Inputs(leaves, weight, head, copied(inputs.teacher, rows), teacher_head, *by_row)


def least_work(case: Case, device: str) -> Work:
    """See the package's docstring."""
    n, vocab, size = case.live_rows, case.vocab, getattr(torch, case.dtype).itemsize
    entries = n * vocab
    if case.kind == "gather":
        return Work(0, entries * size, entries)
    again = 0 if device == "cpu" else 1
    if case.kind == "topk":
        return Work(0, entries * size * (2 + again), entries)
    if case.kind == "logits":
        return Work(0, entries * size * (3 + 2 * again), 2 * entries)
    both, own = case.hidden + case.teacher_hidden, case.hidden
    flop = 2 * entries * (both + own + (own if case.trained else 0))
    moved = (vocab + n) * both + n * own + (vocab * own if case.trained else 0)
    return Work(flop, moved * size, 2 * entries)


def cpu_cases() -> dict[str, tuple[Case, ...]]:
    """Suites at sizes that two cores do in a second."""
    qwen, frozen = 151_936, Case("linear frozen", "linear", 512, 151_936, hidden=896, teacher_hidden=896)
    trained = Case("linear trained", "linear", 2048, 32_768, hidden=1024, teacher_hidden=1024, trained=True)
    return {
        "logits": (
            Case("logits bf16", "logits", 512, qwen),
            Case("logits fp32", "logits", 2048, 32_768, "float32"),
        ),
        "linear": (frozen, trained),
        "masked": (replace(frozen, name="linear frozen, half masked", masked=True),),
        "gather": (Case("gather", "gather", 512, qwen),),
        "topk": (Case("top-64", "topk", 512, qwen, k=64),),
    }


def cuda_cases() -> dict[str, tuple[Case, ...]]:
    """Suites for one Hopper GPU; the first `linear` is the shape that Liger's own benchmark publishes."""
    qwen = 151_936
    return {
        "logits": tuple(Case(f"logits N={n}", "logits", n, qwen) for n in (64, 1024, 8192, 32_768)),
        "linear": (
            Case("linear 4096/4096", "linear", 8192, 128_256, hidden=4096, teacher_hidden=4096, trained=True),
            Case("linear 1024/4096", "linear", 8192, qwen, hidden=1024, teacher_hidden=4096, trained=True),
            Case("linear 2560/5120", "linear", 8192, qwen, hidden=2560, teacher_hidden=5120),
        ),
        "gather": (Case("gather", "gather", 8192, qwen),),
        "topk": (Case("top-64", "topk", 8192, qwen, k=64),),
    }


def small_cases() -> dict[str, tuple[Case, ...]]:
    """The CPU's suites at sizes for tests, with the same names."""
    shrunk = {"rows": 32, "vocab": 640}
    return {
        suite: tuple(
            replace(case, **shrunk, hidden=case.hidden // 16, teacher_hidden=case.teacher_hidden // 16, k=case.k // 8)
            for case in cases
        )
        for suite, cases in cpu_cases().items()
    }
