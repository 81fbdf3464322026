"""The container of every message: one safetensors file in memory, read without copying and without trust.

The library's `serialize` copies the tensors twice and its `deserialize` copies them once and drops the metadata, so the two
dozen lines of the format are written out here; the tests read our frames with the library, and the library's with ours.
`__metadata__` holds the protocol, the kind of message, and its scalars as JSON.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

PROTOCOL = 1
MAX_HEADER_BYTES = 16384  # ours have less than 1,024
MAX_DIM = 2**31 - 1
Body = bytes | bytearray | memoryview
Scalar = str | int | float | bool | None
_NUMPY = {"I32": np.dtype("<i4"), "F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<i2")}
_TORCH = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_TORCH_NAMES = {dtype: name for name, dtype in _TORCH.items()}
_PIECE_BYTES = 4 * 2**20


class WireError(ValueError):
    """A frame that is not well formed. The message is one line and holds no more of the frame than a name."""


class Pieces:
    """A frame as buffers in order: iterate over it, or `bytes()` it. `num_bytes` is the length of the whole."""

    def __init__(self, header: bytes, arrays: Sequence["np.ndarray | Tensor"]) -> None:
        self._header, self._arrays = header, arrays
        self.num_bytes = len(header) + sum(array.nbytes for array in arrays)

    def __iter__(self) -> Iterator[Body]:
        """Pieces of a few MiB; a tensor on another device comes over piece by piece."""
        yield self._header
        for array in self._arrays:
            if not array.nbytes:
                continue
            rows = max(1, _PIECE_BYTES * len(array) // array.nbytes)
            for start in range(0, len(array), rows):
                yield _memory(array[start : start + rows])

    def __bytes__(self) -> bytes:
        return b"".join([self._header, *(_memory(array) for array in self._arrays if array.nbytes)])


def write(kind: str, fields: Mapping[str, Scalar], tensors: Mapping[str, "np.ndarray | Tensor | None"]) -> Pieces:
    """A frame of this kind; tensors that are None stay away. Integers travel as int32, numpy floats as float32."""
    present = {name: _plain(tensor) for name, tensor in tensors.items() if tensor is not None}
    order = sorted(present, key=lambda name: (-present[name][1].itemsize, name))  # the format wants it by alignment
    metadata = {"protocol": str(PROTOCOL), "kind": kind, "fields": json.dumps(fields, allow_nan=False)}
    header: dict[str, Any] = {"__metadata__": metadata}
    offset = 0
    for name in order:
        dtype, array = present[name]
        end = offset + array.nbytes
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the tensors are aligned
    assert len(text) <= MAX_HEADER_BYTES
    return Pieces(len(text).to_bytes(8, "little") + text, [present[name][1] for name in order])


class Frame:
    """A frame read. Every scalar and tensor is taken out by name; `finish` refuses what nobody took."""

    def __init__(self, body: Body, kind: str) -> None:
        """Raises `WireError` unless `body` is one whole frame of this kind and protocol."""
        view = memoryview(body).cast("B")
        header, start = _header(view)
        self._fields = _metadata(header.pop("__metadata__", None), kind)
        self._tensors: dict[str, tuple[str, np.ndarray]] = {}
        offset = 0
        for name, entry in sorted(header.items(), key=lambda item: _offsets(item[1], item[0])):
            dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
            item = _NUMPY[dtype]
            count = math.prod(shape)
            if offsets[0] != offset or offsets[1] - offset != count * item.itemsize or offsets[1] > len(view) - start:
                raise WireError(f"tensor {_short(name)}: its place in the frame does not fit its shape or its neighbours")
            array = np.frombuffer(view, item, count, start + offset) if count else np.zeros(0, item)
            self._tensors[name] = dtype, array.reshape(shape)
            offset = offsets[1]
        if offset != len(view) - start:
            raise WireError(f"{len(view) - start - offset} bytes follow the last tensor")

    def has(self, name: str) -> bool:
        """Whether there is a tensor of this name."""
        return name in self._tensors

    def array(self, name: str, dtype: str, rank: int) -> np.ndarray:
        """The tensor as an aligned array, which may be a read-only view of the body."""
        found, array = self._take_tensor(name)
        if found != dtype or array.ndim != rank:
            raise WireError(f"{name}: {found} of {array.ndim} dimensions, not {dtype} of {rank}")
        return array if array.flags.aligned else array.copy()

    def tensor(self, name: str) -> Tensor:
        """The tensor [rows, columns >= 1] in a floating type: a view of a writable body, a copy of a read-only one."""
        found, array = self._take_tensor(name)
        if found not in _TORCH or array.ndim != 2 or not array.shape[1]:
            raise WireError(f"{name}: {found} of shape {array.shape}, not [rows, columns] in F32, F16 or BF16")
        array = array if array.flags.aligned and array.flags.writeable else array.copy()
        return torch.from_numpy(array).view(_TORCH[found])

    def integer(self, name: str, low: int, high: int = 2**31 - 1) -> int:
        """An integer between the bounds, both included."""
        value = self._take(name)
        if type(value) is not int or not low <= value <= high:
            raise WireError(f"{name}: must be an integer from {low} to {high}")
        return value

    def real(self, name: str, low: float, high: float) -> float:
        """A number between the bounds, both included."""
        value = self._take(name)
        if type(value) not in (int, float) or not low <= value <= high:
            raise WireError(f"{name}: must be a number from {low:g} to {high:g}")
        return float(value)

    def flag(self, name: str) -> bool:
        """True or false."""
        value = self._take(name)
        if type(value) is not bool:
            raise WireError(f"{name}: must be true or false")
        return value

    def text(self, name: str, pattern: re.Pattern[str]) -> str:
        """A string that matches the whole pattern."""
        value = self._take(name)
        if type(value) is not str or not pattern.fullmatch(value):
            raise WireError(f"{name}: must be a string like {pattern.pattern}")
        return value

    def text_or_none(self, name: str, pattern: re.Pattern[str]) -> str | None:
        """The same, or null."""
        if name in self._fields and self._fields[name] is None:
            return self._take(name)
        return self.text(name, pattern)

    def finish(self) -> None:
        """Raises `WireError` when a scalar or a tensor is left that this side does not know."""
        for name in (*self._fields, *self._tensors):
            raise WireError(f"{_short(name)}: not part of this message")

    def _take(self, name: str) -> Any:
        if name not in self._fields:
            raise WireError(f"{name}: missing")
        return self._fields.pop(name)

    def _take_tensor(self, name: str) -> tuple[str, np.ndarray]:
        if name not in self._tensors:
            raise WireError(f"{name}: missing")
        return self._tensors.pop(name)


def _plain(tensor: "np.ndarray | Tensor") -> tuple[str, "np.ndarray | Tensor"]:
    """(name of the type, contiguous little-endian array or tensor)."""
    if isinstance(tensor, Tensor):
        assert tensor.dtype in _TORCH_NAMES, f"{tensor.dtype} does not travel"
        return _TORCH_NAMES[tensor.dtype], tensor.detach().contiguous()
    dtype = "I32" if tensor.dtype.kind in "iu" else "F32"
    return dtype, np.ascontiguousarray(tensor, _NUMPY[dtype])


def _memory(array: "np.ndarray | Tensor") -> memoryview:
    """The bytes of a contiguous array or tensor, of a tensor on this machine's memory without a copy."""
    if isinstance(array, Tensor):
        array = array.cpu().view(torch.uint8).numpy()
    return array.data.cast("B")


