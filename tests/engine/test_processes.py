"""One and two processes give the same loss and gradient norm at each step."""

import json
import shutil
import subprocess
import sys

import pytest
from omegaconf import OmegaConf


@pytest.mark.parametrize(
    "sections",
    [
        {"terms": {"reverse_kl": {"form": "full"}, "overlap": {"k": 6, "num_rollouts": 3}}},
        pytest.param(
            {"terms": {"reverse_kl": {"form": "sampled"}}, "objective": {"updates_per_batch": 2, "micro_batch_tokens": 40}},
            marks=pytest.mark.slow,
        ),
        pytest.param({"terms": {"reverse_kl": {"form": "sampled"}}, "lookahead": 1}, marks=pytest.mark.slow),
        {
            "terms": {"compass": {"beta": 0.5, "baseline": "mean", "advantage_clip": 1.0}},
            "objective": {"updates_per_batch": 2},
        },
    ],
    ids=["full-overlap", "sampled-two-updates", "sampled-lookahead", "compass"],
)
def test_two_processes_equal_one(raw_recipe, aligned_recipe, tmp_path, metrics_of, sections):
    """The best checkpoint included: all processes must see the same accuracies and decide alike. Diagnostics too."""
    base = aligned_recipe if "compass" in sections.get("terms", {}) else raw_recipe
    raw = base(steps=4, **{"eval": raw_recipe()["eval"], **sections})
    (tmp_path / "reward.py").write_text("def score(response, answer, row):\n    return len(response) % 2\n")
    sampled = {"samples": 4, "temperature": 1.0, "reward": f"{tmp_path}/reward.py:score", "kl_prompts": 0}
    chosen = {**raw["prompts"], "limit": 5}
    raw["eval"] = {**raw["eval"], **sampled, "selection": chosen, "every": 1, "collapse_tokens": 60}
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(OmegaConf.to_yaml(OmegaConf.create(raw)))
    for count in (1, 2):
        command = [sys.executable, "-m", "opd", "train", str(recipe), "--out", str(tmp_path / str(count))]
        done = subprocess.run([*command, "--processes", str(count)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    one, two = metrics_of(tmp_path / "1"), metrics_of(tmp_path / "2")
    assert len(one) == len(two) == 4
    for a, b in zip(one, two):
        assert ("topk_overlap" in a) == ("overlap" in sections["terms"])
        for name in ("loss", "grad_norm", "entropy", *({"student_topk_kl", "topk_overlap", "overlap_mass"} & set(a))):
            assert b[name] == pytest.approx(a[name], rel=1e-5, abs=1e-6)
        assert a["sampled_tokens"] == b["sampled_tokens"]
    summaries = [json.loads((tmp_path / count / "summary.json").read_text()) for count in ("1", "2")]
    assert summaries[0]["selected"] == summaries[1]["selected"]
    starts = [json.loads((tmp_path / count / "eval" / "step-0.json").read_text()) for count in ("1", "2")]
    assert starts[0]["distinct_4grams"] == starts[1]["distinct_4grams"] > 0
    kept = [sorted(path.name for path in (tmp_path / count / "checkpoints").iterdir()) for count in ("1", "2")]
    assert kept[0] == kept[1]


@pytest.mark.parametrize("lookahead", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_two_processes_resume(raw_recipe, tmp_path, metrics_of, lookahead):
    """From the second of four steps; with lookahead the rollouts of both processes are in flight there."""
    recipe, run = tmp_path / "recipe.yaml", tmp_path / "run"
    raw = raw_recipe(steps=4, lookahead=lookahead, eval={}, checkpoint={"every": 2, "keep": 9})
    recipe.write_text(OmegaConf.to_yaml(OmegaConf.create(raw)))
    command = [sys.executable, "-m", "opd", "train", str(recipe), "--out", str(run), "--processes", "2"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    whole = metrics_of(run)
    assert (run / "checkpoints" / "step-2" / "trainer" / "in_flight.safetensors").exists() == bool(lookahead)
    shutil.rmtree(run / "checkpoints" / "step-4")
    done = subprocess.run([*command, "--resume"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "resuming after step 2" in done.stderr
    assert metrics_of(run) == whole


def test_a_mistake_is_said_once_and_ends_both(raw_recipe, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(OmegaConf.to_yaml(OmegaConf.create(raw_recipe(sampling={"max_new_tokens": 4, "max_context": 2}))))
    command = [sys.executable, "-m", "opd", "train", str(recipe), "--out", str(tmp_path / "run"), "--processes", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "longer than the context" in done.stderr
