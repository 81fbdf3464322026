"""The student that often leaves the working out: what it is taught, how that is measured, and prompts that nobody solves."""

import json
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
import torch

from opd.eval.grading import grade
from opd.tiny import brief, resolve
from opd.tiny.arithmetic import UNREACHABLE, Problem, extract_answer, splits
from opd.tiny.brief import batches, right_probabilities, taught, validation_accuracy
from opd.tiny.members import MEMBERS, Model
from opd.tiny.models import CONTEXT_TOKENS, initialise, own_torch_state
from opd.tiny.tokenizer import PAD_ID, build_tokenizer
from opd.tiny.training import Batch, response_logits


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer("characters", CONTEXT_TOKENS)


@pytest.fixture(scope="module")
def model(tokenizer) -> Any:
    member = MEMBERS["brief-student"]
    assert isinstance(member, Model)
    with own_torch_state(seed=0):
        return initialise(replace(member, num_layers=1), tokenizer).eval().double()  # what is so improbable is 0 in float32


def texts(tokenizer, batch: Batch) -> list[tuple[str, str]]:
    """(problem, solution) of each example."""
    prompts, responses = (
        tokenizer.batch_decode(part, skip_special_tokens=True) for part in (batch.prompt_BP, batch.response_BR)
    )
    return list(zip(prompts, responses))


def test_a_brief_solution_is_the_answer_alone():
    problem = Problem(347, 585)
    assert problem.brief_solution == "#### 932"
    assert extract_answer(problem.brief_solution) == extract_answer(problem.solution) == "932"


def test_a_share_of_the_solutions_is_brief_and_all_are_right(tokenizer):
    seen = [pair for batch in islice(batches(tokenizer, 50, seed="a"), 20) for pair in texts(tokenizer, batch)]
    problems = [Problem(int(text[:3]), int(text[4:])) for text, _ in seen]
    alone = [solution == problem.brief_solution for problem, (_, solution) in zip(problems, seen)]
    worked = [solution == problem.solution for problem, (_, solution) in zip(problems, seen)]
    assert [one or other for one, other in zip(alone, worked)] == [True] * 1000
    assert abs(sum(alone) / 1000 - brief.SHARE) < 0.05
    assert set(problems).isdisjoint({problem for split in splits().values() for problem in split})


def test_batches_depend_on_the_seed_alone(tokenizer):
    first, again, other = (texts(tokenizer, next(batches(tokenizer, 8, seed))) for seed in ("a", "a", "b"))
    assert first == again != other


def test_short_responses_are_padded_and_their_padding_is_not_trained(tokenizer):
    batch = taught(tokenizer, [Problem(1, 2), Problem(1, 2)], [True, False])
    trained = (batch.targets_BR != PAD_ID).sum(1).tolist()
    assert trained == [len(tokenizer("#### 3").input_ids) + 1, len(tokenizer(Problem(1, 2).solution).input_ids) + 1]


@torch.no_grad()
def test_accuracy_is_the_probability_of_either_right_response(tokenizer, model, monkeypatch):
    problems = splits()["validation"][:3]
    monkeypatch.setattr(brief, "NUM_VALIDATION", 3)
    expected = 0.0
    for problem in problems:
        for alone in (False, True):
            batch = taught(tokenizer, [problem], [alone])
            logps = response_logits(model, batch).log_softmax(-1).gather(-1, batch.response_BR[..., None])
            found = right_probabilities(model, tokenizer, [problem], brief=alone)
            torch.testing.assert_close(found, logps.sum().exp()[None])
            expected += float(logps.sum().exp()) / 3
    assert validation_accuracy(model, tokenizer) == pytest.approx(expected)
    assert expected > 0


def test_every_other_prompt_has_an_answer_that_nobody_gives():
    rows = [json.loads(line) for line in resolve("tiny:half-solvable-prompts").read_text().splitlines()]
    plain = [json.loads(line) for line in resolve("tiny:prompts").read_text().splitlines()]
    assert [(row["id"], row["problem"]) for row in rows] == [(row["id"], row["problem"]) for row in plain]
    assert {row["answer"] for row in rows[::2]} == {UNREACHABLE}
    assert all(row["answer"] == str(sum(map(int, row["problem"].split("+")))) for row in rows[1::2])
    assert grade("#### 932", UNREACHABLE).verdict == "wrong"
