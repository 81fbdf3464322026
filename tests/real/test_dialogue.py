"""Episodes under the chat templates of real models: `OPD_REAL_MODELS`."""

import json
import os
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from opd.envs.dialogue import Dialogue
from opd.envs.formats import read_reply, tool_format
from opd.episodes import Reply
from opd.records import Prompt
from opd.tokenization import eos_ids, load_tokenizer, render

FOLDER = Path(os.environ.get("OPD_REAL_MODELS", Path.home() / ".cache" / "opd-real-models"))
PARAMETERS = {"type": "object", "properties": {"order": {"type": "string"}}}
TOOL = {"type": "function", "function": {"name": "find", "description": "Finds it.", "parameters": PARAMETERS}}
SYSTEM, OPENING = {"role": "system", "content": "You sell tea."}, {"role": "user", "content": "Where is my order?"}

pytestmark = [pytest.mark.real, pytest.mark.timeout(1800)]

TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), max_size=30) | st.sampled_from(
    ["Yes.\n", "a  b\n\n", "<|im_end|>", "12", "{}", "naïve 😀", "<tool_call>"]
)
SAID = TEXTS.filter(lambda text: text == text.lstrip() and "<" not in text and "{" not in text)
CALLS = st.dictionaries(TEXTS.filter(lambda text: "<" not in text), SAID | st.integers() | st.booleans(), max_size=2)
TURNS = st.lists(
    st.tuples(SAID, st.lists(CALLS, max_size=2), st.lists(TEXTS, min_size=1, max_size=2), st.booleans()),
    min_size=1,
    max_size=4,
)


@cache
def loaded(name):
    tokenizer = load_tokenizer(str(FOLDER / name), "student.model")
    return tokenizer, eos_ids(str(FOLDER / name), "student.model", tokenizer)


@pytest.mark.parametrize(("name", "calls_tools"), [("qwen05", True), ("smollm2", False)])
@given(TURNS)
@settings(max_examples=300, deadline=None, derandomize=True, database=None)
def test_append_only_is_exact_and_agrees_with_the_template(name, calls_tools, turns):
    tokenizer, ends = loaded(name)
    prompt = Prompt("p", (SYSTEM, OPENING), tools=(TOOL,))
    dialogue, form = Dialogue(tokenizer, ends, "student.model"), tool_format(tokenizer)
    ids, exchanges = render(tokenizer, prompt), []
    for said, arguments, answers, by_tool in turns:
        objects = [json.dumps({"name": "find", "arguments": each}, ensure_ascii=False) for each in arguments if calls_tools]
        calls = [f"<tool_call>\n{each}\n</tool_call>" for each in objects]
        text = "\n".join([*([said] if said or not calls else []), *calls])
        sampled = np.asarray(tokenizer(f"{text}<|im_end|>", add_special_tokens=False)["input_ids"], np.int32)
        assume(tokenizer.decode(sampled[:-1]) == text)  # SmolLM2 has no tokens for some bytes, and Qwen composes accents
        reply = read_reply(form, tokenizer, sampled, ends)
        assert reply.error is None
        assert [dict(call.arguments) for call in reply.calls] == (arguments if calls_tools else [])
        exchanges.append((reply, [{"role": "tool" if by_tool else "user", "content": answer} for answer in answers]))
        before = np.concatenate([ids, sampled])
        ids = dialogue.appended(prompt, ids, sampled, exchanges[-1][1])
        np.testing.assert_array_equal(ids[: len(before)], before)
        np.testing.assert_array_equal(ids, dialogue.rerendered(prompt, exchanges))


def test_the_form_of_calls():
    assert tool_format(loaded("qwen05")[0]).name == "hermes"
    assert tool_format(loaded("smollm2")[0]).name == "json"
    assert tool_format(loaded("smollm2")[0]).read("Hi.") == Reply("Hi.")
