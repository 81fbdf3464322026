"""What an installed opd consists of: the wheel built from the sdist, compared with the repository."""

import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).parents[2]

# folder of the repository -> its place in the wheel
PLACES = {
    "opd": "opd",
    "teachers": "opd/teachers",
    "students": "opd/students",
    "alignment": "opd/alignment",
    "data_free": "opd/data_free",
    "configs": "opd/configs",
}


def repository_files(folder: str) -> list[str]:
    """The wheel names of a folder's files; the links from opd/ to the other folders are not followed."""
    base = ROOT / folder
    files = [path for path in base.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    return [f"{PLACES[folder]}/{path.relative_to(base).as_posix()}" for path in files]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Without --sdist or --wheel, `build` makes the wheel from the sdist it has just made: the only way that shows a
    # folder which the sdist has lost.
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(ROOT)]
    built = subprocess.run(command, cwd=out, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    [wheel] = out.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def names(wheel: Path) -> list[str]:
    with ZipFile(wheel) as archive:
        return archive.namelist()


def test_top_level_names_are_opd_and_its_metadata(wheel: Path, names: list[str]):
    distribution = "-".join(wheel.name.split("-")[:2])
    assert distribution == "opd-0.1.0"
    assert {name.split("/")[0] for name in names} == {"opd", f"{distribution}.dist-info"}


def test_wheel_holds_each_file_of_the_repository_once(names: list[str]):
    expected = [name for folder in PLACES for name in repository_files(folder)]
    assert sorted(name for name in names if name.startswith("opd/")) == sorted(expected)


@pytest.mark.parametrize("folder", [folder for folder in PLACES if folder != "configs"])
def test_wheel_holds_each_package(names: list[str], folder: str):
    assert f"{PLACES[folder]}/__init__.py" in names


def test_wheel_holds_recipes(names: list[str]):
    assert any(name.startswith("opd/configs/") and name.endswith(".yaml") for name in names)


def test_wheel_has_licence(names: list[str]):
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
