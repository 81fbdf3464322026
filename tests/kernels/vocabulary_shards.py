"""One of several processes that hold the vocabulary together: what it gets for its columns goes to a file.

python vocabulary_shards.py FOLDER RANK PROCESSES
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from opd.kernels.head import LogitForm
from opd.kernels.parallel import parallel_divergence, parallel_gather_logprob


def main() -> None:
    folder, rank, processes = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=processes)
    cases = torch.load(folder / "cases.pt", weights_only=True)
    torch.save([answer(case, rank) for case in cases], folder / f"answers-{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def answer(case: dict, rank: int) -> list[torch.Tensor]:
    """The outputs, and the gradient of these columns."""
    edges = case["edges"]
    columns = slice(edges[rank], edges[rank + 1])
    student = case["student"][:, columns].clone().requires_grad_()
    forms = [LogitForm(*form) for form in case["forms"]]
    if case["kind"] == "gather":
        outputs = list(parallel_gather_logprob(student, case["ids"], columns.start, form=forms[0]))
    else:
        options = {"kind": case["kind"], "beta": case["beta"], "student_form": forms[0], "teacher_form": forms[1]}
        outputs = [parallel_divergence(student, case["teacher"][:, columns], case["weight"], **options)]
    torch.autograd.backward(outputs, case["upstream"])
    assert student.grad is not None
    return [output.detach() for output in outputs] + [student.grad]


main()
