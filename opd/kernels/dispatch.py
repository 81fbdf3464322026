"""Which kernels compute on a tensor: Triton's on CUDA, their torch twins elsewhere."""

import os
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor


def on_triton(x: Tensor) -> bool:
    """Whether Triton's: on CUDA where triton is installed, or anywhere under TRITON_INTERPRET=1; never for float64."""
    return x.dtype != torch.float64 and (x.is_cuda or interpreted()) and _installed()


@cache
def _installed() -> bool:
    return find_spec("triton") is not None


@cache
def interpreted() -> bool:
    """Whether Triton runs its kernels in Python, on any device, which its modules settle as they are imported."""
    return os.environ.get("TRITON_INTERPRET") == "1"
