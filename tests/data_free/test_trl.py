"""An exported pool in TRL: `OPD_PEER_PYTHON` names an interpreter that has it."""

import json
import os
import subprocess
import sys

import pytest

from opd.data_free.exchange import export_pool
from opd.data_free.pool import Row, write_pool

STEP = """
import json, sys, tempfile
from datasets import load_dataset
from trl import DistillationConfig, DistillationTrainer
pool, model, teacher = sys.argv[1:]
rows = load_dataset("json", data_files=pool, split="train")
seen = []
with tempfile.TemporaryDirectory() as folder:
    args = DistillationConfig(
        output_dir=folder, per_device_train_batch_size=2, max_steps=1, max_completion_length=8, use_cpu=True,
        save_strategy="no", report_to="none", logging_steps=1, shuffle_dataset=False, gradient_checkpointing=False,
        model_init_kwargs={"dtype": "float32"}, teacher_model_init_kwargs={"dtype": "float32"}, bf16=False,
    )
    trainer = DistillationTrainer(model=model, teacher_model=teacher, args=args, train_dataset=rows)
    template = trainer.processing_class.apply_chat_template
    def noted(*arguments, **named):
        seen.append(named.get("conversation", arguments))
        return template(*arguments, **named)
    trainer.processing_class.apply_chat_template = noted
    trainer.train()
loss = next(log["loss"] for log in trainer.state.log_history if "loss" in log)
print(json.dumps({"step": trainer.state.global_step, "loss": loss, "seen": seen}))
"""


@pytest.mark.peer
def test_a_pool_trains_in_trl(tmp_path, model_folder):
    texts = ("abc", "de", "fgh", "ij")
    rows = [Row(f"maths-{i}", text, "maths", provenance={"teacher": "t"}) for i, text in enumerate(texts)]
    write_pool(tmp_path / "pool.jsonl", rows)
    export_pool(tmp_path / "pool.jsonl", tmp_path / "trl.jsonl", "trl")
    python = os.environ.get("OPD_PEER_PYTHON", sys.executable)
    command = [python, "-c", STEP, str(tmp_path / "trl.jsonl"), str(model_folder(0)), str(model_folder(1))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["step"] == 1
    assert said["loss"] > 0
    asked = json.dumps(said["seen"])
    assert all(json.dumps({"role": "user", "content": row.prompt}) in asked for row in rows[:2])
