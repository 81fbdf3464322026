"""Digests by which a client knows a teacher: of what its ids mean, and of its weights.

Both are the first 32 hex digits of a SHA-256 and depend on content alone, not on the device, the process or the file.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor, nn

from opd.kernels.head import OutputHead

NUM_DIGITS = 32
_CHUNK_BYTES = 16 * 2**20
_NUM_THREADS = 8


def tokens_digest(vocab: Mapping[str, int]) -> str:
    """Digest of a token -> id map, whatever its order."""
    digest = hashlib.sha256()
    for token, index in sorted(vocab.items(), key=lambda item: (item[1], item[0])):
        text = token.encode("utf-8", "surrogatepass")
        digest.update(b"%d %d " % (index, len(text)) + text)
    return digest.hexdigest()[:NUM_DIGITS]


def tensor_digest(tensor: Tensor) -> str:
    """Digest of a tensor's type, shape and bytes."""
    return _tensor_sha256(tensor).hex()[:NUM_DIGITS]


def head_digest(head: OutputHead) -> str:
    """What a head is called: a digest of all that its logits depend on."""
    weight = f"{head.width} logits" if head.weight is None else tensor_digest(head.weight)
    others = [] if head.bias is None else [f"bias {tensor_digest(head.bias)}"]
    others += [] if head.softcap is None else [f"softcap {head.softcap!r}"]
    return _combined(weight, repr(head.scale), *others)


def adapter_digest(base: str, state: Mapping[str, Tensor]) -> str:
    """Digest of the weights that a base of this digest has under an adapter with these tensors."""
    return _combined(base, *(f"{name} {tensor_digest(tensor)}" for name, tensor in sorted(state.items())))


def experts_digest(weights: str, active_experts: int) -> str:
    """Digest of the weights of this digest with so many experts at work."""
    return _combined(weights, f"active_experts {active_experts}")


def weights_digest(model: nn.Module) -> str:
    """Digest of the names, types, shapes and bytes of a model's parameters and persistent buffers.

    Tied weights count under each of their names.
    """
    tensors = dict(sorted(_tensors(model)))
    distinct = {_place(tensor): tensor for tensor in tensors.values()}  # tied ones are read once
    with ThreadPoolExecutor(_NUM_THREADS) as pool:  # hashlib lets go of the interpreter while it works
        sums = dict(zip(distinct, pool.map(_tensor_sha256, distinct.values())))
    digest = hashlib.sha256()
    for name, tensor in tensors.items():
        digest.update(f"{name}\n".encode() + sums[_place(tensor)])
    return digest.hexdigest()[:NUM_DIGITS]


def files_digest(files: Sequence[Path], *others: str) -> str:
    """Digest of the names and bytes of a checkpoint's files, and of whatever else its numbers depend on."""
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        sums = pool.map(_file_sha256, files)
        return _combined(*(f"{path.name} {one}" for path, one in zip(files, sums)), *others)


def _file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, value in model.state_dict(keep_vars=False).items():
        if isinstance(value, Tensor):  # quantised modules may keep descriptions beside their weights
            yield name, value


def _place(tensor: Tensor) -> tuple[object, ...]:
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()))


@torch.no_grad()
def _tensor_sha256(tensor: Tensor) -> bytes:
    """Of one tensor, copied to this machine's memory a few MiB at a time."""
    digest = hashlib.sha256(f"{tensor.dtype} {list(tensor.shape)}\n".encode())
    values = tensor.detach().contiguous().reshape(-1)
    step = max(1, _CHUNK_BYTES // values.element_size())
    for start in range(0, len(values), step):
        digest.update(values[start : start + step].cpu().view(torch.uint8).numpy().data)
    return digest.digest()


def _combined(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:NUM_DIGITS]
