"""Replies in every form of tool calls: read, broken, and written again by a template."""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opd.envs import formats
from opd.envs.formats import ToolFormat, read_reply, tool_format
from opd.episodes import Reply, ToolCall
from opd.errors import UserError
from opd.tiny.tokenizer import build_tokenizer
from tests.envs.conftest import EOS, MARKS, PLAIN, QWEN2_5, TOOLS_LAST

TEMPLATES = {
    "hermes": QWEN2_5,
    "mistral": TOOLS_LAST,
    "llama3_json": "{{ '{\"name\": \"' + 'f' + '\", ' }}{{ '\"parameters\": ' }}{{ message.tool_calls }}",
    "tiny": "{{ '<|call|>' }}",
    "json": PLAIN,
}
SEARCH = ToolCall("search", {"query": "x"})
OTHER = ToolCall("other", {})


@pytest.fixture
def form(chat_tokenizer):
    return lambda name: tool_format(chat_tokenizer(TEMPLATES[name]))


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_template_tells_the_form(form, name):
    assert form(name).name == name


HERMES = '<tool_call>\n{"name": "search", "arguments": {"query": "x"}}\n</tool_call>'
OBJECT = '{"name": "search", "arguments": {"query": "x"}}'
LLAMA = OBJECT.replace("arguments", "parameters")


@pytest.mark.parametrize(
    ("name", "text", "content", "calls"),
    [
        ("hermes", "Just text <b>.", "Just text <b>.", ()),
        ("hermes", "", "", ()),
        ("hermes", HERMES, "", (SEARCH,)),
        ("hermes", f"Let me see.\n{HERMES}", "Let me see.", (SEARCH,)),
        ("hermes", f"A.\n\n{HERMES}", "A.\n", (SEARCH,)),
        ("hermes", HERMES + '\n<tool_call>{"name": "other", "arguments": {}}</tool_call>', "", (SEARCH, OTHER)),
        ("hermes", f"{HERMES}\nDone.", "\nDone.", (SEARCH,)),
        ("hermes", f"{HERMES}\n\n", "", (SEARCH,)),
        (
            "hermes",
            f"<think>\nMaybe <tool_call>?\n</think>\n\n{HERMES}",
            "<think>\nMaybe <tool_call>?\n</think>\n",
            (SEARCH,),
        ),
        ("hermes", f"maybe <tool_call>?\n</think>\n\n{HERMES}", "maybe <tool_call>?\n</think>\n", (SEARCH,)),
        ("hermes", f"<think>\n{HERMES}", f"<think>\n{HERMES}", ()),  # never said
        ("hermes", OBJECT, "", (SEARCH,)),
        ("hermes", f"```json\n{OBJECT}\n```", "", (SEARCH,)),
        ("llama3_json", LLAMA, "", (SEARCH,)),
        ("llama3_json", f"<|python_tag|>{LLAMA}", "", (SEARCH,)),
        ("llama3_json", "{1, 2} is a set", "{1, 2} is a set", ()),
        ("llama3_json", "No call.", "No call.", ()),
        ("mistral", f"[TOOL_CALLS] [{OBJECT}]", "", (SEARCH,)),
        (
            "mistral",
            f'Well.[TOOL_CALLS][{OBJECT}, {{"name": "other", "arguments": {{}}, "id": "aB3"}}]',
            "Well.",
            (SEARCH, OTHER),
        ),
        ("mistral", f"[{OBJECT}]", f"[{OBJECT}]", ()),
        ("tiny", "<|call|>7+5", "", (ToolCall("calculator", {"expression": "7+5"}),)),
        ("tiny", "4", "4", ()),
        ("json", OBJECT, "", (SEARCH,)),
        ("json", f"{OBJECT}\n" + '{"name": "other", "arguments": {}}', "", (SEARCH, OTHER)),
        ("json", f"I look.\n```json\n{OBJECT}\n```\nSo.", "I look.\nSo.", (SEARCH,)),
        ("json", f"```\n{OBJECT}\n```", "", (SEARCH,)),
        ("json", '```json\n{"name": "Ann", "age": 3}\n```', '```json\n{"name": "Ann", "age": 3}\n```', ()),
        ("json", "{not a call}", "{not a call}", ()),
    ],
)
def test_replies_are_read(form, name, text, content, calls):
    assert form(name).read(text) == Reply(content, calls)


