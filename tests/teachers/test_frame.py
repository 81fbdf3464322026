"""The container against the safetensors library, and against headers nobody should send."""

import json
import math

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch

from opd.teachers import frame as frames
from opd.teachers.frame import Frame, Pieces, WireError, write

TYPES = [torch.float32, torch.float16, torch.bfloat16]


def build(header: object, body: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


def metadata(fields: str = "{}", **changes: object) -> dict[str, object]:
    return {"protocol": "1", "kind": "test", "fields": fields} | changes


def entry(dtype: object = "I32", shape: object = (2,), offsets: object = (0, 8)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def test_the_library_reads_our_frames():
    arrays = {
        "ids": np.arange(12, dtype=np.int32).reshape(4, 3),
        "logps": np.linspace(-3, 0, 5, dtype=np.float32),
        "empty": np.zeros((0, 7), np.float32),
    }
    body = bytes(write("test", {"a": 1}, arrays | {"absent": None}))
    read = safetensors.numpy.load(body)
    assert read.keys() == arrays.keys()
    for name, array in arrays.items():
        assert read[name].dtype == array.dtype
        np.testing.assert_array_equal(read[name], array)


@pytest.mark.parametrize("dtype", TYPES)
def test_the_library_reads_our_torch_tensors(dtype):
    tensor = torch.randn(5, 3).to(dtype)
    read = safetensors.torch.load(bytes(write("test", {}, {"hidden": tensor, "ids": np.arange(2)})))
    assert torch.equal(read["hidden"], tensor)
    assert torch.equal(read["ids"], torch.arange(2, dtype=torch.int32))


@pytest.mark.parametrize("dtype", TYPES)
def test_we_read_the_librarys_frames(dtype):
    tensors = {"ids": torch.arange(6, dtype=torch.int32).reshape(2, 3), "hidden": torch.randn(3, 5).to(dtype)}
    body = safetensors.torch.save(tensors, {"protocol": "1", "kind": "test", "fields": '{"x": 2.5}'})
    frame = Frame(body, "test")
    assert frame.real("x", 0, 3) == 2.5
    np.testing.assert_array_equal(frame.array("ids", "I32", 2), tensors["ids"].numpy())
    assert torch.equal(frame.tensor("hidden"), tensors["hidden"])
    frame.finish()


@pytest.mark.parametrize("shift", [0, 1, 2, 4, 8])
@pytest.mark.parametrize("kind", [bytes, bytearray])
def test_decoded_arrays_are_aligned_wherever_the_frame_lies(shift, kind):
    hidden = torch.randn(3, 4)
    whole = bytes(write("test", {}, {"ids": np.arange(3), "hidden": hidden}))
    frame = Frame(memoryview(kind(b"x" * shift + whole))[shift:], "test")
    array, tensor = frame.array("ids", "I32", 1), frame.tensor("hidden")
    assert array.flags.aligned
    assert tensor.data_ptr() % 4 == 0
    assert array.tolist() == [0, 1, 2]
    assert torch.equal(tensor, hidden)


def test_a_tensor_of_a_writable_body_shares_its_memory():
    body = bytearray(bytes(write("test", {}, {"hidden": torch.zeros(2, 2)})))
    tensor = Frame(body, "test").tensor("hidden")
    body[-4:] = np.float32(7.0).tobytes()
    assert tensor[1, 1] == 7.0
    read_only = Frame(bytes(body), "test").tensor("hidden")
    read_only.zero_()  # its own memory


def test_pieces_are_the_whole(monkeypatch):
    monkeypatch.setattr(frames, "_PIECE_BYTES", 64)
    tensors = {"hidden": torch.randn(50, 7).bfloat16(), "ids": np.arange(100), "none": np.zeros((0, 3), np.float32)}
    pieces = write("test", {"a": "b"}, tensors)
    assert isinstance(pieces, Pieces)
    parts = [bytes(part) for part in pieces]
    assert max(map(len, parts[1:])) <= 64
    assert b"".join(parts) == bytes(pieces)
    assert pieces.num_bytes == len(bytes(pieces))
    assert [bytes(part) for part in pieces] == parts  # a second reader gets it too


def test_any_strides_and_byte_order():
    array = np.arange(24, dtype=">i8").reshape(4, 6)[::2, ::-1]
    weight = torch.nn.Parameter(torch.randn(4, 6)).t()
    frame = Frame(bytes(write("test", {}, {"ids": array, "hidden": weight})), "test")
    np.testing.assert_array_equal(frame.array("ids", "I32", 2), array)
    assert torch.equal(frame.tensor("hidden"), weight)


def test_a_type_that_does_not_travel_is_a_mistake_of_ours():
    with pytest.raises(AssertionError, match="float64"):
        write("test", {}, {"hidden": torch.zeros(2, 2, dtype=torch.float64)})


HEADERS = {
    "nothing": b"",
    "half a length": b"\1\0\0",
    "a length beyond the body": (100).to_bytes(8, "little") + b"{}",
    "a huge length": b"\xff" * 8 + b"{}",
    "a length below zero if it were signed": (2**63).to_bytes(8, "little") + b"{}",
    "no JSON": build(b"{"),
    "no text": build(b"\xff\xfe{}"),
    "a list": build([]),
    "a number": build(b"1"),
    "deep": build(b"[" * 16000),
    "deep objects": build(b'{"a":' * 3000),
    "long": build(b" " * 20000 + b"{}", b""),
    "a long number": build(b"9" * 10000),
    "NaN": build(b'{"__metadata__": NaN}'),
    "names twice": build(b'{"__metadata__": {}, "__metadata__": {}}'),
    "no metadata": build({"a": entry()}, bytes(8)),
    "metadata null": build({"__metadata__": None}),
    "metadata list": build({"__metadata__": ["protocol"]}),
    "metadata numbers": build({"__metadata__": metadata(protocol=1)}),
    "no protocol": build({"__metadata__": {"kind": "test", "fields": "{}"}}),
    "no fields": build({"__metadata__": {"kind": "test", "protocol": "1"}}),
    "other metadata": build({"__metadata__": metadata(extra="")}),
    "another kind": build({"__metadata__": metadata(kind="scores")}),
    "fields list": build({"__metadata__": metadata("[]")}),
    "fields nested": build({"__metadata__": metadata('{"a": [1]}')}),
    "fields twice": build({"__metadata__": metadata('{"a": 1, "a": 1}')}),
    "fields infinite": build({"__metadata__": metadata('{"a": Infinity}')}),
    "fields half a surrogate": build({"__metadata__": metadata("\ud800")}),
    "entry null": build({"__metadata__": metadata(), "a": None}),
    "entry lacks": build({"__metadata__": metadata(), "a": {"dtype": "I32", "shape": [2]}}, bytes(8)),
    "entry has more": build({"__metadata__": metadata(), "a": entry() | {"x": 1}}, bytes(8)),
    "dtype list": build({"__metadata__": metadata(), "a": entry(dtype=["I32"])}, bytes(8)),
    "dtype unknown": build({"__metadata__": metadata(), "a": entry(dtype="I64", shape=[1])}, bytes(8)),
    "shape number": build({"__metadata__": metadata(), "a": entry(shape=2)}, bytes(8)),
    "shape true": build({"__metadata__": metadata(), "a": entry(shape=[True, 2])}, bytes(8)),
    "shape float": build({"__metadata__": metadata(), "a": entry(shape=[2.0])}, bytes(8)),
    "shape negative": build({"__metadata__": metadata(), "a": entry(shape=[-1, -2])}, bytes(8)),
    "shape of three": build({"__metadata__": metadata(), "a": entry(shape=[1, 1, 2])}, bytes(8)),
    "shape overflows": build({"__metadata__": metadata(), "a": entry(shape=[2**31, 2**33])}),
    "shape overflows to fit": build({"__metadata__": metadata(), "a": entry(shape=[2**31 - 1, 2**31 - 1])}, bytes(8)),
    "shape too large": build({"__metadata__": metadata(), "a": entry(shape=[3])}, bytes(8)),
    "offsets three": build({"__metadata__": metadata(), "a": entry(offsets=[0, 8, 8])}, bytes(8)),
    "offsets float": build({"__metadata__": metadata(), "a": entry(offsets=[0.0, 8])}, bytes(8)),
    "offsets negative": build({"__metadata__": metadata(), "a": entry(offsets=[-8, 0])}, bytes(8)),
    "offsets backwards": build({"__metadata__": metadata(), "a": entry(offsets=[8, 0])}, bytes(8)),
    "offsets huge": build({"__metadata__": metadata(), "a": entry(shape=[2**30], offsets=[0, 2**32])}, bytes(8)),
    "offsets overlap": build({"__metadata__": metadata(), "a": entry(), "b": entry()}, bytes(8)),
    "offsets overlap in part": build(
        {"__metadata__": metadata(), "a": entry(), "b": entry(offsets=[4, 12])},
        bytes(12),
    ),
    "a hole": build({"__metadata__": metadata(), "a": entry(), "b": entry(offsets=[12, 20])}, bytes(20)),
    "a hole at the start": build({"__metadata__": metadata(), "a": entry(offsets=[4, 12])}, bytes(12)),
    "bytes after": build({"__metadata__": metadata(), "a": entry()}, bytes(9)),
    "bytes missing": build({"__metadata__": metadata(), "a": entry()}, bytes(7)),
}


@pytest.mark.parametrize("body", HEADERS.values(), ids=HEADERS.keys())
def test_headers_that_are_refused(body):
    with pytest.raises(WireError) as caught:
        Frame(body, "test").finish()
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 200


def test_another_protocol_says_what_to_do():
    for found in ("2", "1.0", "1" * 99):
        with pytest.raises(WireError, match="this side speaks 1: install the same opd on both"):
            Frame(build({"__metadata__": metadata(protocol=found)}), "test")


def fields(**values: object) -> Frame:
    return Frame(build({"__metadata__": metadata(json.dumps(values))}), "test")


@pytest.mark.parametrize("value", [True, 1.0, "1", None, -1, 11, 10**30])
def test_integers_are_integers(value):
    assert fields(x=3).integer("x", 0, 10) == 3
    with pytest.raises(WireError, match="x: must be an integer from 0 to 10"):
        fields(x=value).integer("x", 0, 10)


@pytest.mark.parametrize("value", ["true", '"1"', "null", "-0.1", "1e999", "-1e999", "1" + "0" * 400])
def test_reals_are_finite(value):
    def read(text: str) -> float:
        return Frame(build({"__metadata__": metadata(f'{{"x": {text}}}')}), "test").real("x", 0, 10)

    assert read("3") == 3.0
    assert math.isclose(read("0.25"), 0.25)
    with pytest.raises(WireError, match="x: must be a number from 0 to 10"):
        read(value)


@pytest.mark.parametrize("value", [0, 1, "true", None])
def test_flags_are_flags(value):
    assert fields(x=True).flag("x") is True
    with pytest.raises(WireError, match="x: must be true or false"):
        fields(x=value).flag("x")


def test_absent_and_unknown_parts_are_named():
    with pytest.raises(WireError, match="x: missing"):
        fields().integer("x", 0)
    with pytest.raises(WireError, match="x: missing"):
        fields().tensor("x")
    with pytest.raises(WireError, match="'y': not part of this message"):
        fields(y=1).finish()
    with pytest.raises(WireError, match="'z': not part of this message"):
        Frame(build({"__metadata__": metadata(), "z": entry()}, bytes(8)), "test").finish()


def test_types_and_ranks_of_tensors():
    body = bytes(write("test", {}, {"a": np.arange(3), "b": torch.zeros(2, 3)}))
    for name, dtype, rank in (("a", "F32", 1), ("a", "I32", 2), ("b", "F32", 1)):
        with pytest.raises(WireError, match=f"{name}: .* of . dimensions, not {dtype} of {rank}"):
            Frame(body, "test").array(name, dtype, rank)
    with pytest.raises(WireError, match="a: I32 of shape"):
        Frame(body, "test").tensor("a")
