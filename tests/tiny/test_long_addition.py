"""The long task: its problems, worked solutions, splits and lessons; and, slow, what its members are like once trained."""

import json
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from opd.config import load_config
from opd.eval.answers.extract import extract_answer
from opd.strategies.endpoint import middle_steps, reasoning_of
from opd.tiny import resolve
from opd.tiny.long_addition import (
    DELIMITER,
    DIGITS,
    SPLIT_SIZES,
    LongProblem,
    splits,
    supervised_problems,
    write_rows,
)
from opd.tiny.long_solutions import batches, worked
from opd.tiny.members import MEMBERS, Data, Model
from opd.tiny.models import CONTEXT_TOKENS
from opd.tiny.tokenizer import END_ID, build_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer("characters", CONTEXT_TOKENS)


PROBLEM = LongProblem(425049, 303651)


def test_a_problem_and_its_worked_solution():
    assert DIGITS == 6
    assert (PROBLEM.text, PROBLEM.answer) == ("425049+303651", "728700")
    assert PROBLEM.steps == ["9+1+0=10", "4+5+1=10", "0+6+1=07", "5+3+0=08", "2+0+0=02", "4+3+0=07"]
    assert PROBLEM.solution == "9+1+0=10\n\n4+5+1=10\n\n0+6+1=07\n\n5+3+0=08\n\n2+0+0=02\n\n4+3+0=07\n\n#### 728700"
    assert extract_answer(PROBLEM.solution) == PROBLEM.answer


def test_every_step_is_right_and_hands_its_carry_on():
    for problem in islice(supervised_problems("a"), 200):
        assert all(len(str(number)) == DIGITS for number in (*problem, problem.answer))
        carry, digits = 0, []
        for step in problem.steps:
            left, total = step.split("=")
            x, y, given = map(int, left.split("+"))
            assert (given, int(total)) == (carry, x + y + given)
            carry, digit = divmod(int(total), 10)
            digits.append(str(digit))
        assert problem.a + problem.b == int("".join([str(carry), *reversed(digits)])) == int(problem.answer)


def test_splits_are_disjoint_and_never_change():
    drawn = [problem for split in splits().values() for problem in split]
    assert len(drawn) == len(set(drawn)) == sum(SPLIT_SIZES.values())
    assert splits()["long-heldout"][0].text == "466516+196974"


@pytest.mark.parametrize("name", ["long-teacher", "long-student"])
def test_supervised_examples_are_in_no_split_and_follow_from_the_seed(name):
    member = MEMBERS[name]
    assert isinstance(member, Model)
    first = list(islice(supervised_problems(f"{name}@0"), member.training.max_steps * member.training.batch_size))
    for split in splits().values():
        assert set(first).isdisjoint(split)
    assert first[:50] == list(islice(supervised_problems(f"{name}@0"), 50)) != list(islice(supervised_problems("b"), 50))


@pytest.mark.parametrize("name", ["long-prompts", "long-heldout"])
def test_rows_have_answers_and_solutions(tmp_path, name):
    member = MEMBERS[name]
    assert isinstance(member, Data)
    path = tmp_path / member.file_name
    write_rows(path, member)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(rows) == SPLIT_SIZES[name]
    assert rows[0]["id"] == f"{name}-0"
    for row, problem in zip(rows, splits()[name]):
        assert row == {"id": row["id"], "problem": problem.text, "answer": problem.answer, "solution": problem.solution}


def test_the_quick_start_masks_whole_steps_in_the_middle(tokenizer):
    """The share of its recipe is exactly two of the six steps, and the answer is no step of the reasoning."""
    spelled = [tokenizer.decode([i]).encode() for i in tokenizer(PROBLEM.solution).input_ids]
    inside, steps = reasoning_of(spelled, "think", DELIMITER.encode())
    sizes = np.bincount(steps[inside])
    assert sizes.tolist() == [10] * DIGITS
    settings = load_config("endpoint-quickstart").masks["endpoint"]
    start, end = middle_steps(sizes, settings.fraction, settings.step_budget)
    text = b"".join(piece for piece, there in zip(spelled, inside) if there)[start:end].decode()
    assert text == DELIMITER.join([*PROBLEM.steps[2:4], ""])


def test_lessons_fit_the_context_and_are_trained_whole(tokenizer):
    first, again = (next(batches(tokenizer, 4, seed)) for seed in ("a", "a"))
    for one, other in zip(first, again):
        assert torch.equal(one, other)
    assert torch.equal(first.response_BR, first.targets_BR)
    assert first.prompt_BP.shape[1] + first.response_BR.shape[1] <= CONTEXT_TOKENS
    texts = [tokenizer.decode(row[: row.tolist().index(END_ID)]) for row in first.response_BR]
    assert texts == [problem.solution for problem in islice(supervised_problems("a"), 4)]


def sampled_accuracy(name: str, num: int = 200) -> float:
    folder = resolve(name)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    problems = splits()["long-heldout"][:num]
    prompts = worked(tokenizer, problems).prompt_BP
    torch.manual_seed(0)
    answers: Any = model.generate(prompts, do_sample=True, top_k=0, max_new_tokens=80)[:, prompts.shape[1] :]  # type: ignore
    texts = tokenizer.batch_decode(answers, skip_special_tokens=True)
    return sum(extract_answer(text) == problem.answer for text, problem in zip(texts, problems)) / num


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_teacher_is_right_when_sampled():
    assert sampled_accuracy("tiny:long-teacher") >= 0.95


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_student_is_often_wrong(seed):
    assert 0.2 <= sampled_accuracy(f"tiny:long-student@{seed}") <= 0.5
