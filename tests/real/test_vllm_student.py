"""The student on the real vLLM, on a CPU: what it samples is what the trainer thinks it is, before and after each sync."""

import json
import os
import re
import subprocess
import sys
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import opd
from opd.config import build_config
from opd.errors import UserError
from opd.students.client.sampler import RemoteSampler

pytestmark = [pytest.mark.real, pytest.mark.timeout(1800)]
MODEL = Path(os.environ.get("OPD_REAL_MODELS", Path.home() / ".cache" / "opd-real-models")) / "smollm2"
PROMPTS = [f"Q: What is {n} plus {2 * n + 1}? Explain.\nA:" for n in range(12, 24)]


@contextmanager
def serving():
    python = Path(os.environ["OPD_VLLM"]) / "python"
    command = [sys.executable, "-m", "opd", "serve", "student", "--backend", "vllm", "--vllm-python", str(python)]
    command += ["--model", str(MODEL), "--dtype", "float32", "--max-model-len", "256", "--chunk-tokens", "8", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            yield re.findall(r"http://\S+", server.stdout.readline())[0]
        finally:
            server.terminate()
            server.wait(60)


@pytest.fixture(scope="module")
def url():
    with serving() as address:
        yield address


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    """A teacher without some of the student's layers: much to learn, so that versions differ."""
    folder = tmp_path_factory.mktemp("vllm-student")
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.bfloat16)
    with torch.no_grad():
        for layer in model.model.layers[8:14]:
            layer.mlp.down_proj.weight.zero_()
    model.save_pretrained(folder / "teacher")
    AutoTokenizer.from_pretrained(MODEL).save_pretrained(folder / "teacher")
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"problem": text}) + "\n" for text in PROMPTS))

    def build(url, **sections):
        return {
            "steps": 4,
            "student": {"model": str(MODEL)},
            "teachers": {"default": {"model": str(folder / "teacher")}},
            "prompts": {"path": str(folder / "prompts.jsonl"), "columns": {"prompt": "problem"}},
            "batch": {"prompts": 6, "rollouts_per_prompt": 2},
            "sampling": {"max_new_tokens": 32},
            "sampler": {"url": url, "timeout_s": 300.0, "deadline_s": 900.0},
            "terms": {"reverse_kl": {"form": "full"}},
            "objective": {"precision": "float32"},
            "optimizer": {"lr": 5e-4, "schedule": "constant", "warmup_ratio": 0.0},
            "checkpoint": {"every": 0},
            **sections,
        }

    return build


@torch.no_grad()
def log_probs(student):
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    rows = [student(torch.tensor([tokenizer(text)["input_ids"]])).logits[0].float() for text in PROMPTS[:4]]
    return torch.cat(rows).log_softmax(-1)


def test_sampler_and_trainer_agree_before_and_after_each_sync(url, recipe, tmp_path, monkeypatch):
    versions, sync = [], RemoteSampler.sync

    def watched(self, student, version):
        if version == len(versions):
            versions.append(log_probs(student))
        sync(self, student, version)

    monkeypatch.setattr(RemoteSampler, "sync", watched)
    opd.train(build_config(recipe(url)), tmp_path / "run")
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    mismatches = [row["mismatch"] for row in rows]
    moved = [float((new.exp() * (new - old)).sum(-1).mean()) for old, new in pairwise(versions)]
    print("mismatch", mismatches, "KL between versions", moved)
    assert len(mismatches) == 4
    assert max(mismatches) <= 0.05
    assert len(moved) >= 3
    assert min(moved[:3]) >= 0.2


def test_a_skipped_sync_is_found_out(url, recipe, tmp_path, monkeypatch):
    sync = RemoteSampler.sync

    def skipping(self, student, version):
        if version == 2:
            self.version = version
        else:
            sync(self, student, version)

    monkeypatch.setattr(RemoteSampler, "sync", skipping)
    with pytest.raises(UserError, match=r"sampler\.max_mismatch: .* differ .* by \d\.\d+ nats"):
        opd.train(build_config(recipe(url)), tmp_path / "run")


def test_a_stopped_turn_and_one_that_goes_on(url, recipe, tmp_path):
    """Early stops abort requests on the server; the run's figures are there."""
    raw = recipe(url, steps=2, rollout={"early_stop": {"stop_below": -1.0}})
    raw["sampler"]["chunk_tokens"] = 8
    opd.train(build_config(raw), tmp_path / "run")
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 2
    assert all(row["mismatch"] <= 0.05 for row in rows)
    assert sum(row["sampled_tokens"] for row in rows) < 2 * 12 * 32
