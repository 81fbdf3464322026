"""What the public functions refuse before they compute."""

import math
from typing import get_args

from torch import Tensor

from opd.kernels.partials import Kind

KINDS: tuple[Kind, ...] = get_args(Kind)
MODES = ("fused", "recompute")


def check_choice(name: str, value: str | None, choices: tuple[str, ...]) -> None:
    """Raises `ValueError`."""
    if value not in choices:
        raise ValueError(f"{name}: one of {', '.join(choices)}, not {value!r}")


def check_divergence(kind: str, beta: float) -> None:
    """Raises `ValueError`."""
    check_choice("kind", kind, KINDS)
    if not 0 < beta < 1:
        raise ValueError(f"beta: between 0 and 1, not {beta}")


def check_temperature(temperature: float) -> None:
    """Raises `ValueError`."""
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature: above 0 and finite, not {temperature}")


def check_shape(name: str, value: Tensor | None, shape: tuple[int, ...]) -> None:
    """Raises `ValueError`; None has every shape."""
    if value is not None and value.shape != shape:
        raise ValueError(f"{name}: of shape {tuple(shape)}, not {tuple(value.shape)}")