@pytest.mark.parametrize(
    ("name", "text", "what"),
    [
        ("hermes", "<tool_call>\n{oh}\n</tool_call>", "not valid JSON (Expecting property name"),
        ("hermes", "<tool_call>\n[1]\n</tool_call>", "a call must be a JSON object"),
        ("hermes", "<tool_call></tool_call>", "expected one JSON value, found 0"),
        ("hermes", f"<tool_call>{OBJECT}{OBJECT}</tool_call>", "expected one JSON value, found 2"),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>', 'it has no "name"'),
        ("hermes", '<tool_call>{"name": 3, "arguments": {}}</tool_call>', 'it has no "name"'),
        ("hermes", '<tool_call>{"name": "f"}</tool_call>', "\"arguments\" of 'f' must be a JSON object"),
        ("hermes", '<tool_call>{"name": "f\\n", "arguments": "{}"}</tool_call>', "\"arguments\" of 'f\\n' must be"),
        ("hermes", f"{HERMES}<tool_call>{OBJECT}", "<tool_call> is not closed"),
        ("hermes", f"{OBJECT}\n</tool_call>", "</tool_call> without <tool_call>"),
        ("hermes", f"{OBJECT[:-1]}", "not valid JSON"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>', "not valid JSON"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"x": 1e999}}</tool_call>', "not valid JSON"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"x": "\\ud800"}}</tool_call>', "not valid JSON"),
        ("hermes", f"<tool_call>{'[' * 100_000}</tool_call>", "not valid JSON (maximum recursion depth"),
        ("hermes", f"<tool_call>{'9' * 10_000}</tool_call>", "not valid JSON (Exceeds the limit"),
        (
            "hermes",
            f'<tool_call>{{"name": "f", "arguments": {{"x": {"[" * 300}{"]" * 300}}}}}</tool_call>',
            "nested deeper than 64 levels",
        ),
        ("llama3_json", "<|python_tag|>print(1)", "not valid JSON"),
        ("llama3_json", f"{LLAMA}; {LLAMA}", "not valid JSON"),
        ("llama3_json", f"{LLAMA} {LLAMA}", "expected one JSON value, found 2"),  # its template writes one at most
        ("llama3_json", OBJECT, "\"parameters\" of 'search' must be a JSON object"),
        ("mistral", "[TOOL_CALLS] []", "must be followed by a JSON list"),
        ("mistral", f"[TOOL_CALLS] {OBJECT}", "must be followed by a JSON list"),
        ("mistral", f"[TOOL_CALLS] [{OBJECT}] and", "not valid JSON"),
        ("tiny", "<|call|>", "it has no expression"),
        ("json", f"```json\n{OBJECT}", "the code block is not closed"),
        ("json", f"```json\n{OBJECT[1:]}\n```", None),  # no object at all: text
    ],
)
def test_broken_calls(form, name, text, what):
    reply = form(name).read(text)
    assert reply.content == text
    assert reply.calls == ()
    if what is None:
        assert reply.error is None
    else:
        assert reply.error is not None
        assert reply.error.startswith("Invalid tool call: ")
        assert what in reply.error
        assert "\n" not in reply.error


NOISE = st.text(st.sampled_from(list('<>tool_cal/{}[]"name:arguments,` \n')), max_size=80)
PARTS = ["<tool_call>", "</tool_call>", OBJECT, LLAMA, "```", "[TOOL_CALLS]", "<|call|>", "</think>", "\n", "x"]
PIECES = st.lists(st.sampled_from(PARTS))


@given(st.one_of(NOISE, PIECES.map("".join)), st.sampled_from(["hermes", "llama3_json", "mistral", "tiny", "json"]))
@settings(max_examples=300, deadline=None, derandomize=True, database=None)
def test_nothing_raises_and_no_text_is_lost(text, name):
    reader = formats._FORMATS[name][1] if name in formats._FORMATS else formats._json_object
    reply = ToolFormat(name, reader).read(text)
    assert not (reply.calls and reply.error)
    if not reply.calls:
        assert reply.content == text


@pytest.mark.parametrize("mark", ["<function=", "<arg_key>", "[ARGS]"])
def test_forms_that_are_not_known(chat_tokenizer, mark):
    tokenizer = chat_tokenizer("{{ m.tool_calls }}<tool_call>[TOOL_CALLS]" + mark)
    with pytest.raises(UserError, match=r"student\.model: its chat template writes tool calls in a form that is not known"):
        tool_format(tokenizer)
    assert tool_format(tokenizer, tools=False).name == "json"


def test_no_template(chat_tokenizer):
    with pytest.raises(UserError, match=r"^teacher: its tokenizer has no chat template"):
        tool_format(chat_tokenizer(None), "teacher")


def test_several_templates(chat_tokenizer):
    tokenizer = chat_tokenizer(None)
    tokenizer.chat_template = {"default": PLAIN, "tool_use": QWEN2_5}
    assert tool_format(tokenizer).name == "hermes"


def test_tokens_are_read_without_their_eos(chat_tokenizer):
    tokenizer = chat_tokenizer(QWEN2_5)
    eos = tokenizer.convert_tokens_to_ids([EOS, MARKS[0]])

    def read(text: str) -> Reply:
        ids = np.asarray(tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)
        return read_reply(tool_format(tokenizer), tokenizer, ids, eos)

    assert read(f"é , 1 .{EOS}{MARKS[0]}") == Reply("é , 1 .")
    assert read(f"a<|im_start|>b{EOS}") == Reply("a<|im_start|>b")  # another special token is text
    assert read(f"{HERMES}{EOS}") == Reply("", (SEARCH,))
    assert read(EOS) == Reply("")
    assert read("cut").content == "cut"


def test_the_tiny_family():
    tokenizer = build_tokenizer("calculator", 64)
    ids = np.asarray(tokenizer("<|call|>7+5<|end|>", add_special_tokens=False)["input_ids"], np.int32)
    ends: Any = tokenizer.convert_tokens_to_ids(["<|end|>"])
    reply = read_reply(tool_format(tokenizer), tokenizer, ids, ends)
    assert reply == Reply("", (ToolCall("calculator", {"expression": "7+5"}),))


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
ARGUMENTS = st.dictionaries(st.text(max_size=3), VALUES, max_size=3)
CALLS = st.lists(st.builds(ToolCall, st.sampled_from(["f", "get_é"]), ARGUMENTS), min_size=1)


@given(st.text(st.sampled_from("ab .\n"), max_size=9), CALLS)
@settings(max_examples=100, deadline=None, derandomize=True, database=None)
def test_what_a_template_writes_is_read_back(content, calls):
    objects = [json.dumps({"name": call.name, "arguments": call.arguments}, ensure_ascii=False) for call in calls]
    written = "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in objects)
    written = f"{content}\n{written}" if content else written
    assert ToolFormat("hermes", formats._hermes).read(written) == Reply(content, tuple(calls))
    listed = f"{content}[TOOL_CALLS][{', '.join(objects)}]"
    assert ToolFormat("mistral", formats._mistral).read(listed) == Reply(content, tuple(calls))
