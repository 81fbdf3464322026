from itertools import accumulate, pairwise

import pytest
from jinja2 import TemplateError
from transformers import AutoTokenizer

from opd.tiny.arithmetic import Problem
from opd.tiny.tokenizer import build_tokenizer


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
