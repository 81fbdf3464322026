"""The table of special tokens: what the teacher reads for each of the student's."""

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer

from opd.alignment.aligner import Aligner
from opd.errors import UserError
from tests.alignment.conftest import TEMPLATE, encode, wrap

CONTEXT = np.zeros(1, np.int32)


@pytest.fixture
def extended(tokenizers):
    """`extended(kind, special, literal, **options)`: a tokenizer with these added tokens; `literal` ones are text, too."""

    def build(kind="byte_level", special=(), literal=(), **options):
        backend = Tokenizer.from_str(tokenizers[kind].backend_tokenizer.to_str())
        backend.encode_special_tokens = False
        backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
        backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in literal])
        return wrap(backend, **options)

    return build


def pair_of(student, teacher, **options) -> Aligner:
    return Aligner(student, teacher, student_eos=[student.eos_token_id], teacher_eos=[teacher.eos_token_id], **options)


def row(pair: Aligner, token: str):
    return next(row for row in pair.special_table if row.token == token)


def test_each_way_to_read_a_special_token(extended):
    student = extended(special=["<|tool|>", "[THINK]", "[/THINK]", "<|pause|>"], literal=["<tool_call>", "</tool_call>"])
    teacher = extended("llama", special=["<|tool|>"], literal=["<think>", "</think>", "<tool_call>"])
    pair = pair_of(student, teacher)
    ids = teacher.get_vocab()
    assert [(row(pair, token).how, row(pair, token).teacher) for token in ("</s>", "<|tool|>", "[THINK]", "<|pause|>")] == [
        ("turn end", "</s>"),
        ("token", "<|tool|>"),
        ("token", "<think>"),
        ("masked", ""),
    ]
    assert row(pair, "<tool_call>").teacher_ids == (ids["<tool_call>"],)
    assert row(pair, "</tool_call>").how == "text"
    text = "[THINK]the fox[/THINK]<tool_call>12</tool_call><|pause|> ok<|tool|>"
    spans = pair.align(np.array(student(text)["input_ids"]), CONTEXT)
    tokens = teacher.convert_ids_to_tokens(spans.token_ids)
    assert [token for token in tokens if token in ids and ids[token] >= ids["<|tool|>"]] == [
        "<think>",
        "</think>",
        "<tool_call>",
        "<|tool|>",
    ]
    assert spans.aligned.tolist().count(False) == 1  # <|pause|>
    assert spans.num_bytes.sum() == len("the fox<tool_call>12</tool_call> ok")
    assert spans.settled == len(spans.aligned)  # it ends with a special token: the text before it is closed


def test_tags_that_the_teachers_template_writes_as_text(extended):
    student = extended(special=["[THINK]"], literal=["<seed:think>"])
    teacher = extended("llama", chat_template=TEMPLATE + "{# <think> #}")
    pair = pair_of(student, teacher)
    for token in ("[THINK]", "<seed:think>"):
        found = row(pair, token)
        assert (found.how, found.teacher, list(found.teacher_ids)) == (
            "text",
            "<think>",
            encode(teacher, "<think>").tolist(),
        )
        spans = pair.align(np.array([student.get_vocab()[token], *encode(student, " so")]), CONTEXT)
        assert spans.token_ids.tolist()[: len(found.teacher_ids)] == list(found.teacher_ids)
        assert (spans.student_sizes[0], spans.teacher_sizes[0], spans.aligned.all()) == (1, len(found.teacher_ids), True)


def test_the_user_overrides_the_table(extended):
    student, teacher = extended(special=["<|a|>", "<|b|>", "<|c|>"], literal=["<d>"]), extended("llama", special=["<|c|>"])
    pair = pair_of(student, teacher, special_tokens={"<|a|>": "<|c|>", "<|b|>": "fox", "<|c|>": "", "<d>": ""})
    assert [(row(pair, token).how, row(pair, token).teacher) for token in ("<|a|>", "<|b|>", "<|c|>", "<d>")] == [
        ("token", "<|c|>"),
        ("text", "fox"),
        ("masked", ""),
        ("masked", ""),
    ]
    ids = [student.get_vocab()[token] for token in ("<|a|>", "<|b|>", "<|c|>", "<d>")]
    spans = pair.align(np.array(ids), CONTEXT)
    assert spans.token_ids.tolist() == [teacher.get_vocab()["<|c|>"], *encode(teacher, "fox").tolist()]
    assert spans.aligned.tolist() == [True, True, False, False]
    assert spans.num_bytes.tolist() == [0, 0, 0, 3]
    assert pair.same_bytes[ids].tolist()[::2] == [teacher.get_vocab()["<|c|>"], -1]


def test_a_wrong_override_is_refused(extended):
    student, teacher = extended(special=["<|pause|>"]), extended("llama")
    with pytest.raises(UserError, match=r"^alignment\.special_tokens: '<\|puase\|>' .*did you mean '<\|pause\|>'\?"):
        pair_of(student, teacher, special_tokens={"<|puase|>": ""}, field="teachers.big")
    with pytest.raises(UserError, match=r"^alignment\.special_tokens: '</s>' ends the student's turn"):
        pair_of(student, teacher, special_tokens={"</s>": "x"})


@pytest.mark.parametrize("teacher", ["byte_level", "llama", "gemma", "wordpiece"])
def test_control_tokens_written_as_text_stay_text(tokenizers, aligner, teacher):
    """A student that writes `</s>` letter by letter does not end the teacher's turn."""
    ids = encode(tokenizers["byte_level"], "a </s> b")
    assert not {0, 1} & set(aligner("byte_level", teacher).align(ids, CONTEXT).token_ids.tolist())


def test_ids_beyond_the_vocabulary_are_masked(aligner, tokenizers):
    size = len(tokenizers["byte_level"])
    ids = np.array([*encode(tokenizers["byte_level"], "fox"), size + 7])
    spans = aligner("byte_level", "llama").align(ids, CONTEXT)
    assert (spans.student_ends[-1], spans.aligned[-1], spans.num_bytes.sum()) == (len(ids), False, 3)


def test_the_turn_end_is_what_the_template_writes(extended):
    teacher = extended("llama", special=["<|end|>", "<|stop|>"], chat_template=TEMPLATE.replace("eos_token", "'<|end|>'"))
    ends = [teacher.get_vocab()[token] for token in ("</s>", "<|end|>", "<|stop|>")]
    student = extended()

    def turn_end(*teacher_eos, template=True):
        teacher.chat_template = teacher.chat_template if template else "{{ raise_exception('no') }}"
        pair = Aligner(student, teacher, student_eos=[1], teacher_eos=teacher_eos)
        return pair.align(np.array([1]), CONTEXT).token_ids.tolist()

    assert turn_end(*ends) == [ends[1]]
    assert turn_end(ends[2], ends[0]) == [ends[0]]  # the tokenizer's
    assert turn_end(ends[2]) == [ends[2]]  # the lowest
    assert turn_end(*ends, template=False) == [ends[0]]


def test_the_table_as_lines(aligner):
    assert aligner("byte_level", "llama").special_lines == [
        "id  student  read as   teacher",
        "0   <s>      token     <s>",
        "1   </s>     turn end  </s>",
        "2   <unk>    token     <unk>",
    ]
