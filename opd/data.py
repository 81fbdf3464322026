"""Prompts from a file, or from a data set on the hub.

JSON lines are read here, so that a broken line can be named by its number; every other format goes through `datasets`.
A row's prompt is text (made a user message) or a list of chat messages, as in TRL's prompt-only format.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import MISSING

from opd.errors import UserError
from opd.records import DEFAULT_DOMAIN, Prompt
from opd.spelling import nearest
from opd.templates import check_template
from opd.tiny import check_name, is_tiny, resolve


@dataclass(frozen=True)
class Columns:
    """Which columns hold what."""

    prompt: str = "prompt"
    """The problem: text, or a list of chat messages."""
    answer: str = "answer"
    """The answer, where there is one; only evaluation, verifiers and the term `self_distillation` read it."""
    domain: str = "domain"
    """The name of the teacher that scores this prompt, where there is such a column."""
    tools: str = "tools"
    """JSON schemas of tools, where there is such a column."""


@dataclass(frozen=True)
class DatasetConfig:
    """Prompts from a file or a data set."""

    path: str = MISSING
    """A file (.jsonl, .json, .csv, .parquet), a hub id, or `tiny:prompts`."""
    split: str = "train"
    """Split of a hub data set."""
    subset: str | None = None
    """Configuration of a hub data set, where it has several."""
    columns: Columns = field(default_factory=Columns)
    template: str = "{prompt}"
    """Text around the problem, such as an instruction about the form of the answer."""
    system: str | None = None
    """A system message before the problem."""
    plain: bool = False
    """Tokenise the text as it is, without a chat template: for base models."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of the chat template, such as `enable_thinking: false`."""
    limit: int | None = None
    """Only the first so many rows."""


def load_prompts(config: DatasetConfig, key: str) -> list[Prompt]:
    """All prompts of a data set. `key` is the recipe's section, for messages.

    Raises `UserError` naming the file, and the line where one is broken, when it is missing or empty, or lacks a column.
    """
    columns = config.columns
    prompts: list[Prompt] = []
    for where, row in read_rows(config, key):
        if columns.prompt not in row:
            hint = nearest(columns.prompt, row)
            what = f"{where} has no column {columns.prompt!r}{hint}"
            field = f"{key}.columns.prompt"
            if key.startswith("--"):  # of the command line
                raise UserError(f"{key}: {what}; name it with --data FILE --prompt NAME")
            raise UserError(f"{field}: {what}; name it with {field}=NAME")
        prompts.append(prompt_of(row, where, config, key))
        if config.limit is not None and len(prompts) >= config.limit:
            break
    if not prompts:
        raise UserError(f"{key}.path: {config.path} holds no prompts")
    return prompts


def check_options(config: DatasetConfig, key: str) -> None:
    """Refuses options that cannot work, whatever the rows are. Raises `UserError` naming `key`."""
    if "{prompt}" not in config.template:
        raise UserError(f"{key}.template: it must contain {{prompt}}, where the problem goes")
    check_template(f"{key}.template", config.template, ("prompt",))
    if config.plain and (config.system or config.chat_template_kwargs):
        raise UserError(f"{key}.plain: without a chat template, system and chat_template_kwargs have no effect")
    if config.limit is not None and config.limit < 1:
        raise UserError(f"{key}.limit is {config.limit}: it must be at least 1")


def prompt_of(row: Mapping[str, Any], where: str, config: DatasetConfig, key: str) -> Prompt:
    columns = config.columns
    problem, answer = row[columns.prompt], row.get(columns.answer)
    messages: tuple[Mapping[str, Any], ...] = ({"role": "system", "content": config.system},) if config.system else ()
    text = None
    if isinstance(problem, str) and problem.strip():
        problem = config.template.replace("{prompt}", problem)
        text = problem if config.plain else None
        messages = () if config.plain else (*messages, {"role": "user", "content": problem})
    elif isinstance(problem, list) and problem and all(isinstance(m, Mapping) and "role" in m for m in problem):
        if config.plain:
            raise UserError(f"{key}.plain: {where} holds chat messages, which need a chat template")
        messages = (*messages, *_wrap_last(problem, config.template))
    else:
        raise UserError(f"{key}.columns.prompt: {where} needs non-empty text or a list of messages in {columns.prompt!r}")
    tools = row.get(columns.tools) or []
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise UserError(f"{key}.columns.tools: {where} needs a list of JSON schemas in {columns.tools!r}")
    known = {columns.prompt, columns.answer, columns.domain, columns.tools, "id"}
    return Prompt(
        id=str(row["id"]) if row.get("id") is not None else where,
        messages=messages,
        text=text,
        answer=_answer(answer),
        problem=own_words(row[columns.prompt]),
        domain=str(row.get(columns.domain) or DEFAULT_DOMAIN),
        tools=tuple(tools),
        chat_template_kwargs=config.chat_template_kwargs,
        meta={name: value for name, value in row.items() if name not in known},
    )


