"""Help, listing and validation answer without torch; `opd.__all__` is frozen."""

import subprocess
import sys

import pytest

import opd

LIGHT = [["--help"], ["ls"], ["validate", "quickstart"], ["config", "quickstart"], ["train", "--help"], ["config"]]
LIGHT += [["serve", "--help"], ["serve", "teacher", "--help"], ["sweep", "sweeps/divergences", "--dry-run"]]
LIGHT += [["ls", what] for what in ("sweeps", "suites", "protocols", "sft")]
LIGHT += [[command, "--help"] for command in ("align", "eval", "grade", "compare", "push", "replay", "sft")]
LIGHT += [["prompts", command, "--help"] for command in ("answer", "author", "export", "import")]


@pytest.mark.parametrize("arguments", LIGHT, ids=" ".join)
def test_imports_neither_torch_nor_transformers(arguments):
    code = (
        "import sys; sys.argv = ['opd', *sys.argv[1:]]\n"
        "from opd.cli import main\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "heavy = {'torch', 'transformers', 'accelerate', 'datasets'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_public_names_are_few_and_known():
    assert opd.__all__ == [
        "Prompt",
        "Rollout",
        "RunConfig",
        "ScoreRequest",
        "Scores",
        "Term",
        "Turn",
        "UserError",
        "evaluate",
        "load_config",
        "train",
    ]
    assert all(getattr(opd, name) is not None for name in opd.__all__)


def test_every_field_has_a_help_text():
    from opd.reference import fields

    rows = list(fields())
    assert len(rows) > 60
    assert [key for key, _, text in rows if not text] == []
