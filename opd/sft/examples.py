"""Rows of data to examples, and an example to ids: pure functions of the row and the student's tokenizer.

Reading rows imports neither torch nor transformers.

Shape legend: n tokens of an example, prompt and answer.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from jinja2 import TemplateError

from opd.data import prompt_of, read_rows
from opd.errors import UserError
from opd.records import Array, Prompt
from opd.sft.config import AnswersConfig
from opd.sft.deletion import DeletionConfig, shortened

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Example:
    """A prompt and the answer to learn: an assistant message, or plain text after a plain prompt.

    Example: `Example(Prompt("1", ({"role": "user", "content": "2+2?"},)), {"role": "assistant", "content": "4"})`
    """

    prompt: Prompt
    answer: Mapping[str, Any] | str
    num_deleted: int = 0  # characters of the answer's reasoning that were left out

    @property
    def is_empty(self) -> bool:
        """Whether the answer has neither text nor tool calls: the student would learn to say nothing."""
        parts = {"": self.answer} if isinstance(self.answer, str) else self.answer
        return not any(part.strip() if isinstance(part, str) else part for name, part in parts.items() if name != "role")

    @property
    def num_characters(self) -> int:
        """Of the answer's text, without what was deleted."""
        parts = {"": self.answer} if isinstance(self.answer, str) else self.answer
        return sum(len(text) for text in _texts([part for name, part in parts.items() if name != "role"]))


@dataclass(frozen=True, eq=False)
class Encoded:
    """An example's ids; the first `num_prompt` (at least one) are the prompt's."""

    ids: Array  # [n] int32, the answer's last one ends the turn
    num_prompt: int

    @property
    def trained(self) -> Array:
        """[n] bool: the answer's tokens."""
        return np.arange(len(self.ids)) >= self.num_prompt


def read_examples(config: AnswersConfig, key: str) -> Iterator[Example]:
    """The examples of a data set. Raises `UserError` for no rows at all, and naming the row that holds no example."""
    number = -1
    for number, (where, row) in enumerate(read_rows(config, key)):
        if number == config.limit:
            return
        example = _example(row, where, config, key)
        yield example if config.delete_steps is None else _shortened(example, config.delete_steps)
    if number < 0:
        raise UserError(f"{key}.path: {config.path} holds no rows")


def _example(row: Mapping[str, Any], where: str, config: AnswersConfig, key: str) -> Example:
    columns = config.columns
    if row.get(columns.completion) is not None and columns.prompt in row:
        prompt, answer = prompt_of(row, where, config, key), row[columns.completion]
    elif isinstance(messages := row.get(columns.messages), list) and len(messages) > 1:
        *before, answer = messages
        prompt, answer = prompt_of({**row, columns.prompt: before}, where, config, key), [answer]
    else:
        raise UserError(
            f"{key}.columns: {where} has neither {columns.prompt!r} with {columns.completion!r} nor a conversation in "
            f"{columns.messages!r}; name the columns with {key}.columns.prompt=NAME {key}.columns.completion=NAME"
        )
    for message in prompt.messages:
        if message.get("content") is None and not message.get("tool_calls"):
            raise UserError(f"{key}.path: {where}: a {message['role']} message of the prompt has no content; write its text")
    if isinstance(answer, str):
        return Example(prompt, answer if prompt.text is not None else {"role": "assistant", "content": answer})
    alone = answer[0] if isinstance(answer, list) and len(answer) == 1 else None
    if not isinstance(alone, Mapping) or alone.get("role") != "assistant" or prompt.text is not None:
        raise UserError(f"{key}.columns.completion: {where} needs text or exactly one assistant message as its answer")
    return Example(prompt, {"content": "", **{name: value for name, value in alone.items() if value is not None}})


def _shortened(example: Example, config: DeletionConfig) -> Example:
    """The example without the steps that `config` deletes; answers that are neither text nor reasoning stay as they are."""
    name, answer = example.prompt.id, example.answer
    if isinstance(answer, str):
        short = shortened(answer, config, name)
        return replace(example, answer=short, num_deleted=len(answer) - len(short))
    part = "reasoning_content" if answer.get("reasoning_content") else "content"
    text = answer.get(part)
    if not isinstance(text, str):
        return example
    short = shortened(text, config, name, whole=part == "reasoning_content")
    return replace(example, answer={**answer, part: short}, num_deleted=len(text) - len(short))


def special_tokens(tokenizer: "PreTrainedTokenizerBase") -> re.Pattern[str]:
    """Finds in a text what the tokenizer would read as a special token, whether that has a role (EOS, ...) or not."""
    added = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    tokens = sorted({*added, *tokenizer.all_special_tokens} - {""}, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, tokens)) or "(?!)")