def _answer(answer: Any) -> str | tuple[str, ...] | None:
    """Text, or several texts; None for what is no answer, which only an evaluation minds."""
    if isinstance(answer, list):
        texts = [_answer(part) for part in answer]
        return tuple(text for text in texts if isinstance(text, str)) if texts and all(texts) else None
    return str(answer) if isinstance(answer, str | int | float) and not isinstance(answer, bool) and str(answer) else None


def own_words(prompt: Any) -> str:
    """A task's own words: the text, or what users say in the messages."""
    if isinstance(prompt, str):
        return prompt
    said = [message.get("content") for message in prompt if message["role"] == "user"]
    return "\n".join(content for content in said if isinstance(content, str))


def _wrap_last(messages: list[Mapping[str, Any]], template: str) -> list[Mapping[str, Any]]:
    """The template put around the last message, where that is plain text."""
    *before, last = messages
    content = last.get("content")
    return [*before, {**last, "content": template.replace("{prompt}", content)} if isinstance(content, str) else last]


def check_path(name: str, key: str) -> None:
    """Refuses a path that is no file, no hub id and no member of the tiny family. Raises `UserError` naming `key`."""
    if is_tiny(name):
        check_name(name)
        return
    path = Path(name).expanduser()
    if path.is_file():
        return
    if path.is_dir():
        raise UserError(f"{key}.path: {name} is a folder; name a file in it")
    if path.suffix or path.is_absolute() or name.count("/") != 1:
        raise UserError(f"{key}.path: no such file {name!r}")


def read_rows(config: DatasetConfig, key: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(place for messages, row) of each row. Raises `UserError` for options that cannot work, and as `load_prompts` does."""
    check_options(config, key)
    check_path(config.path, key)
    path = resolve(config.path) if is_tiny(config.path) else Path(config.path).expanduser()
    if not path.is_file():
        yield from _hub_rows(config, key)
    elif path.suffix == ".jsonl":
        yield from json_lines(path, f"{key}.path")
    else:
        formats = {".json": "json", ".csv": "csv", ".parquet": "parquet", ".txt": "text"}
        if path.suffix not in formats:
            raise UserError(f"{key}.path: {path.name} is none of .jsonl {' '.join(sorted(formats))}")
        from datasets import load_dataset

        try:
            rows = load_dataset(formats[path.suffix], data_files=str(path), split="train")
        except Exception as error:  # whatever the format's reader raises, the user sees which file it was
            raise UserError(
                f"{key}.path: {path} cannot be read: {' '.join(str(error.__cause__ or error).split())}"
            ) from None
        for number, row in enumerate(rows, start=1):
            yield f"row {number}", row  # type: ignore[misc]


def _hub_rows(config: DatasetConfig, key: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    from datasets import load_dataset

    try:
        rows = load_dataset(config.path, config.subset, split=config.split)
    except Exception as error:  # no network, no such id, a gated set: the reason is in the library's message
        raise UserError(f"{key}.path: {config.path!r} cannot be loaded: {' '.join(str(error).split())}") from None
    for number, row in enumerate(rows, start=1):
        yield f"row {number}", row  # type: ignore[misc]


def json_lines(path: Path, field: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """("line N", object) of each line that is not blank. Raises `UserError` naming `field`, the line and the file."""
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                json.dumps(row, ensure_ascii=False).encode() if b"\\u" in line else None
            except UnicodeDecodeError:
                raise UserError(f"{field}: line {number} of {path} is not UTF-8 text") from None
            except (ValueError, RecursionError) as error:  # a lone surrogate is JSON, but no text
                raise UserError(f"{field}: line {number} of {path} is not valid JSON: {error}") from None
            if not isinstance(row, dict):
                raise UserError(f"{field}: line {number} of {path} is not a JSON object")
            yield f"line {number}", row
