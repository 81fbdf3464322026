"""Tool calls as models write them: from a reply's tokens to its text and its calls, in the form of its chat template.

A call that cannot be read makes a reply with `error`, in the words of a service that refuses it.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from opd.episodes import Reply, ToolCall
from opd.errors import UserError
from opd.records import Array

MAX_DEPTH = 65  # of JSON values, with the list that holds them

Read = tuple[str, list[ToolCall]]  # the text outside of calls, and the calls


@dataclass(frozen=True)
class ToolFormat:
    """One form of tool calls.

    Example: `tool_format(tokenizer).read('<tool_call>\\n{"name": "f", "arguments": {}}\\n</tool_call>')`
    """

    name: str
    reader: Callable[[str], Read]

    def read(self, text: str) -> Reply:
        """The reply that `text`, without its EOS, is.

        What is said while thinking, up to `</think>`, is content as it stands. A broken call makes all the text content.
        """
        thought, spoken = _without_thought(text)
        try:
            content, calls = self.reader(spoken)
        except _Broken as error:
            return Reply(text, error=f"Invalid tool call: {error}")
        return Reply(thought + content, tuple(calls))


def tool_format(tokenizer: PreTrainedTokenizerBase, field: str = "student.model", tools: bool = True) -> ToolFormat:
    """The form in which the tokenizer's chat template writes calls; `json` where it knows none.

    Raises `UserError` naming `field` when there is no chat template or, if there are `tools`, when its form of calls is
    none of those known here.
    """
    template = tokenizer.chat_template
    if not template:
        raise UserError(f"{field}: its tokenizer has no chat template, which environments need; take a chat model")
    text = "\n".join(template.values()) if isinstance(template, dict) else template
    for name, (marks, reader) in _FORMATS.items():
        if any(mark in text for mark in marks) and not any(mark in text for mark in _OTHER_FORMS):
            return ToolFormat(name, reader)
    if tools and "tool_calls" in text:
        raise UserError(
            f"{field}: its chat template writes tool calls in a form that is not known here; take a model whose form is one "
            f"of {', '.join(name for name in _FORMATS if name != 'tiny')}"
        )
    return ToolFormat("json", _json_object)


def read_reply(form: ToolFormat, tokenizer: PreTrainedTokenizerBase, sampled_ids: Array, eos_ids: Sequence[int]) -> Reply:
    """The reply that sampled tokens [n] are: EOS ids at their end are left out, other special tokens are text."""
    ids = [int(token) for token in sampled_ids]
    while ids and ids[-1] in eos_ids:
        ids.pop()
    text = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    return form.read(text)


class _Broken(Exception):
    """What is wrong with a call."""


def _without_thought(text: str) -> tuple[str, str]:
    """(what is thought, what is said). A thought may begin in the prompt; one that does not end leaves nothing said."""
    thought, end, spoken = text.partition("</think>")
    if end:
        return thought + end, spoken
    return (text, "") if text.lstrip().startswith("<think>") else ("", text)


def _hermes(text: str) -> Read:
    """`<tool_call>\\n{"name": ..., "arguments": {...}}\\n</tool_call>`, a line break between them: Qwen, Hermes and others.

    Small models of these families, Qwen2.5-Coder above all, leave the marks out: then the object alone is a call, too.
    """
    if "<tool_call>" not in text and "</tool_call>" not in text:
        return _json_object(text)
    before, *parts = text.split("<tool_call>")
    contents, calls = [before], []
    for part in parts:
        body, end, after = part.partition("</tool_call>")
        if not end:
            raise _Broken("<tool_call> is not closed by </tool_call>")
        calls.append(_call(_parsed(body), "arguments"))
        contents.append(after)
    if any("</tool_call>" in content for content in contents):
        raise _Broken("</tool_call> without <tool_call> before it")
    separated = [content.removesuffix("\n") for content in contents[:-1]] + contents[-1:]
    return separated[0] + "".join(content for content in separated[1:] if content.strip()), calls


def _llama3_json(text: str) -> Read:
    """`{"name": ..., "parameters": {...}}` alone, perhaps behind `<|python_tag|>`. Llama's template writes one at most."""
    content, tag, body = text.partition("<|python_tag|>")
    if not tag and not re.match(r'\s*\{\s*"(name|type|parameters)"\s*:', text):
        return text, []
    return content if tag else "", [_call(_parsed(body if tag else text), "parameters")]


