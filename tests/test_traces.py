"""Reasoning, steps and final answer of a written solution."""

import pytest

from opd.traces import Thinking, answer_lines, step_ends


@pytest.mark.parametrize(
    ("text", "reasoning", "closed"),
    [
        (b"<think>ab</think>c", b"ab", True),
        (b"ab</think>c", b"ab", True),  # the template has written the first mark
        (b"x<think>ab", b"ab", False),
        (b"<think>a</think>b</think>c", b"a</think>b", True),
        (b"<think></think>c", b"", True),
    ],
)
def test_thinking(text, reasoning, closed):
    found = Thinking.of(text)
    assert found is not None
    assert (text[found.start : found.end], found.closed) == (reasoning, closed)


def test_text_without_marks_has_no_thinking():
    assert Thinking.of(b"2+2=4") is None
    assert Thinking.of(b"") is None


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        (b"a\n#### 5", [b"#### 5"]),
        (b"a\n#### 5\n\nb", [b"#### 5\n\n"]),
        (b"#### one\n#### 5", [b"#### 5"]),
        (b"#### Check\nSo \\boxed{5}.\nDone", [b"So \\boxed{5}.\n", b"#### Check\n"]),  # a heading is kept as well
        (b"\\boxed{1}\n\\boxed{2}", [b"\\boxed{2}"]),
        (b"none", []),
    ],
)
def test_answer_lines(text, lines):
    assert [text[start:end] for start, end in answer_lines(text)] == lines


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        (b"a\n\nb\n\nc", [b"a\n\n", b"b\n\n", b"c"]),
        (b"a\n\nb\n\n", [b"a\n\n", b"b\n\n"]),
        (b"\n\na\n\nb", [b"\n\na\n\n", b"b"]),
        (b"a\n\n\n\nb", [b"a\n\n\n\n", b"b"]),
        (b"a\n\n\nb", [b"a\n\n", b"\nb"]),
        (b"a\n\n  \n\n \n\nb\n\n\n", [b"a\n\n  \n\n \n\n", b"b\n\n\n"]),
        (b"a\nb", [b"a\nb"]),
        (b"\n\n", [b"\n\n"]),
        (b"", [b""]),
    ],
)
def test_steps_end_with_their_delimiter_and_none_is_blank(text, steps):
    ends = step_ends(text, b"\n\n")
    assert [text[start:end] for start, end in zip([0, *ends], ends)] == steps


def test_a_delimiter_may_be_any_text():
    assert step_ends(b"7+5=12,4+8=12", b",") == [7, 13]
