"""What the members of the cross-tokenizer recipes are like once trained. Slow: they are trained from nothing."""

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from opd.models import decoder
from opd.teachers.experts import Experts
from opd.tiny import resolve
from opd.tiny.arithmetic import splits
from opd.tiny.training import encode_prompts, greedy_accuracy

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
HELDOUT = splits()["heldout"]


def load(name: str) -> tuple[Any, Any]:
    folder = resolve(name)
    return AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)


def test_the_moe_teacher_is_a_weak_one_with_one_expert():
    model, tokenizer = load("tiny:moe-teacher")
    strong = greedy_accuracy(model, tokenizer, HELDOUT)
    with Experts(decoder(model)).on(1):
        weak = greedy_accuracy(model, tokenizer, HELDOUT)
    assert strong >= 0.95
    assert 0.2 <= weak <= 0.7


def test_the_weak_reference_is_between():
    assert 0.3 <= greedy_accuracy(*load("tiny:weak"), HELDOUT) <= 0.6


def test_the_other_student_is_often_wrong_and_writes_well():
    model, tokenizer = load("tiny:other-student")
    assert 0.2 <= greedy_accuracy(model, tokenizer, HELDOUT) <= 0.4
    prompts = encode_prompts(tokenizer, HELDOUT[:200])
    torch.manual_seed(0)
    answers = model.generate(prompts, do_sample=True, top_k=0, max_new_tokens=40)[:, prompts.shape[1] :]
    ended = (answers == tokenizer.eos_token_id).any(1).float().mean()
    texts = tokenizer.batch_decode(answers, skip_special_tokens=True)
    well_formed = sum(set(text) <= set("0123456789+=,\n# ") for text in texts) / len(texts)
    assert ended >= 0.98
    assert well_formed >= 0.9
