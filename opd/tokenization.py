"""Prompts to ids: tokenizers, chat templates, and the ids that end a turn."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import TemplateError
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from opd.errors import UserError
from opd.locate import described, locate
from opd.records import Array, Prompt


def load_tokenizer(name: str, field: str, revision: str | None = None) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder or hub id. Raises `UserError` naming `field`."""
    try:
        return quiet(AutoTokenizer.from_pretrained(locate(name, field), revision=revision, trust_remote_code=False))
    except (OSError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(
            f"{field}: {described(name)} has no readable tokenizer: {' '.join(str(error).split())[:300]}"
        ) from None


def quiet(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """`tokenizer`, made to believe that it has warned of long texts: here they are counted and left out."""
    tokenizer.deprecation_warnings["sequence-length-is-longer-than-the-specified-maximum"] = True
    return tokenizer


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
        raise UserError("student.model: its tokenizer has no chat template; a base model needs prompts.plain=true (--plain)")
    try:
        text = tokenizer.apply_chat_template(
            [dict(message) for message in prompt.messages],
            tools=[dict(tool) for tool in prompt.tools] or None,
            tokenize=False,
            add_generation_prompt=True,
            **prompt.chat_template_kwargs,
        )
    except (TemplateError, TypeError, ValueError) as error:  # a role or a field that the template does not know
        raise UserError(f"prompts: {prompt.id} does not fit the chat template: {' '.join(str(error).split())}") from None
    assert isinstance(text, str)
    return text


def eos_ids(name: str, field: str, tokenizer: PreTrainedTokenizerBase, revision: str | None = None) -> tuple[int, ...]:
    """Every id that ends a turn: those of the generation configuration (without one, of the model's), and the tokenizer's.

    Raises `UserError` naming `field` when the configuration cannot be read or there is none.
    """
    ids: set[int] = set()
    where = locate(name, field)
    try:
        if Path(where).is_dir() and not (Path(where) / "generation_config.json").is_file():
            configured: Any = getattr(AutoConfig.from_pretrained(where).get_text_config(), "eos_token_id", None)
        else:
            configured = GenerationConfig.from_pretrained(where, revision=revision or "main").eos_token_id
    except (OSError, ValueError) as error:
        raise UserError(f"{field}: {name}: its configuration cannot be read: {' '.join(str(error).split())[:200]}") from None
    if configured is not None:
        ids.update(configured if isinstance(configured, Sequence) else [configured])
    if tokenizer.eos_token_id is not None:
        ids.add(int(tokenizer.eos_token_id))  # type: ignore[arg-type]
    if not ids:
        raise UserError(f"{field}: {name} names no EOS token, so no rollout would ever end; set eos_token_id")
    return tuple(sorted(ids))
