"""A small run on micro models: student and teacher with other random weights, eight words as prompts."""

import copy
import importlib.util
import json
from pathlib import Path

import pytest

import opd
from opd.config import build_config
from opd.objective.learner import Learner
from opd.registry import ENVIRONMENTS


@pytest.fixture(scope="session")
def raw_recipe(model_folder, tmp_path_factory):
    """`raw_recipe(**sections)`: a recipe of six steps as a plain mapping; sections replace or extend its own."""
    folder = tmp_path_factory.mktemp("data")
    words = ["abc", "de", "fghij", "k", "lmno", "pq", "rst", "uvwxyz"]
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"problem": word}) + "\n" for word in words))
    heldout = [{"problem": word, "answer": "1"} for word in ("za", "yb")]
    (folder / "heldout.jsonl").write_text("".join(json.dumps(row) + "\n" for row in heldout))
    student, teacher = str(model_folder(0)), str(model_folder(1))

    def build(**sections):
        recipe = {
            "steps": 6,
            "student": {"model": student},
            "teachers": {"default": {"model": teacher}},
            "prompts": {"path": str(folder / "prompts.jsonl"), "columns": {"prompt": "problem"}},
            "batch": {"prompts": 4, "rollouts_per_prompt": 2},
            "sampling": {"max_new_tokens": 12},
            "terms": {"reverse_kl": {"form": "full"}},
            "optimizer": {"lr": 3e-3, "schedule": "linear", "warmup_ratio": 0.2},
            "eval": {
                "prompts": {"path": str(folder / "heldout.jsonl"), "columns": {"prompt": "problem"}},
                "every": 3,
                "kl_prompts": 2,
            },
            "checkpoint": {"every": 2},
            "trackers": {"rollouts_every": 3},
        }
        return {**recipe, **sections}

    return build


def without_timings(path):
    """The rows of a `metrics.jsonl` without what depends on the machine."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [{name: value for name, value in row.items() if not name.startswith("perf/")} for row in rows]


@pytest.fixture(scope="session")
def metrics_of():
    return lambda run: without_timings(run / "metrics.jsonl")


@pytest.fixture
def train(tmp_path, metrics_of):
    """`train(raw, name)`: the metrics of a run in `tmp_path / name`; further arguments are those of `opd.train`."""

    def run(raw, name="run", **options):
        opd.train(build_config(raw), tmp_path / name, **options)
        return metrics_of(tmp_path / name)

    return run


@pytest.fixture
def taught(monkeypatch):
    """What each update is given, a list of (rollout, terms) a step."""
    seen = []
    real = Learner.update

    def update(self, rows):
        seen.append(rows)
        return real(self, rows)

    monkeypatch.setattr(Learner, "update", update)
    return seen


@pytest.fixture(scope="session")
def aligned_recipe(raw_recipe, byte_model, tmp_path_factory):
    """`aligned_recipe(**sections)`: a student whose tokens span those of teacher and weak reference, and the other way."""
    student, teacher, weak = byte_model(0, "ab 0a bc"), byte_model(1, "cd"), byte_model(2, "cd")
    path = tmp_path_factory.mktemp("data") / "prompts.jsonl"
    path.write_text("".join(json.dumps({"problem": word}) + "\n" for word in ("abcd", "0ab", "dd", "cab0")))

    def build(**sections):
        teachers = {"default": {"model": teacher, "weak_reference": {"model": weak}}}
        prompts = {"path": str(path), "columns": {"prompt": "problem"}}
        defaults = {"student": {"model": student}, "teachers": teachers, "prompts": prompts, "eval": {}}
        return raw_recipe(**{**defaults, **sections})

    return build


EPISODE_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)


@pytest.fixture(scope="session")
def episode_recipe(raw_recipe, micro_model, micro_tokenizer, tmp_path_factory):
    """`episode_recipe(**sections)`: episodes of environment `echo` (see `echo.py`) of four turns, each a few tokens long.

    Half of the letters end a turn, so that models with random weights come to its end.
    """
    tokenizer = copy.deepcopy(micro_tokenizer)
    tokenizer.chat_template = EPISODE_TEMPLATE
    ends = [2, *range(5, 18)]

    def folder(seed):
        path = tmp_path_factory.mktemp("episodes")
        micro_model(seed, eos_token_id=ends).save_pretrained(path)
        tokenizer.save_pretrained(path)
        return str(path)

    student, teacher = folder(0), folder(1)

    def build(**sections):
        defaults = {
            "student": {"model": student},
            "teachers": {"default": {"model": teacher}},
            "prompts": {"type": "environment", "name": "echo"},
            "eval": {},
            "sampler": {"chunk_tokens": 3},
        }
        return raw_recipe(**{**defaults, **sections})

    return build


@pytest.fixture
def echo(monkeypatch):
    """Knows the environments of `echo.py` during a test."""
    for name in ("echo", "forgetful", "drifting"):
        monkeypatch.setitem(ENVIRONMENTS.builtin, name, "")
    spec = importlib.util.spec_from_file_location("echo_for_tests", Path(__file__).with_name("echo.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.register()
    return module
