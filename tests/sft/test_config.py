"""The recipe of `opd sft`: what it refuses, and the shipped ones."""

import math
from importlib import metadata

import pytest

from opd.config import load_config
from opd.errors import UserError
from opd.recipes import shipped_recipes, shipped_sft
from opd.sft.config import build_sft_config, check_files, load_sft_config, to_mapping


@pytest.mark.parametrize(("name", "description"), list(shipped_sft()))
def test_shipped_recipes_load(name, description):
    config = load_sft_config(name, ["student.model=a/b", "dataset.path=c/d"])
    assert build_sft_config(to_mapping(config)) == config
    assert description
    assert name not in dict(shipped_recipes())


def test_the_paper_s_cold_start():
    config = load_sft_config("sft/compass", ["student.model=a/b", "dataset.path=c/d"])
    optimizer = config.optimizer
    assert (optimizer.lr, optimizer.weight_decay, optimizer.schedule, optimizer.warmup_ratio) == (2e-5, 1e-6, "cosine", 0.1)
    assert (config.batch, config.max_tokens, config.epochs, config.precision) == (32, 32768, 1.0, "bfloat16")
    assert config.packing
    assert config.student.lora is None


def test_number_of_updates(sft_config):
    assert sft_config().num_steps(8) == 6  # 3 an epoch
    assert sft_config(epochs=0.5).num_steps(8) == 2
    assert sft_config(steps=4).num_steps(8) == 4


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({"bacth": 1}, "did you mean 'batch'"),
        ({"batch": 0}, "batch is 0"),
        ({"epochs": 0}, "epochs is 0"),
        ({"steps": 0}, "steps is 0"),
        ({"checkpoint": {"keep": 0}}, "checkpoint.keep is 0"),
        ({"checkpoint": {"every": -1}}, "checkpoint.every is -1"),
        ({"epochs": math.nan}, "epochs is nan"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 99999999999999}, "below 2\\*\\*32"),
        ({"student": {"model": "a/b", "lora": {"r": 0}}}, "student.lora.r is 0"),
        ({"student": {"model": "a/b", "lora": {"dropout": 1.0}}}, "student.lora.dropout is 1"),
        ({"optimizer": {"lr": 0.0}}, "optimizer.lr is 0"),
        ({"optimizer": {"lr": math.nan}}, "optimizer.lr is nan"),
        ({"optimizer": {"betas": [2, 3]}}, "optimizer.betas"),
        ({"optimizer": {"betas": [0.9]}}, "optimizer.betas"),
        ({"optimizer": {"eps": -1.0}}, "optimizer.eps"),
        ({"optimizer": {"weight_decay": -5.0}}, "optimizer.weight_decay"),
        ({"optimizer": {"max_grad_norm": -1.0}}, "optimizer.max_grad_norm"),
        ({"optimizer": {"warmup_ratio": 2.0}}, "optimizer.warmup_ratio"),
        ({"dataset": {"path": "x", "columns": {"complete": "y"}}}, "did you mean 'completion'"),
        ({"dataset": {}}, "dataset.path is missing"),
        ({"precision": "float16"}, "precision"),
        ({"report_to": ["mlflow"]}, "report_to"),
    ],
)
def test_bad_recipes(raw_sft, section, expected):
    with pytest.raises(UserError, match=expected):
        build_sft_config(raw_sft(**section))


def test_a_tracker_that_is_not_installed(sft_config, monkeypatch):
    def version(name):
        raise metadata.PackageNotFoundError(name)

    check_files(sft_config())
    monkeypatch.setattr("opd.sft.config.version", version)
    with pytest.raises(UserError, match=r"report_to: wandb is not installed.*pip install 'opd\[wandb\]'"):
        check_files(sft_config(report_to=["wandb"]))


def test_a_recipe_of_the_other_command_is_named_as_such():
    with pytest.raises(UserError, match="recipe: sft/quickstart is a recipe of opd sft"):
        load_config("sft/quickstart")
    for name in ("quickstart", "compass-quickstart"):
        with pytest.raises(UserError, match=f"recipe: {name} is a recipe of opd train"):
            load_sft_config(name)
