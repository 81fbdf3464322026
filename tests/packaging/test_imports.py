"""Who may import whom: the guards of the mapped folders, and the contracts in pyproject.toml."""

import importlib
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAPPED = ["teachers", "students", "alignment", "data_free"]


def lint_imports(tree: Path) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-logo", "--no-cache"]
    return subprocess.run(command, cwd=tree, capture_output=True, text=True)


@pytest.mark.parametrize("name", MAPPED)
def test_mapped_folder_refuses_its_bare_name(monkeypatch: pytest.MonkeyPatch, name: str):
    monkeypatch.syspath_prepend(ROOT)
    with pytest.raises(ImportError, match=f"opd.{name}"):
        importlib.import_module(name)


@pytest.mark.parametrize("name", MAPPED)
def test_mapped_folder_imports_under_opd(name: str):
    assert importlib.import_module(f"opd.{name}").__name__ == f"opd.{name}"


def test_contracts_are_kept():
    linted = lint_imports(ROOT)
    assert linted.returncode == 0, linted.stdout + linted.stderr


@pytest.mark.parametrize(
    ("module", "line", "contract"),
    [
        ("opd.engine", "import opd.strategies", "the engine never imports a strategy"),
        ("opd.strategies", "import torch", "strategies import no torch"),
        *[
            (f"opd.{name}", "import opd.engine", "teachers, students, alignment and data_free never import the engine")
            for name in MAPPED
        ],
    ],
)
def test_violation_is_caught(tmp_path: Path, module: str, line: str, contract: str):
    for folder in ["opd", *MAPPED, "configs"]:
        shutil.copytree(ROOT / folder, tmp_path / folder, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    spec = find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    with (tmp_path / Path(spec.origin).relative_to(ROOT)).open("a") as source:
        source.write(f"\n{line}\n")

    linted = lint_imports(tmp_path)

    assert linted.returncode == 1
    assert f"{contract} BROKEN" in linted.stdout
