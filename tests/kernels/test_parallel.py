"""A vocabulary split between two processes gives what one process has, figures and gradients alike."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from opd.kernels import gather_logprob
from opd.kernels.divergence import divergence
from opd.kernels.head import LogitForm

VOCAB, N = 1000, 6
FORMS = [((1.0, None), (1.0, None)), ((1 / 0.7, 5.0), (0.5, None)), ((1 / 0.7, None), (1 / 0.7, None))]


def cases() -> list[dict]:
    """Divergences and log-probs, in shards of equal and of very unequal size, some masses in one shard alone."""
    generator = torch.Generator().manual_seed(0)
    found = []
    unlike = (0.0, FORMS[0]), (0.0, FORMS[1]), (0.0, FORMS[2]), (1e4, FORMS[0])  # a soft cap leaves nothing of an offset
    for shift, forms in unlike:
        for edges in ([0, 500, 1000], [0, 1, 1000]):
            student, teacher = (3 * torch.randn(N, VOCAB, generator=generator) for _ in range(2))
            student[0, 7] += 60  # all its mass lies with one process
            teacher[1, 990] += 60
            teacher[2] = student[2] + 1e-3 * teacher[2]
            common = {"student": student + shift, "teacher": teacher - shift, "forms": forms, "edges": edges}
            common |= {"weight": torch.tensor([1.0, 0.5, 1.0, 0.0, -2.0, 1.0])}
            for kind, beta in (("reverse_kl", 0.5), ("forward_kl", 0.5), ("jsd", 0.3)):
                upstream = [torch.randn(N, generator=generator)]
                found.append({**common, "kind": kind, "beta": beta, "upstream": upstream})
            ids = torch.tensor([[0, 999, -1, 5, 5]]).expand(N, 5).clone()
            upstream = [torch.randn(shape, generator=generator) for shape in ((N, 5), (N,), (N,))]
            found.append({**common, "kind": "gather", "ids": ids, "upstream": upstream})
    return found


def alone(case: dict) -> list[torch.Tensor]:
    student = case["student"].clone().requires_grad_()
    forms = [LogitForm(*form) for form in case["forms"]]
    if case["kind"] == "gather":
        outputs = list(gather_logprob(student, case["ids"], form=forms[0]))
    else:
        options = {"kind": case["kind"], "beta": case["beta"], "student_form": forms[0], "teacher_form": forms[1]}
        outputs = [divergence(student, case["teacher"], case["weight"], **options)]
    torch.autograd.backward(outputs, case["upstream"])
    assert student.grad is not None
    return [output.detach() for output in outputs] + [student.grad]


@pytest.fixture(scope="module")
def answers(tmp_path_factory) -> list[list[list[torch.Tensor]]]:
    """By process and case."""
    folder = tmp_path_factory.mktemp("shards")
    torch.save(cases(), folder / "cases.pt")
    script = Path(__file__).with_name("vocabulary_shards.py")
    command = [sys.executable, str(script), str(folder)]
    running = [subprocess.Popen([*command, str(rank), "2"], stderr=subprocess.PIPE, text=True) for rank in range(2)]
    for process in running:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
    return [torch.load(folder / f"answers-{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.mark.parametrize("number", range(len(cases())))
def test_shards_give_what_one_process_has(answers, number):
    case, (first, second) = cases()[number], (by_process[number] for by_process in answers)
    *outputs, gradient = alone(case)
    for ours, theirs, one in zip(first, second, outputs):
        assert torch.equal(ours, theirs)  # all processes have the same figures
        torch.testing.assert_close(ours, one, rtol=2e-6, atol=2e-6)
    both = torch.cat([first[-1], second[-1]], dim=1)
    rounding = 1e-7 if case["kind"] == "jsd" else 0.0  # see test_divergence.py
    torch.testing.assert_close(both, gradient, rtol=0, atol=4e-6 * float(gradient.abs().max()) + rounding)
    assert gradient.any()
    if case["kind"] != "gather" and case["forms"] != FORMS[1] and float(case["student"].amax()) < 1e3:
        near = 2  # a row whose models are close keeps its digits, too
        torch.testing.assert_close(both[near], gradient[near], rtol=0, atol=2e-6 * float(gradient[near].abs().max()))
