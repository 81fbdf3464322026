"""transformers' Trainer with packed micro-batches, and its checkpoints in the layout of a run's directory."""

import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from torch import Tensor, nn
from transformers import (
    PreTrainedTokenizerBase,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_callback import PrinterCallback

from opd.errors import UserError
from opd.sft.card import sft_card
from opd.sft.config import SftConfig
from opd.sft.loss import IGNORED, pieces

STATE_FILES = ("trainer_state.json", "optimizer.pt", "scheduler.pt", "scaler.pt", "rng_state*.pth")


def training_arguments(config: SftConfig, folder: Path, num_steps: int, use_cache: bool) -> TrainingArguments:
    """What the recipe says in transformers' words, for `num_steps` updates; checkpoints are written to `folder`.

    `use_cache` is written into the model's configuration: give what is there already.
    Raises `UserError` for a batch that the processes cannot share.
    """
    optimizer, world, cuda = config.optimizer, PartialState().num_processes, torch.cuda.is_available()
    if config.batch % world:
        raise UserError(f"batch is {config.batch}: it must be a multiple of the {world} processes")
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=num_steps,
        per_device_train_batch_size=config.batch // world,
        learning_rate=optimizer.lr,
        weight_decay=optimizer.weight_decay,
        adam_beta1=optimizer.betas[0],
        adam_beta2=optimizer.betas[1],
        adam_epsilon=optimizer.eps,
        max_grad_norm=optimizer.max_grad_norm,
        lr_scheduler_type="constant_with_warmup" if optimizer.schedule == "constant" else optimizer.schedule,
        warmup_steps=math.ceil(optimizer.warmup_ratio * num_steps),
        bf16=config.precision == "bfloat16",
        seed=config.seed,
        data_seed=config.seed,
        use_cpu=not cuda,
        ddp_find_unused_parameters=False,
        dataloader_pin_memory=cuda,
        use_cache=use_cache,
        remove_unused_columns=False,
        logging_steps=1,
        logging_nan_inf_filter=False,
        disable_tqdm=True,
        save_strategy="no",  # `Checkpoints` says when
        # TensorBoard's would write beside the checkpoints that are being saved: `fine_tune` brings one of its own
        report_to=[tracker for tracker in config.report_to if tracker != "tensorboard"] or "none",
    )
    assert arguments.device
    arguments._n_gpu = min(1, arguments.n_gpu)  # several GPUs are for several processes, not for DataParallel
    return arguments


class SftTrainer(Trainer):
    """A batch is one row of whole examples; it is trained in pieces of bounded size, normalised by all trained tokens.

    `on_step` is given the metrics of each update. The model must be one of `opd.sft.loss.return_answer_nll`.
    """

    def __init__(self, *, piece_tokens: int, on_step: Callable[[int, dict[str, float]], None], **arguments: Any) -> None:
        super().__init__(**arguments)
        self.piece_tokens, self.on_step = piece_tokens, on_step
        self.counts = {"trained_tokens": 0, "tokens": 0}  # of the last update, over all processes
        self.remove_callback(PrinterCallback)

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """Every process makes one synchronised backward pass an update, however many pieces it has."""
        labels = inputs["labels"]
        counts = torch.stack([(labels != IGNORED).sum(), torch.tensor(labels.numel(), device=labels.device)])
        trained, total = self.accelerator.gather(counts[None]).sum(0)  # type: ignore[union-attr]
        self.counts = {"trained_tokens": int(trained), "tokens": int(total)}
        *others, last = pieces(inputs, self.piece_tokens)
        loss = torch.zeros((), device=self.args.device)
        for piece in others:
            with self.accelerator.no_sync(model):
                loss += super().training_step(model, piece, trained)
        loss += super().training_step(model, last, trained)
        if not loss.isfinite():
            raise UserError(f"the loss is not finite at step {self.state.global_step + 1}: lower optimizer.lr")
        return loss

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The piece's share of the mean over the trained tokens of all processes, whose gradients are then averaged."""
        return model(**inputs)["loss"] * (self.accelerator.num_processes / num_items_in_batch)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        super().log(logs, start_time)
        if "loss" in logs:
            names = {"loss": "loss", "grad_norm": "grad_norm", "learning_rate": "lr", "epoch": "epoch"}
            figures = {ours: float(logs[theirs]) for theirs, ours in names.items() if theirs in logs}
            self.on_step(self.state.global_step, {**figures, **self.counts})

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """The weights are loaded already: they lie beside the trainer's state, not in it."""


class Checkpoints(TrainerCallback):
    """When a checkpoint is written, and that it appears whole or not at all, as `folder/step-N`."""

    def __init__(self, folder: Path, config: SftConfig, tokenizer: PreTrainedTokenizerBase, num_examples: int) -> None:
        self.folder, self.config, self.tokenizer, self.num_examples = folder, config, tokenizer, num_examples

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        step, every = state.global_step, self.config.checkpoint.every
        control.should_save = step == state.max_steps or (every > 0 and step % every == 0)
        return control

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        PartialState().wait_for_everyone()  # each process has written its part
        if state.is_world_process_zero:
            assert args.output_dir is not None
            saved = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            (saved / "trainer").mkdir()
            for path in [path for name in STATE_FILES for path in saved.glob(name)]:
                path.rename(saved / "trainer" / path.name)
            (saved / "training_args.bin").unlink()  # a pickle, and paths of this machine
            # by hand: a Trainer that knows the tokenizer would also change the EOS of the model's configuration
            self.tokenizer.save_pretrained(saved)
            card = sft_card(self.config, state.global_step, state.max_steps, self.num_examples)
            (saved / "README.md").write_text(card, encoding="utf-8")
            place = self.folder / f"step-{state.global_step}"
            shutil.rmtree(place, ignore_errors=True)
            self.folder.mkdir(exist_ok=True)
            os.replace(saved, place)
            shutil.rmtree(args.output_dir)
            for old in checkpoints(self.folder)[: -self.config.checkpoint.keep]:
                shutil.rmtree(old)
        PartialState().wait_for_everyone()


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in `folder`, oldest first; each is whole, for it gets its name last."""
    named = [path for path in folder.glob("step-*") if path.name.removeprefix("step-").isdigit()]
    return sorted(named, key=step_of)


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))