def spells(example: Example, special: re.Pattern[str]) -> bool:
    """Whether a text of the prompt or of the answer holds what `special` finds."""
    prompt = example.prompt
    return any(special.search(text) for text in _texts([prompt.messages, prompt.tools, prompt.text, example.answer]))


def _texts(value: Any) -> Iterator[str]:
    """Every text in messages, their parts and their tool calls."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(part)


def drops_tool_calls(tokenizer: "PreTrainedTokenizerBase", example: Example) -> bool:
    """Whether the chat template does not write the answer's tool calls, so that another answer would be learnt."""
    if isinstance(example.answer, str) or not example.answer.get("tool_calls"):
        return False
    without = {name: part for name, part in example.answer.items() if name != "tool_calls"}
    return _whole_text(tokenizer, example) == _whole_text(tokenizer, replace(example, answer=without))


def encode(tokenizer: "PreTrainedTokenizerBase", eos_ids: Sequence[int], example: Example) -> Encoded:
    """The prompt as the student sees it when it samples, then the answer up to and including the EOS of its turn.

    Raises `UserError` where the student's chat template cannot have answered this prompt in this way.
    """
    from opd.tokenization import HiddenMarks, render

    if isinstance(example.answer, str):
        prompt_ids = render(tokenizer, example.prompt)
        eos = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else eos_ids[0]
        answer_ids = [*tokenizer(example.answer, add_special_tokens=False)["input_ids"], eos]  # type: ignore[misc]
        return Encoded(np.concatenate([prompt_ids, np.asarray(answer_ids, np.int32)]), len(prompt_ids))
    hidden = HiddenMarks(*example.prompt.messages, *example.prompt.tools, example.answer)
    messages = tuple(hidden.hide_in(tokenizer, example.prompt.messages))
    example = replace(example, prompt=replace(example.prompt, messages=messages))
    before, whole = _text(tokenizer, example.prompt, asked=True), _whole_text(tokenizer, example)
    if not whole.startswith(before):
        raise UserError(_not_a_prefix(example, before, whole))
    prompt_ids, ids = (np.asarray(hidden.encode(tokenizer, text), np.int32) for text in (before, whole))
    n = len(prompt_ids)
    if not np.array_equal(ids[:n], prompt_ids):  # the boundary lies inside a token: keep the one that sampling has
        rest = tokenizer(whole[len(before) :], add_special_tokens=False)["input_ids"]
        split = np.concatenate([prompt_ids, np.asarray(rest, np.int32)])
        if tokenizer.decode(split) != tokenizer.decode(ids):
            raise UserError(
                f"dataset.path: {example.prompt.id}: the student's tokenizer cannot split the text between prompt and answer"
                "; leave the row out"
            )
        ids = split
    ends = np.flatnonzero(np.isin(ids[n:], list(eos_ids)))
    if not len(ends):
        raise UserError(
            f"student.model: its chat template ends an answer without an EOS token ({example.prompt.id}), so the student "
            "would not learn to stop; give it a template that writes eos_token after an assistant message"
        )
    return Encoded(ids[: n + int(ends[0]) + 1], n)


def _whole_text(tokenizer: "PreTrainedTokenizerBase", example: Example) -> str:
    """The conversation with its answer, as the chat template writes it."""
    return _text(tokenizer, replace(example.prompt, messages=(*example.prompt.messages, example.answer)))  # type: ignore[arg-type]


def _text(tokenizer: "PreTrainedTokenizerBase", prompt: Prompt, *, asked: bool = False) -> str:
    """As `opd.tokenization.render_text` where the answer is `asked` for; errors name the fields of `opd sft`."""
    if not tokenizer.chat_template:
        raise UserError(
            "student.model: its tokenizer has no chat template; a base model needs dataset.plain=true and rows of plain text"
        )
    try:
        text = tokenizer.apply_chat_template(
            [dict(message) for message in prompt.messages],
            tools=[dict(tool) for tool in prompt.tools] or None,
            tokenize=False,
            add_generation_prompt=asked,
            **prompt.chat_template_kwargs,
        )
    except (TemplateError, TypeError, ValueError) as error:
        raise UserError(
            f"dataset.path: {prompt.id} does not fit the student's chat template: {' '.join(str(error).split())}; "
            "change or leave out the row, or give the student another template"
        ) from None
    assert isinstance(text, str)
    return text


def _not_a_prefix(example: Example, before: str, whole: str) -> str:
    shared = next((i for i, (a, b) in enumerate(zip(before, whole)) if a != b), min(len(before), len(whole)))
    return (
        f"student.model: its chat template writes {example.prompt.id} with an answer as ...{whole[shared : shared + 30]!r} "
        f"where a prompt goes on ...{before[shared : shared + 30]!r}, so that the student would learn another text than it "
        "samples; set dataset.chat_template_kwargs (such as enable_thinking), or give the student another template"
    )
