"""A small run on micro models: student and teacher with other random weights, eight words as prompts."""

import json

import pytest


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
