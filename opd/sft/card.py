"""The model card of a fine-tuned student."""

from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData
from omegaconf import OmegaConf

from opd.sft.config import SftConfig, to_mapping
from opd.tiny import is_tiny


def sft_card(config: SftConfig, step: int, num_steps: int, num_examples: int, *, merged: bool = False) -> str:
    """Markdown with YAML metadata, in which files and folders appear by their base name only.

    `merged`: adapters are part of the weights.
    """
    student, data = _public(config.student.model), _public(config.dataset.path)
    lora = None if merged else config.student.lora
    on_hub = {"base_model": student, "base_model_relation": "adapter" if lora else "finetune"}
    metadata = ModelCardData(
        model_name=f"{Path(student).name}-sft",
        library_name="peft" if lora else "transformers",
        pipeline_tag="text-generation",
        tags=["sft", "opd", *(["lora"] if lora else [])],
        datasets=[data] if _is_hub_id(config.dataset.path) else None,
        **(on_hub if _is_hub_id(config.student.model) else {}),
    )
    kind = f"A low-rank adapter (rank {lora.r}) over" if lora else "A fine-tuned"
    recipe = to_mapping(config)
    recipe["student"]["model"], recipe["dataset"]["path"] = student, data
    return (
        f"---\n{metadata.to_yaml()}\n---\n\n"
        f"# {Path(student).name}, fine-tuned\n\n"
        f"{kind} `{student}`, after step {step} of {num_steps} of supervised fine-tuning on the {num_examples:,} answers of "
        f"`{data}`: cross-entropy of the answers' tokens, each turn's EOS included.\n\n"
        f"## Settings\n\n```yaml\n{OmegaConf.to_yaml(OmegaConf.create(recipe)).rstrip()}\n```\n\n"
        "## Limitations\n\n"
        "* What the answers get wrong is learnt too; other tasks and languages may have become worse.\n"
        "* The licences and terms of use of the base model, of the answers' author and of the prompts apply.\n"
    )


def _is_hub_id(name: str) -> bool:
    path = Path(name).expanduser()
    return name.count("/") == 1 and not (path.exists() or path.suffix or is_tiny(name) or name.startswith(("/", "~", ".")))


def _public(name: str) -> Any:
    return name if _is_hub_id(name) else Path(name).name
