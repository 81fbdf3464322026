"""A recipe and a directory in, a fine-tuned student out."""

import hashlib
import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from rich.console import Console
from transformers import DataCollatorWithFlattening, PreTrainedTokenizerBase, set_seed
from transformers.integrations.integration_utils import TensorBoardCallback

from opd.errors import UserError
from opd.files import explain_full_disk, new_folder
from opd.models import model_limits
from opd.progress import ProgressBar
from opd.recorder import peak_gib
from opd.sft.card import sft_card
from opd.sft.config import SftConfig
from opd.sft.directory import SftDirectory
from opd.sft.examples import Encoded, Example, drops_tool_calls, encode, read_examples, special_tokens, spells
from opd.sft.loss import IGNORED, check_neighbours, return_answer_nll
from opd.sft.trainer import Checkpoints, SftTrainer, checkpoints, step_of, training_arguments
from opd.students.loading import load_student
from opd.tokenization import eos_ids, load_tokenizer

PROBE_TOKENS = 64  # of the first examples, to see whether packed examples see each other

LEFT_OUT = {
    "num_too_long": "too long",
    "num_with_special_tokens": "with a special token of the student's in the text",
    "num_empty": "with an empty answer",
    "num_tool_calls_dropped": "with tool calls that the student's chat template does not write",
}


def fine_tune(config: SftConfig, out: Path, *, resume: bool = False, overwrite: bool = False) -> dict[str, Any]:
    """Runs a recipe and returns the content of `summary.json`. Raises `UserError`."""
    state = PartialState(cpu=not torch.cuda.is_available())
    with ExitStack() as closing:
        directory = SftDirectory(out, config, resume=resume, overwrite=overwrite, writer=state.is_main_process)
        closing.callback(directory.close)
        state.wait_for_everyone()
        with Console(stderr=True, quiet=not state.is_main_process).status("tokenising the answers"):  # can take minutes
            tokenizer, examples, counts = _load_examples(config)
        num_steps = config.num_steps(len(examples))
        checkpoint = next(reversed(checkpoints(directory.checkpoints)), None) if resume else None
        done = step_of(checkpoint) if checkpoint else 0
        bar = closing.enter_context(ProgressBar(num_steps, done, shown=state.is_main_process))
        bar.bar.update(bar.task, description="fine-tuning")
        set_seed(config.seed)
        saving = directory.path / ".saving"
        if state.is_main_process:
            shutil.rmtree(saving, ignore_errors=True)  # half a checkpoint, where a run was killed while it wrote one
            closing.callback(shutil.rmtree, saving, ignore_errors=True)
        student: Any = load_student(config.student, checkpoint)
        return_answer_nll(student, config.max_logits_mib * 2**20)
        trainer = SftTrainer(
            piece_tokens=config.micro_batch_tokens if config.packing else 1,
            on_step=_StepWriter(directory, bar),
            model=student,
            args=training_arguments(config, saving, num_steps, student.config.use_cache),
            data_collator=DataCollatorWithFlattening(),
            train_dataset=[_row(example) for example in examples],
            callbacks=[Checkpoints(directory.checkpoints, config, tokenizer, len(examples))],
        )
        if config.packing:
            probe = np.concatenate([example.ids for example in examples[:PROBE_TOKENS]])[:PROBE_TOKENS]
            check_neighbours(student, probe, config.precision)
        data = {**counts, "digest": _digest(examples)}
        if checkpoint is not None:
            _refuse_other_data(directory, data)
        directory.begin(done)  # everything is loaded: only now may an older run be replaced
        directory.write_json("data.json", data)
        if "tensorboard" in config.report_to and state.is_main_process:
            from torch.utils.tensorboard import SummaryWriter

            trainer.add_callback(TensorBoardCallback(SummaryWriter(str(directory.path / "tensorboard"))))
        for note in _notes(config, counts, out, checkpoint, resume):
            bar.say(note)
        if done < num_steps:
            with explain_full_disk(directory.path):
                trainer.train(resume_from_checkpoint=str(checkpoint / "trainer") if checkpoint else None)
        return _finish(directory, config, tokenizer, counts) if state.is_main_process else {}


def _load_examples(config: SftConfig) -> tuple[PreTrainedTokenizerBase, list[Encoded], Counter[str]]:
    name, revision = config.student.model, config.student.revision
    tokenizer = load_tokenizer(name, "student.model", revision)
    ends = eos_ids(name, "student.model", tokenizer, revision)
    context, _ = model_limits(name, "student.model", revision)
    return tokenizer, *select(read_examples(config.dataset, "dataset"), tokenizer, ends, min(config.max_tokens, context))


