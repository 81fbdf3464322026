"""With `lookahead: 1` a step's rollouts come from the student before the last update; everything else stays as it was."""

import asyncio
import json
from pathlib import Path

import pytest

import opd
from opd.config import build_config
from opd.errors import UserError

SAMPLED = {"reverse_kl": {"form": "sampled", "advantage_clip": 5.0}}


class Killed(Exception): ...


@pytest.fixture
def die_after(monkeypatch):
    """`die_after(step)`: the next run ends as if killed once `step` is written down."""
    from opd.recorder import Recorder

    real = Recorder.step

    def arm(last: int) -> None:
        def step(self, number, landed, metrics):
            real(self, number, landed, metrics)
            if number == last:
                raise Killed

        monkeypatch.setattr(Recorder, "step", step)

    yield arm
    monkeypatch.undo()


def test_rollouts_are_one_update_behind(raw_recipe, tmp_path, metrics_of):
    opd.train(build_config(raw_recipe(lookahead=1)), tmp_path / "run")
    assert [row["staleness"] for row in metrics_of(tmp_path / "run")] == [0, 1, 1, 1, 1, 1]
    opd.train(build_config(raw_recipe()), tmp_path / "fresh")
    assert {row["staleness"] for row in metrics_of(tmp_path / "fresh")} == {0}


def test_the_rollouts_are_those_of_the_student_before(raw_recipe, tmp_path):
    """At rate 0 nothing moves, so both ways must see the same rollouts and the same losses."""
    rows = {}
    for lookahead in (0, 1):
        out = tmp_path / str(lookahead)
        opd.train(build_config(raw_recipe(lookahead=lookahead, optimizer={"lr": 0.0})), out)
        rows[lookahead] = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    for fresh, stale in zip(rows[0], rows[1]):
        for key in ("loss", "reverse_kl", "sampled_tokens", "entropy"):
            assert stale[key] == pytest.approx(fresh[key], abs=1e-6)


@pytest.mark.parametrize("terms", [SAMPLED, {"reverse_kl": {"form": "topk", "k": 6}}, {"reverse_kl": {"form": "full"}}])
@pytest.mark.parametrize("killed_after", [1, 2, 3, 5])
def test_resuming_equals_the_uninterrupted_run(raw_recipe, tmp_path, metrics_of, die_after, terms, killed_after):
    recipe = raw_recipe(lookahead=1, terms=terms, checkpoint={"every": 2})
    opd.train(build_config(recipe), tmp_path / "whole")
    die_after(killed_after)
    with pytest.raises(Killed):
        opd.train(build_config(recipe), tmp_path / "part")
    die_after(10**9)
    opd.train(build_config(recipe), tmp_path / "part", resume=True)
    assert metrics_of(tmp_path / "part") == metrics_of(tmp_path / "whole")


def test_the_rollouts_in_flight_are_in_the_checkpoint(raw_recipe, tmp_path):
    opd.train(build_config(raw_recipe(lookahead=1, checkpoint={"every": 2, "keep": 9})), tmp_path / "run")
    checkpoints = tmp_path / "run" / "checkpoints"
    kept = {path.name: (path / "trainer" / "in_flight.safetensors").exists() for path in checkpoints.iterdir()}
    assert kept == {"step-2": True, "step-4": True, "step-6": False}  # nothing follows the last step


def test_sampled_advantages_are_corrected_for_the_older_policy(raw_recipe, tmp_path, monkeypatch):
    from opd.objective import terms

    caps = []
    real = terms.policy_gradient

    def spy(logp, inputs):
        caps.append(inputs["importance_cap"])
        return real(logp, inputs)

    monkeypatch.setitem(terms.KINDS, "policy_gradient", spy)
    for lookahead, expected in ((0, {None}), (1, {2.0})):
        caps.clear()
        opd.train(build_config(raw_recipe(steps=2, lookahead=lookahead, terms=SAMPLED)), tmp_path / str(lookahead))
        assert set(caps) == expected


def test_only_one_step_ahead(raw_recipe):
    with pytest.raises(UserError, match="lookahead is 2: it must be 0 or 1"):
        build_config(raw_recipe(lookahead=2))


def test_an_error_while_sampling_ahead_ends_the_run_cleanly(raw_recipe, tmp_path, monkeypatch):
    from opd.strategies.reverse_kl import ReverseKL

    real = ReverseKL.collect
    seen = []

    async def collect(self, rollout, models):
        seen.append(rollout)
        if len(seen) == 9:
            raise UserError("teachers.default.url: nobody answers")
        return await real(self, rollout, models)

    monkeypatch.setattr(ReverseKL, "collect", collect)
    with pytest.raises(UserError, match="nobody answers"):
        opd.train(build_config(raw_recipe(lookahead=1)), tmp_path / "run")
    assert not asyncio._get_running_loop()
    assert Path(tmp_path / "run" / "metrics.jsonl").exists()
