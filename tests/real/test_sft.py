"""Fine-tuning real checkpoints: `OPD_REAL_MODELS` names a folder with `smollm2` and `qwen05`."""

import json
import os
from pathlib import Path

import pytest

from opd.models import load_causal_lm
from opd.records import Prompt
from opd.sft.config import build_sft_config
from opd.sft.examples import Example, encode
from opd.sft.run import fine_tune
from opd.tokenization import eos_ids, load_tokenizer, render

FOLDER = Path(os.environ.get("OPD_REAL_MODELS", Path.home() / ".cache" / "opd-real-models"))
ANSWERS = ["It is \\boxed{4}.\n\n你好 é", "  two spaces first", "\n\nlines first", "def f(x):\n\treturn x ** 2\n"]

pytestmark = [pytest.mark.real, pytest.mark.timeout(1800)]


@pytest.mark.parametrize("name", ["smollm2", "qwen05"])
def test_the_answer_follows_the_prompt_that_sampling_sees(name):
    tokenizer = load_tokenizer(str(FOLDER / name), "student.model")
    ends = eos_ids(str(FOLDER / name), "student.model", tokenizer)
    for answer in ANSWERS:
        prompt = Prompt("1", ({"role": "user", "content": "What is 2+2?"},))
        encoded = encode(tokenizer, ends, Example(prompt, {"role": "assistant", "content": answer}))
        assert encoded.ids[: encoded.num_prompt].tolist() == render(tokenizer, prompt).tolist()
        assert tokenizer.decode(encoded.ids[encoded.trained]) == answer + "<|im_end|>"
        assert encoded.ids[-1] in ends


def test_a_real_student_learns_its_answers(tmp_path):
    rows = [{"prompt": f"Say number {n}.", "completion": answer} for n, answer in enumerate(ANSWERS)]
    (tmp_path / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = build_sft_config(
        {
            "student": {"model": str(FOLDER / "smollm2"), "gradient_checkpointing": True},
            "dataset": {"path": str(tmp_path / "answers.jsonl")},
            "epochs": 6,
            "batch": 4,
            "precision": "bfloat16",
            "optimizer": {"lr": 1e-4},
        }
    )
    fine_tune(config, tmp_path / "run")
    losses = [json.loads(line)["loss"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert losses[-1] < 0.5 * losses[0]
    load_causal_lm(str(tmp_path / "run" / "final"), "student.model")
