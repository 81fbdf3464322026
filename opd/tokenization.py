"""Prompts to ids: tokenizers, chat templates, and the ids that end a turn."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from jinja2 import TemplateError
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from opd.errors import UserError
from opd.locate import described, locate
from opd.records import Array, Prompt

_PRIVATE_USE = range(0xE000, 0xF900), range(0xF0000, 0xFFFFE)  # characters that mean nothing to anybody else
_MARKS: WeakKeyDictionary[PreTrainedTokenizerBase, re.Pattern[str]] = WeakKeyDictionary()  # finding them again is slow


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

    Messages go through the chat template, which brings its own BOS, so none is added. What only reads like a special token,
    in any message but the assistant's, stays plain text: nobody can end a turn by writing about it. Plain text gets the
    tokenizer's own special tokens, and may spell others. Raises `UserError` when messages meet a tokenizer without a chat
    template.
    """
    if prompt.text is not None:
        return np.asarray(tokenizer(prompt.text)["input_ids"], np.int32)
    hidden = HiddenMarks(*prompt.messages, *prompt.tools)
    text = render_text(tokenizer, replace(prompt, messages=tuple(hidden.hide_in(tokenizer, prompt.messages))))
    return np.asarray(hidden.encode(tokenizer, text), np.int32)


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


class HiddenMarks:
    """Texts that must not become special tokens, out of the sight of chat template and tokenizer."""

    def __init__(self, *shown: Mapping[str, Any]) -> None:
        """`shown` are the messages and tools that are rendered together: what stands in for a text must not be in them."""
        self.texts: list[str] = []
        said = json.dumps(shown, ensure_ascii=False, default=str)
        self._begin, self._end = islice((mark for mark in map(chr, chain(*_PRIVATE_USE)) if mark not in said), 2)

    def hide_in(self, tokenizer: PreTrainedTokenizerBase, messages: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """The messages without texts of special tokens, but for the assistant's own."""
        marks = special_marks(tokenizer)
        return [message if message["role"] == "assistant" else self.hide(message, marks) for message in messages]

    def hide(self, message: Mapping[str, Any], pattern: re.Pattern[str]) -> dict[str, Any]:
        """The message with private-use characters in the place of what `pattern` finds."""

        def one(found: re.Match[str]) -> str:
            self.texts.append(found[0])
            return self._hiding(len(self.texts) - 1)

        def within(value: Any) -> Any:
            if isinstance(value, str):
                return pattern.sub(one, value)
            if isinstance(value, Mapping):  # of a call, the arguments are searched, too
                return {name: within(part) for name, part in value.items()}
            return [within(part) for part in value] if isinstance(value, list | tuple) else value

        return {name: value if name == "role" else within(value) for name, value in message.items()}

    def encode(self, tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
        """Ids of a rendered text; what was hidden is tokenised as plain text."""
        if not self.texts:
            return tokenizer(text, add_special_tokens=False)["input_ids"]  # type: ignore[return-value]
        whole: list[int] = []
        places = {self._hiding(number): original for number, original in enumerate(self.texts)}
        for piece in re.split(f"({'|'.join(places)})", text):
            plain = piece in places
            found = tokenizer(places.get(piece, piece), add_special_tokens=False, split_special_tokens=plain)
            whole += found["input_ids"]  # type: ignore[arg-type]
        return whole

    def _hiding(self, number: int) -> str:
        return f"{self._begin}{number}{self._end}"


def special_marks(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str]:
    """What finds the texts of the tokenizer's special tokens."""
    if tokenizer not in _MARKS:
        _MARKS[tokenizer] = any_of(token.content for token in tokenizer.added_tokens_decoder.values() if token.special)
    return _MARKS[tokenizer]


def any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Of several that match the longest does; of none, nothing."""
    return re.compile("|".join(re.escape(text) for text in sorted(set(texts), key=len, reverse=True)) or "(?!)")


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
