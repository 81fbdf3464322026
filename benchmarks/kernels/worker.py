"""One process of `benchmarks.kernels`: a provider's cases. Argument: the task as JSON. Prints a line of JSON a case."""

import json
import sys
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels.cases import Case, Inputs, make_inputs, take
from benchmarks.kernels.measuring import MIB, clear, device_seconds, peak_bytes, timed
from benchmarks.kernels.peers import Call, plain
from benchmarks.kernels.providers import PROVIDERS, Provider

CHECKED_ROWS = 16


def main() -> None:
    task = json.loads(sys.argv[1])
    torch.set_num_threads(task["threads"])
    provider = PROVIDERS[task["provider"]]
    for case in (Case(**fields) for fields in task["cases"]):
        row = {"case": case.name, "provider": task["provider"]}
        if provider.needs is None or find_spec(provider.needs):
            row |= attempt(provider, case, task)
        else:
            row["failed"] = f"{provider.needs} is not installed"
        print(json.dumps(row), flush=True)
        clear(())


def attempt(provider: Provider, case: Case, task: dict[str, Any]) -> dict[str, Any]:
    """A case's figures, or why there are none: that a provider runs out of memory is a result."""
    try:
        return measure(provider, case, task["device"], task["repeats"], task["seed"], task["check"])
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:200]}


def measure(provider: Provider, case: Case, device: str, repeats: int, seed: int, check: bool) -> dict[str, Any]:
    """Seconds and bytes of the case, and errors if they are asked for."""
    inputs = make_inputs(case, device, seed)
    if not provider.compiled:
        step(provider, case.tiny(), make_inputs(case.tiny(), device))()  # loads libraries
    call, peaks = step(provider, case, inputs), []
    first_s, _ = timed(lambda: peaks.append(peak_bytes(call, device)))
    clear(inputs.leaves)
    peaks.append(peak_bytes(call, device))
    gradients = sum(leaf.grad.nbytes for leaf in inputs.leaves if leaf.grad is not None)
    row: dict[str, Any] = {"first_s": first_s, "gradients_mib": gradients / MIB}
    row["first_peak_mib"], row["peak_mib"] = (peak / MIB for peak in peaks)
    if device == "cuda":
        row["wall_s"] = device_seconds(call, inputs.leaves, repeats)
    else:
        row["wall_s"], row["cpu_s"] = zip(*(timed_afresh(call, inputs) for _ in range(repeats)))
    return row | (errors(provider, case, inputs) if check else {})


def timed_afresh(call: Call, inputs: Inputs) -> tuple[float, float]:
    """Of a call that finds no gradients of an earlier one, nor memory of its."""
    clear(inputs.leaves)
    return timed(call)


def step(provider: Provider, case: Case, inputs: Inputs) -> Call:
    """Forward and backward, or forward alone where nothing is differentiated."""
    call = provider.build(case, inputs)
    if case.kind == "gather":
        return torch.no_grad()(call)

    def both() -> Tensor:
        loss = call()
        loss.backward()
        return loss.detach()

    return both


def errors(provider: Provider, case: Case, inputs: Inputs) -> dict[str, float]:
    """Against float64 on a few rows: see the package's docstring. `inputs` hold the gradients of the whole batch."""
    live = (inputs.weight > 0).nonzero()[:, 0]
    rows = live[torch.linspace(0, len(live) - 1, min(CHECKED_ROWS, len(live)), device=live.device).long()]
    exact, part = take(case, inputs, rows, torch.float64), take(case, inputs, rows)
    truth, ours = (step(each, case, some)() for each, some in ((Provider(_truth, ()), exact), (provider, part)))
    if case.kind == "gather":
        return {"loss_error": (ours - truth).abs().max().item()}
    gradients = [(leaf.grad, true.grad) for leaf, true in zip(part.leaves, exact.leaves)]
    whole = inputs.leaves[0].grad
    if whole is not None:
        gradients.append((whole[rows].double() * (part.weight / inputs.weight[rows])[:, None], exact.leaves[0].grad))
    worst = max(((ours - true).abs().max() / true.abs().max()).item() for ours, true in gradients)  # type: ignore
    return {"loss_error": ((ours - truth).abs() / truth.abs()).item(), "grad_error": worst}


def _truth(case: Case, inputs: Inputs) -> Call:
    return plain(case, inputs, torch.float64, rounded=getattr(torch, case.dtype))


if __name__ == "__main__":
    main()
