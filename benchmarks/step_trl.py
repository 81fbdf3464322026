"""One process of `benchmarks.step`: TRL's DistillationTrainer. Argument: the task as JSON. Needs trl, not opd."""

import json
import sys
import tempfile
import time
from importlib.metadata import version

from benchmarks.machine import peak_rss_gib


def main() -> None:
    import torch
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import DistillationConfig, DistillationTrainer  # type: ignore[import-not-found]

    task = json.loads(sys.argv[1])
    with open(task["prompts"], encoding="utf-8") as lines:
        problems = [json.loads(line)["problem"] for line in lines if line.strip()]
    rows = [{"prompt": [{"role": "user", "content": problem}]} for problem in problems]
    seconds: list[float] = []

    class Stopwatch(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):  # type: ignore[no-untyped-def]
            self.begin = time.perf_counter()

        def on_step_end(self, args, state, control, **kwargs):  # type: ignore[no-untyped-def]
            seconds.append(time.perf_counter() - self.begin)

    with tempfile.TemporaryDirectory() as folder:
        trainer = DistillationTrainer(
            model=task["model"],
            teacher_model=task["teacher"],
            args=DistillationConfig(
                output_dir=folder,
                per_device_train_batch_size=task["batch"],
                max_steps=task["steps"] + 1,
                max_completion_length=task["new_tokens"],
                bf16=task["precision"] == "bfloat16",
                gradient_checkpointing=False,  # its default saves memory that is not short here, and costs time
                model_init_kwargs={"dtype": "float32"},
                teacher_model_init_kwargs={"dtype": task["precision"]},
                beta=1.0,  # the reverse KL
                temperature=1.0,
                use_cpu=not torch.cuda.is_available(),
                save_strategy="no",
                report_to="none",
                logging_steps=1,
            ),
            train_dataset=Dataset.from_list(rows),
            callbacks=[Stopwatch()],
        )
        trainer.train()
        logs = [log for log in trainer.state.log_history if "completions/mean_length" in log]
    tokens = [log["completions/mean_length"] * task["batch"] for log in logs]
    print(json.dumps({"step_s": seconds[1:], "tokens": tokens[1:], "peak_gib": peak_rss_gib(), "trl": version("trl")}))


if __name__ == "__main__":
    main()
