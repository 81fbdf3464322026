"""`opd ls`, `cp`, `config`: finding, copying and printing recipes."""

import sys

import pytest
from omegaconf import OmegaConf

import opd
from opd.cli import main
from opd.recipes import shipped_recipes


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
