"""The student: a Hugging Face model, with or without low-rank adapters."""

import warnings
from pathlib import Path

import torch
from torch import nn

from opd.errors import UserError
from opd.models import load_causal_lm, output_head
from opd.students.config import LoraConfig, StudentConfig


def load_student(config: StudentConfig, checkpoint: Path | None = None) -> nn.Module:
    """The model that learns, its trained parameters requiring a gradient; from `checkpoint` in a resumed run.

    With adapters, the base is frozen and the same module with its adapters off is the student's own reference. Raises
    `UserError`.
    """
    resumed = checkpoint is not None and config.lora is None
    model = load_causal_lm(
        str(checkpoint) if resumed else config.model,
        "student.model",
        revision=None if resumed else config.revision,
        dtype=config.dtype,
        attention=config.attention,
    )
    if config.gradient_checkpointing:
        # older transformers know it by another name
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    if config.lora is None:
        return model
    with warnings.catch_warnings():  # peft still asks transformers for a property that it renamed
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
        return _with_adapters(model, config.lora, checkpoint)


def _with_adapters(model: nn.Module, config: LoraConfig, checkpoint: Path | None) -> nn.Module:
    try:
        import peft
        from peft.tuners.tuners_utils import BaseTunerLayer
    except ImportError:
        raise UserError("student.lora: install it with: pip install 'opd[lora]'") from None
    head = output_head(model).weight
    if checkpoint is not None:
        adapted: nn.Module = peft.PeftModel.from_pretrained(model, str(checkpoint), is_trainable=True)
    else:
        names = config.target_modules
        settings = peft.LoraConfig(
            r=config.r,
            lora_alpha=config.alpha,
            lora_dropout=config.dropout,
            target_modules=names if names == "all-linear" else [name.strip() for name in names.split(",")],
            task_type="CAUSAL_LM",
        )
        try:
            with torch.random.fork_rng():
                torch.manual_seed(0)  # the adapters' start is part of the recipe, whatever was drawn before
                adapted = peft.get_peft_model(model, settings)  # type: ignore[arg-type]
        except ValueError as error:
            raise UserError(f"student.lora.target_modules: {' '.join(str(error).split())}") from None
    # an adapted layer passes its base layer's weight off as its own
    layer = adapted.get_base_model().get_output_embeddings()  # type: ignore[operator]
    if isinstance(layer, BaseTunerLayer) or (head is not None and head.requires_grad):
        raise UserError("student.lora.target_modules: the output head cannot carry an adapter; leave it out")
    return adapted
