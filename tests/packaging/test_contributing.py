"""CONTRIBUTING's tree names every file."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("opd", "students", "teachers", "alignment", "data_free", "configs", "benchmarks")


def test_the_tree_is_complete():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = {line.split()[0] for line in text.split("```")[1].splitlines() if line.strip()}
    files = {
        path.relative_to(ROOT).as_posix()
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*")
        if path.suffix in {".py", ".yaml"} and not any(parent.is_symlink() for parent in path.parents)
    }
    assert named == files
