import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from opd.teachers.experts import Experts
from opd.tiny import is_tiny, resolve
from opd.tiny.arithmetic import splits
from opd.tiny.cache import cached
from opd.tiny.members import MEMBERS, Model, digest
from opd.tiny.training import learning_rate_factor

AS_THEY_ARE = dict(MEMBERS)


@pytest.fixture
def real_members(monkeypatch, cache):
    """The members as they are, with their whole training."""
    for name, member in AS_THEY_ARE.items():
        monkeypatch.setitem(MEMBERS, name, member)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty cache, and models that train for a few steps only and are measured on a few problems."""
    monkeypatch.setenv("OPD_CACHE", str(tmp_path))
    few = {"validation": splits()["validation"][:8]}
    monkeypatch.setattr("opd.tiny.solutions.splits", lambda: few)
    monkeypatch.setattr("opd.tiny.episodes.NUM_VALIDATION", 8)
    monkeypatch.setattr("opd.tiny.authoring.NUM_VALIDATION", 8)
    for name, member in MEMBERS.items():
        if isinstance(member, Model):
            training = replace(member.training, max_steps=3, check_every_steps=2, batch_size=4, min_accuracy=0.0)
            monkeypatch.setitem(MEMBERS, name, replace(member, training=training))
    return tmp_path


def folder_bytes(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_is_tiny():
    assert is_tiny("tiny:teacher")
    assert not is_tiny("org/tiny-model")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tiny:techer", "did you mean tiny:teacher"),
        ("tiny:zzz", "There are tiny:teacher, tiny:student, .*, tiny:prompts, tiny:heldout"),
        ("teacher", "did you mean tiny:teacher"),
        ("tiny:teacher@", "whole number"),
        ("tiny:teacher@one", "whole number"),
        ("tiny:teacher@-1", "whole number"),
    ],
)
def test_a_wrong_name_is_refused_with_the_right_ones(name, message):
    with pytest.raises(ValueError, match=message):
        resolve(name)


def test_a_model_folder_loads_with_transformers():
    folder = resolve("tiny:teacher")
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert model.dtype == torch.float32
    assert model.config.tie_word_embeddings
    assert model.config.max_position_embeddings == 256
    assert model.config.vocab_size % 8 == 0
    assert model.config.vocab_size > len(tokenizer)
    for config in (model.config, model.generation_config):
        assert (config.eos_token_id, config.pad_token_id) == (tokenizer.eos_token_id, tokenizer.pad_token_id)
    assert json.loads((folder / "tiny.json").read_text())["num_steps"] == 3


def test_teacher_and_student_share_a_tokenizer_and_differ_in_size():
    teacher, student = resolve("tiny:teacher"), resolve("tiny:student")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (teacher / name).read_bytes() == (student / name).read_bytes()
    sizes = [AutoModelForCausalLM.from_pretrained(folder).num_parameters() for folder in (teacher, student)]
    assert sizes[1] <= sizes[0] / 2


def test_a_member_with_experts_is_routed_to_some_of_them():
    folder = resolve("tiny:moe-teacher")
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    assert (model.config.model_type, model.config.num_experts) == ("qwen2_moe", 8)
    assert Experts(model.get_decoder()).num_active == 4
    assert model.config.shared_expert_intermediate_size == 96
    assert json.loads((folder / "tiny.json").read_text())["member"]["experts"]["num_active"] == 4
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (folder / name).read_bytes() == (resolve("tiny:teacher") / name).read_bytes()


def test_the_weak_reference_is_of_the_teachers_family():
    teacher, weak = resolve("tiny:teacher"), resolve("tiny:weak")
    assert (teacher / "config.json").read_bytes() == (weak / "config.json").read_bytes()
    assert (teacher / "tokenizer.json").read_bytes() == (weak / "tokenizer.json").read_bytes()


def test_the_calculators_models_share_a_small_vocabulary_and_a_short_rotary_base():
    teacher, student = resolve("tiny:calculator-teacher"), resolve("tiny:calculator-student")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (teacher / name).read_bytes() == (student / name).read_bytes()
    models: list[Any] = [AutoModelForCausalLM.from_pretrained(folder) for folder in (teacher, student)]
    assert models[1].num_parameters() <= models[0].num_parameters() / 2
    assert [model.config.vocab_size for model in models] == [24, 24]
    assert [model.config.rope_parameters["rope_theta"] for model in models] == [100.0, 100.0]


def test_sharpness_scales_all_logits(monkeypatch):
    plain = replace(MEMBERS["other-student"], sharpness=None)  # type: ignore[type-var]
    ids = torch.arange(6, 26)[None]
    sharp = AutoModelForCausalLM.from_pretrained(resolve("tiny:other-student"))
    monkeypatch.setitem(MEMBERS, "other-student", plain)
    flat = AutoModelForCausalLM.from_pretrained(resolve("tiny:other-student"))
    with torch.no_grad():
        torch.testing.assert_close(sharp(ids).logits, 1.5 * flat(ids).logits)


def test_the_student_stops_when_it_is_accurate_enough():
    assert json.loads((resolve("tiny:student") / "tiny.json").read_text())["num_steps"] == 2


def test_a_model_that_stays_too_inaccurate_is_not_kept(cache, monkeypatch):
    member = MEMBERS["student"]
    assert isinstance(member, Model)
    monkeypatch.setitem(MEMBERS, "student", replace(member, training=replace(member.training, min_accuracy=0.9)))
    with pytest.raises(RuntimeError, match="must reach"):
        resolve("tiny:student")
    assert [path for path in (cache / "tiny").iterdir() if path.is_dir()] == []


def test_the_same_seed_gives_the_same_bytes(tmp_path, monkeypatch):
    first = folder_bytes(resolve("tiny:student@1"))
    other = folder_bytes(resolve("tiny:student@2"))
    monkeypatch.setenv("OPD_CACHE", str(tmp_path / "again"))
    torch.rand(1)
    assert folder_bytes(resolve("tiny:student@1")) == first
    assert other["model.safetensors"] != first["model.safetensors"]


def test_building_leaves_the_callers_torch_as_it_was():
    rng, threads = torch.get_rng_state(), torch.get_num_threads()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.no_grad():
            resolve("tiny:student")
            assert not torch.is_grad_enabled()
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(torch.get_rng_state(), rng)
    assert torch.get_num_threads() == threads


def test_data_is_the_same_file_for_every_seed():
    assert resolve("tiny:heldout@3") == resolve("tiny:heldout")
    rows = [json.loads(line) for line in resolve("tiny:heldout").read_text().splitlines()]
    assert len(rows) == 500
    assert set(rows[0]) == {"id", "problem", "answer"}
    assert set(json.loads(resolve("tiny:prompts").read_text().splitlines()[0])) == {"id", "problem"}


def test_the_digest_follows_the_settings(monkeypatch):
    before = digest("student")
    assert len({before, digest("student", seed=1), digest("teacher")}) == 3
    member = MEMBERS["student"]
    assert isinstance(member, Model)
    monkeypatch.setitem(MEMBERS, "student", replace(member, num_layers=1))
    assert digest("student") != before


def test_members_that_users_have_cached_keep_their_keys(real_members):
    """Raise `VERSION` instead where they are to be built anew."""
    keys = {
        "teacher": "1bba31354051512c",
        "student": "c7c91db489cbf465",
        "weak": "eb9d2efcb2212483",
        "moe-teacher": "cf2c1fada6160f70",
        "other-student": "8719e0052bab8efe",
        "hasty-student": "127e3207258c9891",
        "calculator-teacher": "2766949aed0bbfff",
        "calculator-student": "2add9380cd54be92",
        "long-teacher": "b0906d17ac8c7810",
        "long-student": "0e3299c3109fb5b5",
        "brief-student": "bfe6d7f0e2a7307d",
        "prompts": "8e9db82656860cb1",
        "heldout": "9eda36abee1375d2",
        "half-solvable-prompts": "10706884b9795fd3",
        "heldout-carry": "0a73da11b86a8cf1",
        "heldout-no-carry": "3689872207bf17d5",
        "long-prompts": "b74a9d41e16e575c",
        "long-heldout": "adfcb08c13af2f19",
    }
    assert {name: digest(name) for name in keys} == keys


def test_a_cache_hit_imports_neither_torch_nor_the_training_code():
    resolve("tiny:heldout")
    code = (
        "import sys, opd.tiny\n"
        "assert opd.tiny.resolve('tiny:heldout').is_file()\n"
        "assert opd.tiny.cache.cached('model', None).is_dir()\n"
        "print({'torch', 'transformers', 'tokenizers', 'opd.tiny.training', 'filelock'} & set(sys.modules))"
    )
    cached("model", lambda folder: None)
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "set()"


SLOW_BUILD = """
import os, time
from opd.tiny.cache import cached

def build(folder):
    (folder / "first").write_text(str(os.getpid()))
    time.sleep(1)
    (folder / "second").write_text(str(os.getpid()))

folder = cached("key", build)
assert (folder / "first").read_text() == (folder / "second").read_text()
"""


def test_processes_building_at_once_share_one_whole_folder(cache):
    runs = [subprocess.Popen([sys.executable, "-c", SLOW_BUILD]) for _ in range(3)]
    assert [run.wait() for run in runs] == [0, 0, 0]
    assert [path.name for path in (cache / "tiny").iterdir() if path.is_dir()] == ["key"]


def test_a_failed_build_leaves_nothing_behind(cache):
    def fail(folder: Path) -> None:
        (folder / "half").touch()
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        cached("key", fail)
    assert [path for path in (cache / "tiny").iterdir() if path.is_dir()] == []


def test_learning_rate_factor():
    settings = replace(MEMBERS["teacher"].training, max_steps=100)  # type: ignore[union-attr]
    assert [learning_rate_factor(step, settings) for step in (0, 4, 5, 100)] == [0.2, 1.0, 1.0, 0.0]
    assert learning_rate_factor(99, replace(settings, schedule="constant")) == 1.0
