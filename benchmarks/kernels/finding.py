"""What `benchmarks.kernels.check` finds: errors as shares of their bounds."""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

RELATIVE, ABSOLUTE, GRADIENT = 1e-6, 3e-7, 2e-6
UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}  # the most that rounding to nearest changes, relative to a value
NOTHING = 1e-14  # what float64 makes of a gradient that is 0 is smaller


@dataclass(frozen=True)
class Finding:
    """`share`: error over bound, at most 1 where all is well; NaN is worse than anything."""

    check: str
    case: str
    share: float

    @property
    def ok(self) -> bool:
        return self.share <= 1


def truncating() -> bool:
    """Whether low-precision stores cut digits off instead of rounding: under the interpreter."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def loss_finding(
    check: str, case: str, ours: Tensor, truth: Tensor, relative: float = RELATIVE, absolute: float = ABSOLUTE
) -> Finding:
    """`ours` fp32, `truth` float64, of the same shape; the worst entry counts."""
    assert ours.dtype == torch.float32, ours.dtype
    bound = (relative * truth.abs()).clamp(min=absolute)
    return Finding(check, f"{case}: values", _largest((ours.double() - truth).abs() / bound))


def gradient_finding(
    check: str,
    case: str,
    ours: Tensor | None,
    truth: Tensor | None,
    bound: float = GRADIENT,
    floor: float = NOTHING,
    roundings: int = 1,
) -> Finding:
    """The error may be `bound` of the largest entry, `roundings` of its type, and `floor`."""
    assert ours is not None
    assert truth is not None
    bound += roundings * UNIT.get(ours.dtype, 0.0) * (2 if truncating() else 1)
    error = _largest((ours.double() - truth).abs())
    return Finding(check, f"{case}: gradient", error / (bound * _largest(truth.abs()) + floor))


def worst(findings: Sequence[Finding]) -> dict[str, Finding]:
    """Of each check."""
    found: dict[str, Finding] = {}
    for finding in findings:
        rival = found.setdefault(finding.check, finding)
        if not math.isnan(rival.share) and not finding.share <= rival.share:
            found[finding.check] = finding
    return found


def _largest(values: Tensor) -> float:
    return values.max().item() if values.numel() else 0.0
