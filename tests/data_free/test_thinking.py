"""What a model says after it has thought."""

import copy

import numpy as np
import pytest

from opd.data_free.thinking import OPEN_THOUGHT, after_thinking


@pytest.fixture(scope="module")
def tokenizer(micro_tokenizer):
    """Qwen's marks, which are no special tokens, and Mistral's, which are."""
    changed = copy.deepcopy(micro_tokenizer)
    changed.add_tokens(["<think>", "</think>"])
    changed.add_tokens(["[THINK]", "[/THINK]"], special_tokens=True)
    return changed


@pytest.mark.parametrize(
    ("written", "opened", "expected"),
    [
        ("ab<eos>", False, "ab"),
        ("ab</think>cd<eos>", True, "cd"),
        ("<think>ab</think>cd<eos>", False, "cd"),
        ("<think></think>cd<eos>", False, "cd"),
        ("a</think>b</think>cd<eos>", True, "cd"),
        ("[THINK]ab[/THINK]cd<eos>", False, "cd"),
        ("ab[/THINK]cd<eos>", True, "cd"),
        ("ab<eos>", True, ""),
        ("<think>ab<eos>", False, ""),
        ("[THINK]ab<eos>", False, ""),
        ("ab</think><eos>", True, ""),
        ("<eos>", False, ""),
        ("ab</think>cd<eos>", False, "ab</think>cd"),  # a problem about the mark
        ("ab<think>cd</think>ef<eos>", False, "ab<think>cd</think>ef"),
        ("<think>ab</think>cd<think>ef<eos>", False, "cd<think>ef"),
    ],
)
def test_what_follows_the_thinking(tokenizer, written, opened, expected):
    ids = np.array(tokenizer(written, add_special_tokens=False)["input_ids"], np.int32)
    assert after_thinking(tokenizer, ids, opened=opened) == expected


def test_marks_that_are_ordinary_text(byte_tokenizer):
    tokenizer = byte_tokenizer(characters="abcd</think> Ġ")
    ids = np.array(tokenizer("ab</think> cd", add_special_tokens=False)["input_ids"], np.int32)
    assert len(ids) > 10
    assert after_thinking(tokenizer, ids, opened=True) == "cd"


@pytest.mark.parametrize(
    ("prompt", "opening"),
    [
        ("<|assistant|><think>\n", "<think>\n"),
        ("x<seed:think>", "<seed:think>"),
        ("x[THINK]", "[THINK]"),
        ("<think>\n\n</think>\n\n", None),  # thinking switched off
        ("<think> is a tag<|assistant|>", None),
    ],
)
def test_openings(prompt, opening):
    found = OPEN_THOUGHT.search(prompt)
    assert (found and found.group()) == opening
