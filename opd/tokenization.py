"""Prompts to ids: tokenizers, chat templates, and the ids that end a turn."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from opd.errors import UserError
from opd.locate import locate
from opd.records import Array, Prompt


def load_tokenizer(name: str, field: str, revision: str | None = None) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder or hub id. Raises `UserError` naming `field`."""
    try:
        return AutoTokenizer.from_pretrained(locate(name, field), revision=revision, trust_remote_code=False)
    except (OSError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{field}: {name} has no readable tokenizer: {' '.join(str(error).split())[:300]}") from None


def render(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> Array:
    """The prompt's ids [c] int32, exactly as the student sees them.

    Messages go through the chat template, which brings its own BOS, so none is added; plain text gets the tokenizer's
    own special tokens. Raises `UserError` when messages meet a tokenizer without a chat template.
    """
    if prompt.text is not None:
        ids = tokenizer(prompt.text)["input_ids"]
    else:
        ids = tokenizer(render_text(tokenizer, prompt), add_special_tokens=False)["input_ids"]
    return np.asarray(ids, np.int32)


def render_text(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> str:
    """The text that `render` tokenises."""
    if prompt.text is not None:
        return prompt.text
    if not tokenizer.chat_template:
        raise UserError("student.model: its tokenizer has no chat template; set prompts.plain=true for a base model")
    text = tokenizer.apply_chat_template(
        [dict(message) for message in prompt.messages],
        tools=[dict(tool) for tool in prompt.tools] or None,
        tokenize=False,
        add_generation_prompt=True,
        **prompt.chat_template_kwargs,
    )
    assert isinstance(text, str)
    return text


def eos_ids(name: str, tokenizer: PreTrainedTokenizerBase, revision: str | None = None) -> tuple[int, ...]:
    """Every id that ends a turn: those of the generation configuration, and the tokenizer's own."""
    ids: set[int] = set()
    try:
        configured: Any = GenerationConfig.from_pretrained(
            locate(name, "student.model"), revision=revision or "main"
        ).eos_token_id
    except OSError:
        configured = None  # no generation_config.json: the tokenizer alone decides
    if configured is not None:
        ids.update(configured if isinstance(configured, Sequence) else [configured])
    if tokenizer.eos_token_id is not None:
        ids.add(int(tokenizer.eos_token_id))  # type: ignore[arg-type]
    if not ids:
        raise UserError(f"student.model: {name} names no EOS token, so no rollout would ever end; set eos_token_id")
    return tuple(sorted(ids))
