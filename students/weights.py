"""The student's weights on their way to the servers that sample from it: one safetensors file, written tensor by tensor.

The file's SHA-256 names the weights. Adapters are merged, so that a server needs no peft; sharded parameters are gathered
one at a time, by all processes together.
"""

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from opd.teachers.digest import NUM_DIGITS
from opd.teachers.frame import PROTOCOL

NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
PIECE_BYTES = 16 * 2**20


class BadWeights(ValueError):
    """A file that does not fit the model. The message is one line."""


def layout(model: nn.Module) -> str:
    """Digest of the names and shapes of the weights that are sampled from: equal for models that can exchange them."""
    lines = sorted(f"{name} {list(shape)}" for name, shape, _ in _weights(model))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:NUM_DIGITS]


@torch.no_grad()
def write_weights(student: nn.Module, path: Path | None, dtype: torch.dtype, vocab: int) -> str | None:
    """Writes the weights in this type and gives the file's digest; with no path it only takes part in gathering.

    `vocab`: ids that are sampled, which the file says as well.
    """
    weights = list(_weights(student))
    if path is None:
        for _, _, read in weights:
            read()
        return None
    header: dict[str, object] = {"__metadata__": {"protocol": str(PROTOCOL), "kind": "weights", "vocab": str(vocab)}}
    offset = 0
    for name, shape, _ in weights:
        end = offset + shape.numel() * dtype.itemsize
        header[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for piece in _pieces(len(text).to_bytes(8, "little") + text, weights, dtype):
            digest.update(piece)
            file.write(piece)
    return digest.hexdigest()[:NUM_DIGITS]


@torch.no_grad()
def read_weights(path: Path, model: nn.Module) -> int:
    """Copies a file of `write_weights` into the model and gives the number of ids that are sampled.

    Raises `BadWeights` as `check_weights` does, before anything is copied.
    """
    vocab = check_weights(path, model)
    with safe_open(path, "pt") as file:
        for name, _, read in _weights(model):
            read().copy_(file.get_tensor(name))
    return vocab


def check_weights(path: Path, model: nn.Module) -> int:
    """The number of ids that are sampled, of a file of `write_weights` for this model, which may be without memory.

    Raises `BadWeights` for a file that is none or has other names or shapes.
    """
    targets = {name: shape for name, shape, _ in _weights(model)}
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("kind") != "weights" or not metadata.get("vocab", "").isdecimal():
                raise BadWeights("no weights of opd: its metadata says neither their kind nor the vocabulary")
            for name in sorted(targets.keys() ^ set(file.keys())):
                raise BadWeights(f"{name[:100]!r} is not in both the file and the model: is it the same model?")
            for name, shape in targets.items():
                part = file.get_slice(name)
                if part.get_shape() != list(shape) or part.get_dtype() not in NAMES.values():
                    raise BadWeights(f"{name}: {part.get_dtype()} {part.get_shape()}, but the model has {list(shape)}")
            return int(metadata["vocab"])
    except SafetensorError as error:
        raise BadWeights(f"not a safetensors file: {' '.join(str(error).split())[:200]}") from None


def _pieces(
    header: bytes, weights: list[tuple[str, torch.Size, Callable[[], Tensor]]], dtype: torch.dtype
) -> Iterator[bytes | memoryview]:
    yield header
    for _, _, read in weights:
        values = read().detach().reshape(-1)
        step = PIECE_BYTES // dtype.itemsize
        for start in range(0, len(values), step):
            yield values[start : start + step].to("cpu", dtype).contiguous().view(torch.uint8).numpy().data


def _weights(model: nn.Module) -> Iterator[tuple[str, torch.Size, Callable[[], Tensor]]]:
    """(name without adapters, shape, what gives it whole) of each parameter; tied ones once."""
    base = model.get_base_model() if hasattr(model, "peft_config") else model  # type: ignore[operator]
    for name, parameter in base.named_parameters():
        if ".base_layer." not in name:
            if ".lora_" not in name:
                yield name, parameter.shape, lambda parameter=parameter: _whole(parameter)
            continue
        place, _, kind = name.partition(".base_layer.")
        layer = base.get_submodule(place)

        def merged(layer: nn.Module = layer, parameter: Tensor = parameter, kind: str = kind) -> Tensor:
            if kind != "weight":
                return parameter
            deltas = [layer.get_delta_weight(adapter) for adapter in layer.active_adapters]  # type: ignore[operator,union-attr]
            return torch.stack([parameter, *(delta.to(parameter.dtype) for delta in deltas)]).sum(0)

        yield f"{place}.{kind}", parameter.shape, merged


def _whole(parameter: Tensor) -> Tensor:
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
