"""This toolkit's losses as the benchmark calls them."""

from typing import Any

from benchmarks.kernels.cases import Case, Inputs
from benchmarks.kernels.peers import Call
from opd.kernels.divergence import reverse_kl
from opd.kernels.gather import gather_logprob
from opd.kernels.head import OutputHead
from opd.kernels.linear import TeacherStates, linear_reverse_kl
from opd.kernels.topk import topk_reverse_kl


def build(case: Case, inputs: Inputs, mode: Any = None) -> Call:
    """`mode`: `fused` or `recompute`, where the loss has both."""
    given: Any = inputs  # what a case of its kind has is there
    first, *_ = given.leaves
    if case.kind == "logits":
        return lambda: reverse_kl(first, given.teacher, given.weight, mode=mode).sum()
    if case.kind == "gather":
        return lambda: gather_logprob(first, given.ids).logp
    if case.kind == "topk":
        return lambda: topk_reverse_kl(first, given.ids, given.logps, given.tail, given.weight).sum()
    head, teacher = OutputHead(given.head), TeacherStates(given.teacher, OutputHead(given.teacher_head))
    if mode == "fused":
        return lambda: linear_reverse_kl(first, head, teacher, given.weight).loss
    return lambda: (linear_reverse_kl(first, head, teacher, given.weight, mode=mode).rows * given.weight).sum()