def _header(view: memoryview) -> tuple[dict[str, Any], int]:
    """(JSON object of the header, where the tensors begin)."""
    if len(view) < 8:
        raise WireError("shorter than the length of a header")
    size = int.from_bytes(view[:8], "little")
    if size > MAX_HEADER_BYTES or size > len(view) - 8:
        raise WireError(f"a header of {size} bytes: not a frame, or cut short")
    return _json_object(bytes(view[8 : 8 + size]), "header"), 8 + size


def _metadata(metadata: Any, kind: str) -> dict[str, Scalar]:
    """The scalars of a message of this kind."""
    if not isinstance(metadata, dict) or not all(type(value) is str for value in metadata.values()):
        raise WireError("the header has no metadata of strings: not a message of opd")
    protocol = metadata.get("protocol", "")
    if protocol != str(PROTOCOL):
        raise WireError(f"protocol {_short(protocol)}, this side speaks {PROTOCOL}: install the same opd on both")
    if metadata.keys() != {"protocol", "kind", "fields"} or metadata["kind"] != kind:
        raise WireError(f"a message of kind {_short(metadata.get('kind', ''))}, not {kind!r}")
    fields = _json_object(metadata["fields"].encode("utf-8", "surrogatepass"), "fields")
    if not all(value is None or type(value) in (str, int, float, bool) for value in fields.values()):
        raise WireError("fields: must be scalars")
    return fields


def _offsets(entry: Any, name: str) -> tuple[int, int]:
    """Where a tensor lies, after the types in its description are checked."""
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise WireError(f"tensor {_short(name)}: must have dtype, shape and data_offsets alone")
    if type(entry["dtype"]) is not str or entry["dtype"] not in _NUMPY:
        raise WireError(f"tensor {_short(name)}: its type must be one of {', '.join(_NUMPY)}")
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not _naturals(shape) or len(shape) > 2 or not _naturals(offsets, 2**62) or len(offsets) != 2:
        raise WireError(f"tensor {_short(name)}: its shape or data_offsets are no lists of few natural numbers")
    return offsets[0], offsets[1]


def _naturals(values: Any, high: int = MAX_DIM) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value <= high for value in values)


def _json_object(text: bytes, what: str) -> dict[str, Any]:
    try:
        value = _DECODER.decode(text.decode())
    except (ValueError, RecursionError):
        raise WireError(f"{what}: not JSON, or not of the plain kind") from None
    if not isinstance(value, dict):
        raise WireError(f"{what}: must be a JSON object")
    return value


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name is given twice")
    return found


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


def _short(name: str) -> str:
    return repr(name[:40])


_DECODER = json.JSONDecoder(object_pairs_hook=_distinct, parse_constant=_refuse)