def select(
    examples: Iterable[Example], tokenizer: PreTrainedTokenizerBase, ends: Sequence[int], max_tokens: int
) -> tuple[list[Encoded], Counter[str]]:
    """The examples that can be learnt whole, and how many there were of each kind. Raises `UserError` for none."""
    kept: list[Encoded] = []
    counts: Counter[str] = Counter(dict.fromkeys(("num_examples", *LEFT_OUT), 0))
    special = special_tokens(tokenizer)
    for example in examples:
        if example.is_empty:
            counts["num_empty"] += 1
        elif spells(example, special):
            counts["num_with_special_tokens"] += 1
        elif drops_tool_calls(tokenizer, example):
            counts["num_tool_calls_dropped"] += 1
        elif len((encoded := encode(tokenizer, ends, example)).ids) > max_tokens:
            counts["num_too_long"] += 1
        elif encoded.trained.sum() == 1:  # the template writes nothing of the answer: its EOS stands alone
            counts["num_empty"] += 1
        else:
            kept.append(encoded)
            if example.num_deleted:
                counts["num_shortened"] += 1
    counts["num_examples"] = len(kept)
    if not kept:
        limit = f"; max_tokens, or the student's context, is {max_tokens}" if counts["num_too_long"] else ""
        raise UserError(f"dataset.path: no example is left: {_left_out(counts)}{limit}")
    return kept, counts


def _left_out(counts: Mapping[str, int]) -> str:
    """How many examples were left out, and why; nothing where none were."""
    return ", ".join(f"{counts[name]} {reason}" for name, reason in LEFT_OUT.items() if counts[name])


def _digest(examples: Sequence[Encoded]) -> str:
    """Of what is learnt, in its order."""
    digest = hashlib.blake2b(digest_size=16)
    for example in examples:
        digest.update(np.array([len(example.ids), example.num_prompt], "<i8").tobytes() + example.ids.tobytes())
    return digest.hexdigest()


def _refuse_other_data(directory: SftDirectory, data: Mapping[str, Any]) -> None:
    """A resumed run skips the examples that it has seen: they must be the same."""
    try:
        before = json.loads((directory.path / "data.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        before = {}
    if before != data:
        raise UserError(
            f"dataset: the run in {directory.path} began with other answers than these {data['num_examples']}; resume it "
            "with the same data and tokenizer, or name another --out"
        )


def _row(example: Encoded) -> dict[str, Any]:
    return {"input_ids": example.ids, "labels": np.where(example.trained, example.ids, IGNORED)}


def _notes(config: SftConfig, counts: Mapping[str, int], out: Path, checkpoint: Path | None, resume: bool) -> list[str]:
    notes = []
    if left_out := _left_out(counts):
        notes.append(f"note: examples left out: {left_out}")
    if num := counts.get("num_shortened"):
        notes.append(f"note: steps of {num} of {counts['num_examples']} answers are deleted (dataset.delete_steps)")
    elif (deletion := config.dataset.delete_steps) is not None:
        notes.append(
            f"WARNING: dataset.delete_steps shortens none of {counts['num_examples']} answers: none has more than "
            f"{2 * deletion.steps} steps that end with {deletion.delimiter!r}; lower dataset.delete_steps.steps, or set "
            "dataset.delete_steps.delimiter"
        )
    if checkpoint is not None:
        notes.append(f"resuming from {os.path.relpath(checkpoint)}")
    elif resume:
        notes.append(f"note: nothing to resume in {out}: starting at step 1")
    return notes


class _StepWriter:
    """A line of metrics an update, and the bar."""

    def __init__(self, directory: SftDirectory, bar: ProgressBar) -> None:
        self.directory, self.bar, self.last_s = directory, bar, time.perf_counter()

    def __call__(self, step: int, figures: Mapping[str, float]) -> None:
        now = time.perf_counter()
        seconds, self.last_s = now - self.last_s, now
        timings = {
            "perf/step_s": round(seconds, 4),
            "perf/tokens_per_s": round(figures["tokens"] / seconds, 1),
            "perf/peak_gib": round(peak_gib(), 3),
        }
        self.directory.append_metrics({"step": step, **figures, **timings})
        self.bar.step(step, {**figures, **timings})


def _finish(
    directory: SftDirectory, config: SftConfig, tokenizer: PreTrainedTokenizerBase, counts: Mapping[str, int]
) -> dict[str, Any]:
    """The model alone as `final/`, adapters merged into it, and the summary of all steps, those before a resume included."""
    last = checkpoints(directory.checkpoints)[-1]
    with new_folder(directory.path / "final") as folder:
        if config.student.lora is None:
            shutil.copytree(last, folder, ignore=shutil.ignore_patterns("trainer"), dirs_exist_ok=True)
        else:
            merged: Any = load_student(config.student, last)
            merged.merge_and_unload().save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            step = step_of(last)
            card = sft_card(config, step, step, counts["num_examples"], merged=True)
            (folder / "README.md").write_text(card, encoding="utf-8")
    lines = (directory.path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    summary = {
        "steps": rows[-1]["step"],
        "loss": rows[-1]["loss"],
        **counts,
        "trained_tokens": sum(row["trained_tokens"] for row in rows),
        "wall_s": round(sum(row["perf/step_s"] for row in rows), 1),
        "model": "final",
    }
    directory.write_json("summary.json", summary)
    return summary
