"""Plug-ins of third parties: what cannot be used is named, and left out where all are listed."""

import pytest

from opd.errors import UserError
from opd.registry import ENVIRONMENTS, PROMPT_SOURCES

CODE = """
class Bare: pass
class Plain: Config = dict
class Whole:
    from opd.envs.calculator import CalculatorConfig as Config
number = 3
"""


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("nowhere:Whole", "cannot be imported: ModuleNotFoundError: No module named"),
        ("theirs:Hole", "cannot be imported: AttributeError: .*'Hole'"),
        ("theirs:number", "must be a class with a dataclass `Config`"),
        ("theirs:Bare", "must be a class with a dataclass `Config`"),
        ("theirs:Plain", "must be a class with a dataclass `Config`"),
    ],
)
def test_what_cannot_be_used_is_named(installed, capsys, value, message):
    installed("theirs", CODE, environments=f"theirs = {value}")
    with pytest.raises(UserError, match=rf"^prompts\.name: environment 'theirs' \({value}\) {message}"):
        ENVIRONMENTS.load("theirs", "prompts.name")
    assert "theirs" not in dict(ENVIRONMENTS.each())
    assert capsys.readouterr().err.startswith("note: opd.environments: environment 'theirs'")


def test_a_module_that_exits_is_named(installed):
    installed("theirs", "raise SystemExit(3)", environments="theirs = theirs:Whole")
    with pytest.raises(UserError, match="SystemExit: 3"):
        ENVIRONMENTS.load("theirs", "prompts.name")


def test_one_that_can_is_among_all(installed, capsys):
    installed("theirs", CODE, environments="theirs = theirs:Whole")
    assert list(dict(ENVIRONMENTS.each())) == ["calculator", "reasoning_gym", "returns_desk", "theirs"]
    assert ENVIRONMENTS.load("theirs", "prompts.name").__name__ == "Whole"
    assert capsys.readouterr().err == ""


def test_a_prompt_source_derives_from_the_base(installed):
    """Else it lacks what runs ask of any."""
    installed("theirs", CODE, prompt_sources="theirs = theirs:Whole")
    with pytest.raises(UserError, match=r"prompt source 'theirs' .* must derive from opd\.plugins\.PromptSource$"):
        PROMPT_SOURCES.load("theirs", "prompts.type")
