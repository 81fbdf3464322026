"""Who is measured, by name."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from benchmarks.kernels import ours, peers
from benchmarks.kernels.cases import Case, Inputs
from benchmarks.kernels.peers import Call

LIGER_CHUNK, LIGER_CHUNKS = 1024, (128, 256, 512, 1024, 2048)  # its default, and what is tried
ALL_KINDS = ("logits", "linear", "gather", "topk")


@dataclass(frozen=True)
class Provider:
    """`build` makes the call; `compiled`: its first call at a shape makes code."""

    build: Callable[[Case, Inputs], Call]
    kinds: tuple[str, ...]
    compiled: bool = False
    needs: str | None = None  # an importable package
    devices: tuple[str, ...] = ("cpu", "cuda")
    variant: bool = False  # another setting of a provider: only the best of them is measured in every round


def _liger(compiled: bool, chunk: int) -> Provider:
    build = partial(peers.liger, chunk=chunk, compiled=compiled)
    return Provider(build, ("linear",), compiled, "liger_kernel", variant=chunk != LIGER_CHUNK)


PROVIDERS = {
    "ours": Provider(ours.build, ("gather", "topk")),
    "ours_fused": Provider(partial(ours.build, mode="fused"), ("logits", "linear")),
    "ours_recompute": Provider(partial(ours.build, mode="recompute"), ("logits", "linear")),
    "torch": Provider(peers.plain, ALL_KINDS),
    "torch_compile": Provider(peers.compiled, ALL_KINDS, compiled=True),
    **{f"liger@{chunk}": _liger(False, chunk) for chunk in LIGER_CHUNKS},
    **{f"liger_compile@{chunk}": _liger(True, chunk) for chunk in LIGER_CHUNKS},
    "liger_triton": Provider(peers.liger_triton, ("linear",), needs="liger_kernel", devices=("cuda",)),
    "trl": Provider(peers.trl, ("linear", "gather")),
}


def of_kind(kind: str, device: str) -> list[str]:
    """Names of those that can do a case of this kind, in the order in which they take turns."""
    return [name for name, provider in PROVIDERS.items() if kind in provider.kinds and device in provider.devices]


def family(name: str) -> str:
    """The provider of which `name` is one setting."""
    return name.partition("@")[0]
