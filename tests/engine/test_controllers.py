"""A rollout controller that reads the teacher's scores while the student decodes, in process and over a server."""

import subprocess
import sys
import types
from dataclasses import dataclass

import numpy as np
import pytest

import opd
from opd.config import build_config
from opd.errors import UserError
from opd.plugins import RolloutController
from opd.registry import CONTROLLERS


@dataclass(frozen=True)
class StopBelowConfig:
    threshold: float = -3.0
    """Mean log-prob of a chunk below which the rollout stops."""


class StopBelow(RolloutController):
    """Stops after a chunk that the teacher finds unlikely."""

    Config = StopBelowConfig
    needs_scores = True

    def __init__(self, config, run):
        self.threshold, self.unit = config.threshold, run.sampler.chunk_tokens

    @staticmethod
    def check(config, run):
        if config.threshold >= 0:
            raise UserError("rollout.stop_below.threshold: must be negative")

    def stops(self, progress):
        assert progress.logps is not None
        assert len(progress.logps) <= len(progress.sampled_ids)
        return bool(len(progress.logps)) and float(np.nanmean(progress.logps[-self.unit :])) < self.threshold


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    module = types.ModuleType("a_third_partys_controller")
    module.StopBelow = StopBelow  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(CONTROLLERS.builtin, "stop_below", f"{module.__name__}:StopBelow")


@pytest.fixture
def recipe(raw_recipe):
    """`recipe(threshold, **sections)`: chunks of 3 tokens, watched."""

    def build(threshold, **sections):
        rollout = {"stop_below": {"threshold": threshold}}
        return raw_recipe(**{"rollout": rollout, "sampler": {"chunk_tokens": 3}, **sections})

    return build


def test_it_stops_rollouts(recipe, tmp_path, metrics_of):
    opd.train(build_config(recipe(-4.0)), tmp_path / "run")
    rows = metrics_of(tmp_path / "run")
    assert 0 < sum(row["stopped_rate"] for row in rows) < len(rows)
    assert all(row["trained_tokens"] == row["sampled_tokens"] for row in rows)
    assert sum(row["discarded_tokens"] for row in rows) > 0


def test_it_reads_a_teacher_of_another_tokenizer(aligned_recipe, tmp_path, metrics_of):
    settings = {"sampler": {"chunk_tokens": 3}, "terms": {"reverse_kl": {"form": "sampled"}}}
    stopped = aligned_recipe(**settings, rollout={"stop_below": {"threshold": -4.0}})
    opd.train(build_config(stopped), tmp_path / "run")
    rows = metrics_of(tmp_path / "run")
    assert 0 < sum(row["stopped_rate"] for row in rows) < len(rows)
    assert sum(row["discarded_tokens"] for row in rows) > 0
    opd.train(build_config({**stopped, "rollout": {"stop_below": {"threshold": -1e9}}}), tmp_path / "watched")
    opd.train(build_config(aligned_recipe(**settings)), tmp_path / "plain")
    for watched, plain in zip(metrics_of(tmp_path / "watched"), metrics_of(tmp_path / "plain"), strict=True):
        assert watched["stopped_rate"] == watched["discarded_tokens"] == watched["reused_tokens"] == 0
        assert {name: watched[name] for name in plain} == plain


def test_without_a_stop_the_run_is_the_plain_one(recipe, raw_recipe, tmp_path, metrics_of):
    opd.train(build_config(recipe(-1e9)), tmp_path / "watched")
    opd.train(build_config(raw_recipe(sampler={"chunk_tokens": 3})), tmp_path / "plain")
    for watched, plain in zip(metrics_of(tmp_path / "watched"), metrics_of(tmp_path / "plain"), strict=True):
        assert watched["stopped_rate"] == watched["discarded_tokens"] == watched["reused_tokens"] == 0
        assert {name: watched[name] for name in plain} == plain


@pytest.mark.parametrize("lookahead", [0, 1])
def test_served_and_in_process_stop_at_the_same_places(recipe, tmp_path, metrics_of, lookahead):
    raw = recipe(-4.0, lookahead=lookahead)
    opd.train(build_config(raw), tmp_path / "here")
    model = raw["teachers"]["default"]["model"]
    command = [sys.executable, "-m", "opd", "serve", "teacher", "--model", model, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        url = server.stdout.readline().split(" at ")[1].split()[0]
        try:
            opd.train(build_config({**raw, "teachers": {"default": {"url": url}}}), tmp_path / "there")
        finally:
            server.kill()
    for mine, other in zip(metrics_of(tmp_path / "here"), metrics_of(tmp_path / "there"), strict=True):
        for name, value in mine.items():
            if name == "discarded_tokens":
                continue  # what was sampled in vain depends on who was faster
            assert other[name] == pytest.approx(value, abs=1e-5, rel=1e-5), name


def test_its_settings_are_checked(recipe):
    with pytest.raises(UserError, match=r"rollout\.stop_below\.threshold: must be negative"):
        build_config(recipe(0.5))
    with pytest.raises(UserError, match=r"unknown key 'rollout\.stop_below\.treshold'.*threshold"):
        build_config(recipe(0.5, rollout={"stop_below": {"treshold": 1}}))
    with pytest.raises(UserError, match="no rollout controller is called 'stop_bellow'"):
        build_config(recipe(0.5, rollout={"stop_bellow": {}}))
