"""Build one model of the family: initialise, train, and save it as a Hugging Face folder (float32 safetensors)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
)

from opd.tiny import authoring, brief, episodes, habit, long_solutions, solutions
from opd.tiny.members import Model
from opd.tiny.tokenizer import BOS_ID, END_ID, PAD_ID, build_tokenizer
from opd.tiny.training import Lessons, train

LESSONS = {
    None: Lessons(solutions.batches, solutions.validation_accuracy),
    "brief": Lessons(brief.batches, brief.validation_accuracy),
    "calculator": Lessons(episodes.batches, episodes.validation_accuracy),
    "habit": Lessons(habit.batches, habit.validation_accuracy),
    "long": Lessons(long_solutions.batches, long_solutions.validation_accuracy),
    "pair": authoring.PAIR_LESSONS,
    **{f"{domain}-author": lessons for domain, lessons in authoring.AUTHOR_LESSONS.items()},
}
HEAD_DIM = 32
CONTEXT_TOKENS = 256
VOCABULARY_MULTIPLE = 8
TRAINING_THREADS = 1
"""One, so that the weights do not depend on the number of cores, and a busy machine costs no more than its share."""


def build_model(folder: Path, name: str, member: Model, seed: int) -> None:
    """Train `member` and write model, tokenizer and `tiny.json` (settings and measured accuracy) into `folder`."""
    console = Console(stderr=True)
    console.print(f"Building tiny:{name}@{seed}, once; it is kept in {folder.parent.parent}")
    tokenizer = build_tokenizer(member.tokenizer, CONTEXT_TOKENS)
    with own_torch_state(seed):
        model = initialise(member, tokenizer)
        lessons = LESSONS[member.task]
        outcome = train(model, tokenizer, member, lessons, name=f"{name}@{seed}", console=console)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    facts = {"name": name, "seed": seed, "member": asdict(member), **asdict(outcome)}
    (folder / "tiny.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


def initialise(member: Model, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    """A model with random weights from torch's default generator, in float32 on the CPU."""
    shape: dict[str, Any] = {
        # Always at least one row beyond the tokenizer's, as in most real checkpoints.
        "vocab_size": (len(tokenizer) // VOCABULARY_MULTIPLE + 1) * VOCABULARY_MULTIPLE,
        "hidden_size": member.hidden_size,
        "intermediate_size": 3 * member.hidden_size,
        "num_hidden_layers": member.num_layers,
        "num_attention_heads": member.hidden_size // HEAD_DIM,
        "max_position_embeddings": CONTEXT_TOKENS,
        "tie_word_embeddings": True,
        "pad_token_id": PAD_ID,
        "bos_token_id": BOS_ID,
        "eos_token_id": END_ID,
    }
    if member.rope_theta is not None:
        shape["rope_parameters"] = {"rope_type": "default", "rope_theta": member.rope_theta}
    if member.experts is None:
        model = LlamaForCausalLM(LlamaConfig(**shape))
    else:
        config = Qwen2MoeConfig(
            **shape,
            num_key_value_heads=shape["num_attention_heads"],
            num_experts=member.experts.num_experts,
            num_experts_per_tok=member.experts.num_active,
            moe_intermediate_size=member.experts.expert_size,
            shared_expert_intermediate_size=member.experts.expert_size,
        )
        model = Qwen2MoeForCausalLM(config)
    model.generation_config = GenerationConfig(pad_token_id=PAD_ID, bos_token_id=BOS_ID, eos_token_id=END_ID)
    return model


@contextmanager
def own_torch_state(seed: int) -> Iterator[None]:
    """Seeded CPU generator, float32, CPU, gradients, fixed threads; the caller's settings are back afterwards."""
    dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.inference_mode(False), torch.enable_grad():
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would reseed the GPUs as well
        torch.set_default_dtype(torch.float32)
        torch.set_num_threads(TRAINING_THREADS)
        try:
            yield
        finally:
            torch.set_default_dtype(dtype)
            torch.set_num_threads(threads)
