import re
from itertools import accumulate, pairwise

import pytest
from jinja2 import TemplateError
from transformers import AutoTokenizer

from opd.episodes import Reply, ToolCall
from opd.tiny.arithmetic import Problem
from opd.tiny.tokenizer import BOS_ID, END_ID, PAD_ID, build_tokenizer


@pytest.fixture(scope="module", params=["built", "reloaded"])
def tokenizer(request, tmp_path_factory):
    built = build_tokenizer("characters", max_tokens=256)
    if request.param == "built":
        return built
    folder = tmp_path_factory.mktemp("tokenizer")
    built.save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


TEXTS = [Problem(347, 585).solution, "# ## ### #### #####", " two  spaces ,\n\n", "né 数 🙂", "1,2=3+4,,=++"]


@pytest.mark.parametrize("text", TEXTS)
def test_text_round_trips(tokenizer, text):
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    other = build_tokenizer("operators", max_tokens=256)
    assert other.decode(other(text).input_ids) == text


def test_one_token_a_character_but_for_the_answer_mark(tokenizer):
    assert tokenizer.tokenize("12\n#### 932") == ["1", "2", "Ċ", "####", "Ġ", "9", "3", "2"]


def test_signs_join_the_digit_before_them_and_the_mark_is_two_halves():
    tokenizer = build_tokenizer("operators", max_tokens=256)
    assert tokenizer.tokenize("347+585") == ["3", "4", "7+", "5", "8", "5"]
    expected = [
        "7+",
        "5+",
        "0=",
        "1",
        "2,",
        "4+",
        "8+",
        "1=",
        "1",
        "3,",
        "3+",
        "5+",
        "1=",
        "9",
        "Ċ",
        "##",
        "##",
        "Ġ",
        "9",
        "3",
        "2",
    ]
    assert tokenizer.tokenize(Problem(347, 585).solution) == expected


@pytest.mark.parametrize("problem", [Problem(347, 585), Problem(7, 0), Problem(999, 999)])
def test_beside_the_first_tokenizer_units_of_every_kind_occur(problem):
    """One token against several, several against one, and one against one; none that overlap otherwise."""
    sizes = []
    for name in ("operators", "characters"):
        tokenizer = build_tokenizer(name, max_tokens=256)
        sizes.append([len(tokenizer.decode([i])) for i in tokenizer(problem.solution).input_ids])
    student, teacher = ({*accumulate(one)} for one in sizes)
    cuts = sorted(student & teacher)
    units = {
        tuple(sum(low < end <= high for end in ends) for ends in (student, teacher)) for low, high in pairwise([0, *cuts])
    }
    assert units == {(1, 1), (1, 2), (2, 1)}


def test_encoding_adds_no_token(tokenizer):
    assert len(tokenizer("1+2").input_ids) == 3


def test_chat_template(tokenizer):
    chat = [{"role": "user", "content": "347+585"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert prompt == "<|bos|><|user|>347+585<|end|><|assistant|>"
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True).input_ids
    assert ids == tokenizer(prompt).input_ids
    assert len(ids) == 11
    assert tokenizer.decode(ids, skip_special_tokens=True) == "347+585"


def test_chat_template_with_a_system_message_and_an_answer(tokenizer):
    roles = ("system", "user", "assistant")
    chat = [{"role": role, "content": str(i)} for i, role in enumerate(roles)]
    text = tokenizer.apply_chat_template(chat, tokenize=False)
    assert text == "<|bos|><|system|>0<|end|><|user|>1<|end|><|assistant|>2<|end|>"


def test_a_role_without_a_mark_is_refused(tokenizer):
    with pytest.raises(TemplateError, match="no such role"):
        tokenizer.apply_chat_template([{"role": "tool", "content": "3"}], tokenize=False)


def test_special_tokens(tokenizer):
    assert (tokenizer.pad_token, tokenizer.bos_token, tokenizer.eos_token) == ("<|pad|>", "<|bos|>", "<|end|>")
    assert set(tokenizer.all_special_tokens) == {
        *("<|pad|>", "<|bos|>", "<|end|>"),
        *("<|system|>", "<|user|>", "<|assistant|>"),
    }


@pytest.fixture(scope="module", params=["built", "reloaded"])
def calculator(request, tmp_path_factory):
    built = build_tokenizer("calculator", max_tokens=256)
    if request.param == "built":
        return built
    folder = tmp_path_factory.mktemp("calculator")
    built.save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


EPISODE = [
    {"role": "user", "content": "7+5*3"},
    Reply("", (ToolCall("calculator", {"expression": "7+5"}),)).message,
    {"role": "tool", "content": "2"},
    Reply("", (ToolCall("calculator", {"expression": "2*3"}), ToolCall("calculator", {"expression": "*"}))).message,
    {"role": "tool", "content": "6"},
    {"role": "tool", "content": "error"},
]
RENDERED = (
    "<|bos|><|user|>7+5*3<|end|><|assistant|><|call|>7+5<|end|><|tool|>2<|end|><|assistant|><|call|>2*3<|call|>*<|end|>"
    "<|tool|>6<|end|><|tool|>error<|end|><|assistant|>"
)


def test_an_episode_round_trips_one_token_a_mark_a_character_and_the_error(calculator):
    assert calculator.apply_chat_template(EPISODE, add_generation_prompt=True, tokenize=False) == RENDERED
    ids = calculator.apply_chat_template(EPISODE, add_generation_prompt=True).input_ids
    assert ids == calculator(RENDERED).input_ids
    assert len(ids) == len(re.findall(r"<\|\w+\|>|error|.", RENDERED))
    assert calculator.decode(ids) == RENDERED
    assert len(calculator) == 22


def test_the_mark_of_a_call_is_text_and_stays_where_special_tokens_are_left_out(calculator):
    ids = calculator("<|assistant|><|call|>7+5<|end|>").input_ids
    assert calculator.decode(ids, skip_special_tokens=True) == "<|call|>7+5"
    assert (calculator.pad_token_id, calculator.bos_token_id, calculator.eos_token_id) == (PAD_ID, BOS_ID, END_ID)


@pytest.mark.parametrize("text", ["Compute 7+5", "7 + 5", "7/5", "erro", "٧"])
def test_the_calculators_tokenizer_refuses_text_that_it_does_not_know(calculator, text):
    with pytest.raises(Exception, match="Missing"):
        calculator(text)
    for role in ("system", "user", "tool"):
        with pytest.raises(TemplateError, match="knows digits"):
            calculator.apply_chat_template([{"role": role, "content": text}], tokenize=False)


def test_the_calculators_template_refuses_a_role_without_a_mark(calculator):
    with pytest.raises(TemplateError, match="no such role"):
        calculator.apply_chat_template([{"role": "critic", "content": "3"}], tokenize=False)
