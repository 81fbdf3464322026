"""Rows to examples, and an example to ids: what is learnt, and what is refused."""

import copy
import json

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from opd.config import parse_section
from opd.errors import UserError
from opd.records import Prompt
from opd.sft.config import AnswersConfig
from opd.sft.examples import Example, drops_tool_calls, encode, read_examples, special_tokens, spells
from opd.tokenization import render

USER, ASSISTANT = {"role": "user", "content": "abc"}, {"role": "assistant", "content": "de"}
EOS = (2,)


def read(tmp_path, rows, **options):
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return list(read_examples(parse_section(AnswersConfig, {"path": str(path), **options}, "dataset"), "dataset"))


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [USER], "completion": [ASSISTANT]},
        {"prompt": "abc", "completion": "de"},
        {"prompt": [USER], "completion": "de"},
        {"messages": [USER, ASSISTANT]},
        {"messages": [USER, ASSISTANT], "completion": None},
    ],
)
def test_every_form_of_row(tmp_path, row):
    (example,) = read(tmp_path, [row])
    assert (list(example.prompt.messages), example.answer) == ([USER], ASSISTANT)


def test_columns_template_and_limit(tmp_path):
    rows = [{"id": n, "question": f"q{n}", "solution": "a"} for n in range(5)]
    columns = {"prompt": "question", "completion": "solution"}
    examples = read(tmp_path, rows, columns=columns, template="{prompt}!", system="s", limit=2)
    assert [example.prompt.id for example in examples] == ["0", "1"]
    assert [message["content"] for message in examples[1].prompt.messages] == ["s", "q1!"]


def test_earlier_answers_of_a_conversation_are_context(tmp_path):
    (example,) = read(tmp_path, [{"messages": [USER, ASSISTANT, USER, {**ASSISTANT, "content": "fg", "name": None}]}])
    assert list(example.prompt.messages) == [USER, ASSISTANT, USER]
    assert example.answer == {"role": "assistant", "content": "fg"}


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"question": "abc", "completion": "de"}, "line 2 has neither 'prompt' with 'completion' nor a conversation"),
        ({"prompt": "abc", "completion": []}, "line 2 needs text or exactly one assistant message"),
        ({"prompt": "abc", "completion": [ASSISTANT, USER]}, "exactly one assistant message"),
        ({"messages": [USER, USER]}, "exactly one assistant message"),
        ({"messages": [ASSISTANT]}, "nor a conversation"),
        ({"prompt": "", "completion": "de"}, "line 2 needs non-empty text"),
        (
            {"prompt": [{**USER, "content": None}], "completion": "de"},
            "path: line 2: a user message of the prompt has no content",
        ),
    ],
)
def test_rows_that_are_refused(tmp_path, row, expected):
    with pytest.raises(UserError, match=expected):
        read(tmp_path, [{"prompt": "abc", "completion": "de"}, row])


def test_the_answer_and_its_eos_are_learnt(student_tokenizer):
    encoded = encode(student_tokenizer, EOS, Example(Prompt("1", (USER,)), ASSISTANT))
    assert encoded.ids.dtype == np.int32
    assert student_tokenizer.decode(encoded.ids) == "<bos><user>abc<assistant>de<eos>"
    assert student_tokenizer.decode(encoded.ids[encoded.trained]) == "de<eos>"
    assert student_tokenizer.decode(encoded.ids[: encoded.num_prompt]) == "<bos><user>abc<assistant>"


def test_what_a_template_writes_after_eos_is_dropped(student_tokenizer, monkeypatch):
    monkeypatch.setattr(
        student_tokenizer, "chat_template", student_tokenizer.chat_template.replace("eos_token }}", "eos_token + 'z' }}")
    )
    encoded = encode(student_tokenizer, EOS, Example(Prompt("1", (USER, ASSISTANT, USER)), ASSISTANT))
    assert student_tokenizer.decode(encoded.ids[encoded.trained]) == "de<eos>"
    assert "de<eos>z" in student_tokenizer.decode(encoded.ids[: encoded.num_prompt])


def test_plain_text(student_tokenizer):
    encoded = encode(student_tokenizer, EOS, Example(Prompt("1", text="abc"), "de"))
    assert student_tokenizer.decode(encoded.ids) == "abcde<eos>"
    assert encoded.trained.tolist() == [False] * 3 + [True] * 3


def test_a_template_that_rewrites_the_prompt_is_refused(student_tokenizer):
    prompt = Prompt("r7", (USER,), chat_template_kwargs={"suffix": "zz"})  # written only where the answer is to follow
    with pytest.raises(UserError, match=r"writes r7 with an answer as \.\.\.'de<eos>' where a prompt goes on \.\.\.'zz'"):
        encode(student_tokenizer, EOS, Example(prompt, ASSISTANT))


