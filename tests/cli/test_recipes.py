"""`opd ls`, `cp`, `config`: finding, copying and printing recipes."""

import sys

import pytest
from omegaconf import OmegaConf

import opd
from opd.cli import main
from opd.recipes import shipped_recipes
from opd.registry import CONTROLLERS, ENVIRONMENTS, MASKS, TERM_MAKERS


@pytest.fixture
def call(monkeypatch, capsys):
    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["opd", *arguments])
        with pytest.raises(SystemExit) as end:
            main()
        return end.value.code or 0, *capsys.readouterr()

    return run


def test_ls_names_each_with_its_purpose(call):
    code, out, _ = call("ls")
    assert code == 0
    listed = dict(line.split(maxsplit=1) for line in out.splitlines())
    assert listed == dict(shipped_recipes())
    assert "quickstart" in listed
    assert all(listed.values())


def test_cp_then_train_from_the_copy(call, tmp_path):
    code, out, _ = call("cp", "quickstart-topk", str(tmp_path / "mine.yaml"))
    assert (code, out.strip()) == (0, str(tmp_path / "mine.yaml"))
    assert opd.load_config(tmp_path / "mine.yaml") == opd.load_config("quickstart-topk")
    code, _, err = call("cp", "quickstart", str(tmp_path / "mine.yaml"))
    assert code == 2
    assert "exists" in err


def test_config_prints_what_load_config_reads(call, tmp_path):
    code, out, _ = call("config", "quickstart", "steps=7", "optimizer.lr=0.5")
    assert code == 0
    (tmp_path / "resolved.yaml").write_text(out)
    assert opd.load_config(tmp_path / "resolved.yaml") == opd.load_config("quickstart", ["steps=7", "optimizer.lr=0.5"])
    assert OmegaConf.create(out).steps == 7


def test_an_unknown_recipe_names_the_nearest(call):
    code, _, err = call("validate", "quikstart")
    assert code == 2
    assert "did you mean 'quickstart'" in err


@pytest.mark.parametrize("kind", ["environments", "controllers", "terms", "masks"])
def test_ls_names_plug_ins_with_their_purpose(call, kind):
    code, out, _ = call("ls", kind)
    assert code == 0
    listed = dict(line.split(maxsplit=1) for line in out.splitlines())
    builtin = {"environments": ENVIRONMENTS, "controllers": CONTROLLERS, "terms": TERM_MAKERS, "masks": MASKS}[kind].builtin
    assert listed.keys() == builtin.keys()
    assert not any(about.startswith(("See", "Environment `")) for about in listed.values())


THEIRS = '''
from dataclasses import dataclass

@dataclass(frozen=True)
class Config:
    depth: int = 3
    """How deep it is."""

class Well:
    """A well with water. More of it."""

    Config = Config
'''


def test_plug_ins_of_others(call, installed):
    installed("theirs", THEIRS, environments="well = theirs:Well\nhole = theirs:Hole")
    note = "note: opd.environments: environment 'hole' (theirs:Hole) cannot be imported: AttributeError"
    for command in (("ls", "environments"), ("config",)):
        code, out, err = call(*command)
        assert code == 0
        assert err.startswith(note)
        assert err.count("\n") == 1
        assert "hole" not in out.replace("whole", "")
        assert ("A well with water\n" if command[0] == "ls" else "(name: well) How deep it is.") in out


def test_validate_says_what_is_odd(call):
    code, out, err = call("validate", "stride-quickstart", "rollout.stride.keep_above=1")
    assert (code, out) == (0, "stride-quickstart: ok\n")
    assert err.startswith("WARNING: rollout.stride.keep_above is 1, above every log-prob")


def test_validate_checks_every_run_of_a_sweep(call):
    code, out, err = call("validate", "sweeps/gate")
    assert (code, out, err) == (0, "sweeps/gate: ok (12 runs)\n", "")
    code, out, err = call("validate", "sweeps/gate", "terms.group_reward.eps=0")
    assert (code, out) == (2, "")
    assert err.startswith("error: variants.outcome: terms.group_reward.eps is 0.0")
    code, _, err = call("train", "sweeps/gate")
    assert code == 2
    assert "is a sweep: run opd sweep sweeps/gate" in err


def test_validate_looks_at_the_templates_of_prompts(call):
    code, _, err = call("validate", "quickstart", "prompts.template='{prompt} {answer}'")
    assert code == 2
    assert err.startswith("error: prompts.template: {answer} stands for nothing; allowed is {prompt}")


def test_a_traceback_where_it_is_asked_for(call, installed, monkeypatch):
    installed("theirs", "1 / 0", environments="well = theirs:Well")
    asked = ("validate", "stride-quickstart", "prompts.name=well")
    assert call(*asked)[2].count("\n") == 1
    monkeypatch.setenv("OPD_TRACEBACK", "1")
    _, _, err = call(*asked)
    assert "ZeroDivisionError" in err
    assert err.splitlines()[-1].startswith("error: prompts.name: environment 'well' (theirs:Well) cannot be imported")
