"""Micro models whose chat template ends an answer with EOS, and eight answers to learn."""

import json
import shutil

import pytest

from opd.sft.config import build_sft_config

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] }}"
    "{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' + (suffix or '') }}{% endif %}"
)
ANSWERS = {"abc": "cba", "de": "edcba", "fghij": "j", "k": "klmnop", "lmno": "on", "pq": "qqqq", "rst": "t", "uv": "vuvu"}
ROWS = [
    {"id": f"r{i}", "prompt": [{"role": "user", "content": asked}], "completion": [{"role": "assistant", "content": said}]}
    for i, (asked, said) in enumerate(ANSWERS.items())
]


@pytest.fixture(scope="session")
def student_folder(model_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("student") / "micro"
    shutil.copytree(model_folder(0), folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="session")
def student_tokenizer(student_folder):
    from opd.tokenization import load_tokenizer

    return load_tokenizer(str(student_folder), "student.model")


@pytest.fixture(scope="session")
def answers_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("answers") / "answers.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


@pytest.fixture(scope="session")
def raw_sft(student_folder, answers_file):
    """`raw_sft(**sections)`: a recipe of six updates as a plain mapping."""

    def build(**sections):
        recipe = {
            "student": {"model": str(student_folder)},
            "dataset": {"path": str(answers_file)},
            "epochs": 2.0,
            "batch": 3,
            "max_tokens": 64,
            "optimizer": {"lr": 3e-3, "schedule": "cosine", "warmup_ratio": 0.2, "weight_decay": 0.01},
            "checkpoint": {"every": 2},
        }
        return {**recipe, **sections}

    return build


@pytest.fixture(scope="session")
def sft_config(raw_sft):
    return lambda **sections: build_sft_config(raw_sft(**sections))