def test_a_template_without_eos_is_refused(micro_tokenizer, monkeypatch):
    template = "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] }}{% endfor %}"
    template += "{% if add_generation_prompt %}<assistant>{% endif %}"
    monkeypatch.setattr(micro_tokenizer, "chat_template", template)
    with pytest.raises(UserError, match="without an EOS token"):
        encode(micro_tokenizer, EOS, Example(Prompt("1", (USER,)), ASSISTANT))


def test_the_boundary_is_where_sampling_begins():
    """`ab` is one token, and the prompt ends between its letters: sampling never sees it, so it is not learnt either."""
    words = {"<eos>": 0, "a": 1, "b": 2, "ab": 3, "c": 4}
    bpe = Tokenizer(models.BPE(vocab=words, merges=[("a", "b")]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)  # type: ignore[assignment]
    bpe.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    template = (
        "{{ messages[0]['content'] }}{% if not add_generation_prompt %}{{ messages[1]['content'] + eos_token }}{% endif %}"
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<eos>", chat_template=template)
    example = Example(Prompt("1", ({"role": "user", "content": "ca"},)), {"role": "assistant", "content": "bab"})
    encoded = encode(tokenizer, (0,), example)
    assert encoded.ids.tolist() == [4, 1, 2, 3, 0]
    assert encoded.num_prompt == 2


@pytest.mark.parametrize("answer", ["x<eos>y", {"role": "assistant", "content": "a", "reasoning_content": "<user>"}])
def test_answers_that_spell_special_tokens(student_tokenizer, answer):
    assert spells(Example(Prompt("1"), answer), special_tokens(student_tokenizer))
    assert not spells(Example(Prompt("1", (USER,)), "eos user"), special_tokens(student_tokenizer))


def test_special_tokens_without_a_role_and_in_prompts(student_tokenizer):
    tokenizer = copy.deepcopy(student_tokenizer)
    tokenizer.add_tokens([AddedToken("<|repo|>", special=True), AddedToken("<think>", special=False)])
    assert "<|repo|>" not in tokenizer.all_special_tokens
    special = special_tokens(tokenizer)
    asked = ({"role": "user", "content": [{"type": "text", "text": "a<|repo|>"}]},)
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"a": "<|repo|>"}}}]}
    for example in (Example(Prompt("1", (USER,)), "a<|repo|>"), Example(Prompt("1", asked), "a")):
        assert spells(example, special)
    assert spells(Example(Prompt("1", (USER,)), call), special)
    assert spells(Example(Prompt("1", text="<eos>"), "a"), special)
    assert not spells(Example(Prompt("1", (USER,)), "<think>a"), special)


@pytest.mark.parametrize(
    ("answer", "empty"),
    [
        ("", True),
        (" \n", True),
        ("a", False),
        ([{**ASSISTANT, "content": None}], True),
        ([{**ASSISTANT, "content": ""}], True),
    ],
)
def test_empty_answers(tmp_path, answer, empty):
    (example,) = read(tmp_path, [{"prompt": "abc", "completion": answer}])
    assert example.is_empty == empty


def test_tool_calls_that_the_template_does_not_write(student_tokenizer, tmp_path, monkeypatch):
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
    (example,) = read(tmp_path, [{"prompt": "abc", "completion": [call]}])
    assert not example.is_empty
    assert drops_tool_calls(student_tokenizer, example)
    assert not drops_tool_calls(student_tokenizer, Example(example.prompt, ASSISTANT))
    writes = student_tokenizer.chat_template.replace(
        "m['content']", "m['content'] + (m.tool_calls|string if m.tool_calls else '')"
    )
    monkeypatch.setattr(student_tokenizer, "chat_template", writes)
    assert not drops_tool_calls(student_tokenizer, example)


def test_no_rows(tmp_path):
    with pytest.raises(UserError, match=r"dataset\.path: .*data\.jsonl holds no rows"):
        read(tmp_path, [])


def test_what_does_not_fit_the_template_names_the_data(student_tokenizer):
    prompt = Prompt("line 1", ({"role": "user", "content": 5},))
    with pytest.raises(UserError, match=r"^dataset\.path: line 1 does not fit the student's chat template: .*; change or"):
        encode(student_tokenizer, EOS, Example(prompt, ASSISTANT))


def test_a_model_without_a_template_is_advised_in_the_words_of_sft(student_tokenizer, monkeypatch):
    monkeypatch.setattr(student_tokenizer, "chat_template", None)
    with pytest.raises(UserError, match=r"^student\.model: .*dataset\.plain=true"):
        encode(student_tokenizer, EOS, Example(Prompt("1", (USER,)), ASSISTANT))


def test_a_prompt_that_spells_marks_is_what_it_is_when_sampling(student_tokenizer):
    prompt = Prompt("1", ({"role": "user", "content": "ab<eos>c"},))
    encoded = encode(student_tokenizer, EOS, Example(prompt, ASSISTANT))
    before = render(student_tokenizer, prompt)
    assert encoded.ids[: encoded.num_prompt].tolist() == before.tolist()
    assert 2 not in before
    assert encoded.ids[encoded.num_prompt :].tolist() == [8, 9, 2]