def _mistral(text: str) -> Read:
    """`[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`."""
    content, mark, body = text.partition("[TOOL_CALLS]")
    if not mark:
        return text, []
    calls = _parsed(body)
    if not isinstance(calls, list) or not calls:
        raise _Broken("[TOOL_CALLS] must be followed by a JSON list of calls")
    return content, [_call(call, "arguments") for call in calls]


def _tiny(text: str) -> Read:
    """`<|call|>7+5`: the tiny family's only tool takes an expression."""
    content, *expressions = text.split("<|call|>")
    if not all(expressions):
        raise _Broken("it has no expression")
    return content, [ToolCall("calculator", {"expression": expression}) for expression in expressions]


# A list or an answer in JSON is no call: one must look as if it were meant to be.
_FENCE = re.compile(r"```(?:json)?\s*(\{.*?)(?:```|(\Z))", re.DOTALL)


def _json_object(text: str) -> Read:
    """Objects with `name` and `arguments`, alone or in fenced blocks: what models without a form of their own write."""
    if text.lstrip().startswith("{") and _means_call(text):
        return "", [_call(value, "arguments") for value in _values(text)]
    blocks = [block for block in _FENCE.finditer(text) if _means_call(block[1])]
    if any(block[2] is not None for block in blocks):
        raise _Broken("the code block is not closed by ```")
    calls = [_call(value, "arguments") for block in blocks for value in _values(block[1])]
    for block in reversed(blocks):
        text = text[: block.start()].removesuffix("\n") + text[block.end() :]
    return text, calls


def _means_call(text: str) -> bool:
    return '"name"' in text and '"arguments"' in text


def _parsed(text: str) -> Any:
    values = _values(text)
    if len(values) != 1:
        raise _Broken(f"expected one JSON value, found {len(values)}")
    return values[0]


def _values(text: str) -> list[Any]:
    """The JSON values of a text that is nothing else.

    Refused, too: what would be no JSON or no text when it is written again (NaN, half a surrogate pair).
    """
    values, rest = [], text.strip()
    try:
        while rest:
            value, end = json.JSONDecoder().raw_decode(rest)
            values.append(value)
            rest = rest[end:].lstrip()
        json.dumps(values, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError) as error:
        raise _Broken(f"not valid JSON ({error})") from None
    if not _is_flatter(values, MAX_DEPTH):
        raise _Broken(f"nested deeper than {MAX_DEPTH - 1} levels")  # what reads it later may not go as deep as the parser
    return values


def _is_flatter(value: Any, depth: int) -> bool:
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return parts is None or (depth > 0 and all(_is_flatter(part, depth - 1) for part in parts))


def _call(value: Any, key: str) -> ToolCall:
    """Raises `_Broken` for what is no call; `key` is what the format calls its arguments."""
    if not isinstance(value, dict):
        raise _Broken("a call must be a JSON object")
    name, arguments = value.get("name"), value.get(key)
    if not isinstance(name, str) or not name:
        raise _Broken('it has no "name"')
    if not isinstance(arguments, dict):
        raise _Broken(f'"{key}" of {name!r} must be a JSON object')
    return ToolCall(name, arguments)


_FORMATS: dict[str, tuple[tuple[str, ...], Callable[[str], Read]]] = {
    "tiny": (("<|call|>",), _tiny),
    "mistral": (("[TOOL_CALLS]",), _mistral),
    "hermes": (("<tool_call>",), _hermes),
    "llama3_json": (("<|python_tag|>", '"parameters": '), _llama3_json),
}
"""What a chat template that uses the form has in it."""
_OTHER_FORMS = ("<function=", "<arg_key>", "[ARGS]")  # calls between the same marks that are no JSON objects
