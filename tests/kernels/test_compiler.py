"""The Triton kernels as Hopper's machine code, which is made without a device: what the interpreter lets pass fails here."""

import subprocess
from importlib import import_module
from pathlib import Path

import pytest

from opd.kernels.dispatch import interpreted

triton = pytest.importorskip("triton")
if interpreted():
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

MATRICES = {"student", "teacher", "logits", "out", "add", "add_at"}
INTEGERS = {"student_stride", "teacher_stride", "stride", "add_stride", "out_stride", "num_rows", "vocab"}
FLOATS = {"scale", "teacher_scale", "ratio", "beta", "softcap", "teacher_softcap"}
TYPES = {"ids": "*i64", "live": "*i1"} | dict.fromkeys(INTEGERS, "i32") | dict.fromkeys(FLOATS, "fp32")
PLAIN = {"softcap": None, "teacher_softcap": None}
SUMS = {"vocab": 151_936, "num_slices": 1, "width": 38 * 4096, "block": 4096}
TILES = SUMS | {"num_slices": 38, "width": 4096}
IDS = {"num_ids": 65, "num_slices": 2, "width": 64, "block": 64}
KINDS = ["reverse_kl", "forward_kl", "jsd"]
ONES = dict.fromkeys(
    ["student_stride", "teacher_stride", "out_stride", "stride", "num_rows"], 1
)  # Triton makes these constants
SMALL = {"vocab": 1, "num_slices": 1, "width": 128, "block": 128} | ONES
CASES = [
    *(("divergence", "_partials", SUMS | PLAIN | {"kind": kind}) for kind in KINDS),
    *(("divergence", "_grad", TILES | PLAIN | {"kind": kind}) for kind in KINDS),
    ("divergence", "_partials", SUMS | {"kind": "reverse_kl"}),
    ("divergence", "_partials", SMALL | PLAIN | {"kind": "reverse_kl"}),
    ("divergence", "_jsd_sums", SUMS | PLAIN),
    ("divergence", "_grad", TILES | {"kind": "jsd"}),
    ("divergence", "_grad", SMALL | PLAIN | {"kind": "reverse_kl"}),
    ("gather", "_partials", SUMS | PLAIN),
    ("gather", "_partials", SMALL | PLAIN),
    ("gather", "_at", IDS),
    ("gather", "_grad", TILES),
    ("gather", "_grad", TILES | PLAIN | {"add": None, "grad_entropy": None}),
    ("gather", "_grad_at", IDS),
]


def compiled(module: str, name: str, constants: dict, matrices: str):
    kernel = getattr(import_module(f"opd.kernels.{module}_triton"), name)
    types = {argument: TYPES.get(argument, matrices if argument in MATRICES else "*fp32") for argument in kernel.arg_names}
    types |= {argument: "constexpr" for argument in constants if argument in types}
    constants = {argument: value for argument, value in constants.items() if argument in types}
    aligned = [(i,) for i, kind in enumerate(types.values()) if kind[0] == "*" or kind == "i32"]
    source = ASTSource(kernel, types, constants, {place: [["tt.divisibility", 16]] for place in aligned})
    options = {"num_warps": max(1, constants["block"] // 512), "enable_fp_fusion": True}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


@pytest.mark.parametrize(("module", "name", "constants"), CASES)
def test_machine_code_keeps_to_registers_and_wide_accesses(module, name, constants, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    made = compiled(module, name, constants, "*bf16")
    (tmp_path / "kernel.cubin").write_bytes(made.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    usage = subprocess.run(
        [tool, "-res-usage", tmp_path / "kernel.cubin"], capture_output=True, text=True, check=True
    ).stdout
    assert "STACK:0 " in usage  # nothing spilled
    assert "LOCAL:0 " in usage
    if constants["block"] == 4096:  # 16 bytes a thread at a time, in the loop over a row ahead of their use
        loop = constants["width"] > constants["block"]
        wide = ["cp.async.cg.shared.global"] if loop else ["ld.global.v4.b32", "st.global.v4.b32"]
        assert all(access in made.asm["ptx"] for access in wide)
