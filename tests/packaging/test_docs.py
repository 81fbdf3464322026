"""The documentation names recipe keys, commands, pages and tests that are there."""

import re
import shlex
from pathlib import Path

import pytest

from opd.config import load_config
from opd.reference import fields

ROOT = Path(__file__).parents[2]
DOCS = sorted((ROOT / "docs").glob("*.md"))
BLOCKS = re.compile(r"^```\n(.*?)^```", re.MULTILINE | re.DOTALL)


def commands(page):
    """The words of each `opd train` and `opd launch` in a page's blocks, from the recipe on."""
    text = "".join(BLOCKS.findall((ROOT / "docs" / page).read_text(encoding="utf-8"))).replace("\\\n", " ")
    text = re.sub(r"\$\(echo \S+ \|[^)]*\)", "http://a:1,http://b:1", text)
    found = re.findall(r"\bopd (?:train|launch) (.*)", text)
    return [shlex.split(one) for one in found]


@pytest.mark.parametrize("page", ["scaling.md", "migration.md"])
def test_commands_are_recipes_with_keys_that_there_are(page):
    found = commands(page)
    assert found
    for recipe, *words in found:
        load_config(recipe, [word for word in words if "=" in word])


def test_the_keys_of_the_migration_tables_are_there():
    known = {key.replace("teachers.NAME", "teachers.T") for key, _, _ in fields()}
    sections = {key.partition(".")[0] for key in known}
    rows = [line for line in (ROOT / "docs/migration.md").read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    named = {key for row in rows for key in re.findall(r"`([a-z_]+(?:\.[A-Za-z_]+)+)", row.split(" | ", 1)[1])}
    ours = {re.sub(r"^teachers\.\w+", "teachers.T", key) for key in named if key.partition(".")[0] in sections}
    assert len(ours) > 40
    assert [key for key in sorted(ours) if not any(f"{one}.".startswith(f"{key}.") for one in known)] == []


@pytest.mark.parametrize("page", DOCS, ids=lambda path: path.stem)
def test_what_a_page_refers_to_is_there(page):
    text = page.read_text(encoding="utf-8")
    linked = re.findall(r"\]\(([\w./-]+)(?:#[\w-]+)?\)", text)
    cited = re.findall(r"\b(?:tests|opd|teachers|students)/[\w/]+\.py\b", text)
    assert [name for name in linked if not (page.parent / name).exists()] == []
    assert [name for name in cited if not (ROOT / name).exists()] == []
