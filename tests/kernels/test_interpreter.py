"""The Triton kernels under TRITON_INTERPRET=1, in a process of their own: triton reads the variable as it is imported."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
FILES = [
    "test_divergence.py",
    "test_gather.py",
    "test_topk.py",
    "test_linear.py",
]  # see conftest.py for what it leaves out of them
KERNELS = {"divergence_triton": ["_partials", "_jsd_sums", "_grad"]}
KERNELS |= {"gather_triton": ["_partials", "_at", "_grad", "_grad_at"]}


@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="is interpreted already")
def test_the_kernels_pass_the_tests_of_their_twins():
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:xdist",
        "-p",
        "no:cacheprovider",
        *(str(FOLDER / name) for name in FILES),
    ]
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        command, cwd=FOLDER.parents[1], env=env | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None, done.stdout
    assert int(passed[1]) > 250, done.stdout
    launched = {name: int(number) for name, number in re.findall(r"^launched (\S+) (\d+)$", done.stdout, re.MULTILINE)}
    for module, names in KERNELS.items():
        for name in names:
            assert launched.get(f"{module}.{name}", 0) > 30, launched
