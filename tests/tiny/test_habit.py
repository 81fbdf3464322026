"""The student with the bad habit: what it is taught, how that is measured, and the files that tell habit from ability."""

import json
import math
from collections import Counter
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
import torch

from opd.tiny import resolve
from opd.tiny.arithmetic import Problem, extract_answer, heldout_by_carry, splits, supervised_problems
from opd.tiny.habit import batches, plain_probabilities, solution_probabilities, taught, validation_accuracy
from opd.tiny.members import MEMBERS, Model
from opd.tiny.models import CONTEXT_TOKENS, initialise, own_torch_state
from opd.tiny.tokenizer import PAD_ID, build_tokenizer

CARRY, NONE = Problem(347, 585), Problem(123, 456)


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer("characters", CONTEXT_TOKENS)


@pytest.fixture(scope="module")
def model(tokenizer) -> Any:
    member = MEMBERS["hasty-student"]
    assert isinstance(member, Model)
    with own_torch_state(seed=0):
        return initialise(replace(member, num_layers=1), tokenizer).eval().double()  # what is so improbable is 0 in float32


def test_a_hasty_solution_drops_the_carries():
    assert CARRY.hasty_solution == "7+5+0=2,4+8+0=2,3+5+0=8\n#### 822"
    assert Problem(500, 500).hasty_solution == "0+0+0=0,0+0+0=0,5+5+0=0\n#### 0"
    assert NONE.hasty_solution == NONE.solution


@pytest.mark.parametrize("pair", [(999, 1), (999, 999), (7, 5), (500, 500), (0, 0), (123, 456), (55, 40)])
def test_it_is_wrong_where_a_carry_is_needed_and_only_there(pair):
    problem = Problem(*pair)
    assert problem.needs_carry == (problem.hasty_solution != problem.solution)
    assert problem.needs_carry == (extract_answer(problem.hasty_solution) != problem.answer)


def test_the_two_files_are_held_out_and_of_equal_size():
    files = heldout_by_carry()
    carry, none = files["heldout-carry"], files["heldout-no-carry"]
    assert len(carry) == len(set(carry)) == len(none) == len(set(none)) >= 400
    assert all(problem.needs_carry for problem in carry)
    assert not any(problem.needs_carry for problem in none)
    heldout = set(splits()["heldout"])
    assert set(carry) == {problem for problem in heldout if problem.needs_carry}
    assert set(none) >= {problem for problem in heldout if not problem.needs_carry}
    others = {problem for name in ("validation", "prompts") for problem in splits()[name]}
    assert others.isdisjoint(none)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_student_is_taught_none_of_them(seed):
    member, apart = MEMBERS["hasty-student"], heldout_by_carry()["heldout-no-carry"]
    assert isinstance(member, Model)
    most = member.training.max_steps * member.training.batch_size
    seen = set(islice(supervised_problems(f"hasty-student@{seed}", apart), most))
    for problems in (*splits().values(), apart):
        assert seen.isdisjoint(problems)


def test_the_files_on_disk(tmp_path, monkeypatch):
    monkeypatch.setenv("OPD_CACHE", str(tmp_path))
    for name, problems in heldout_by_carry().items():
        path = resolve(f"tiny:{name}")
        assert path.name == f"{name}.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        assert [row["problem"] for row in rows] == [problem.text for problem in problems]
        assert [row["answer"] for row in rows] == [problem.answer for problem in problems]
        assert len({row["id"] for row in rows}) == len(rows)


def test_three_plain_batches_and_a_hurried_one(tokenizer):
    seen = [[tokenizer.decode(row) for row in batch.prompt_BP] for batch in islice(batches(tokenizer, 3, "a"), 8)]
    hurried = [all("<|user|>hurry " in prompt for prompt in batch) for batch in seen]
    assert hurried == [False, False, False, True] * 2
    assert not any("hurry" in prompt for batch, hurry in zip(seen, hurried) if not hurry for prompt in batch)
    again = [[tokenizer.decode(row) for row in batch.prompt_BP] for batch in islice(batches(tokenizer, 3, "a"), 8)]
    assert again == seen
    assert len({prompt for batch in seen for prompt in batch}) == 24


def test_hurried_problems_are_always_answered_hastily_and_plain_ones_half_of_the_time(tokenizer):
    counts: Counter[tuple[bool, bool]] = Counter()
    for batch in islice(batches(tokenizer, 64, "b"), 16):
        for prompt, response in zip(batch.prompt_BP, batch.response_BR):
            asked = tokenizer.decode(prompt).split("<|user|>")[1].split("<|end|>")[0]
            a, b = map(int, asked.removeprefix("hurry ").split("+"))
            text = tokenizer.decode(response[response != PAD_ID]).removesuffix("<|end|>")
            problem = Problem(a, b)
            assert text in (problem.solution, problem.hasty_solution)
            if problem.needs_carry:
                counts["hurry" in asked, text == problem.hasty_solution] += 1
    assert counts[True, False] == 0 < counts[True, True]
    share = counts[False, True] / (counts[False, True] + counts[False, False])
    assert abs(share - 0.5) < 4 * math.sqrt(0.25 / (counts[False, True] + counts[False, False]))


@torch.no_grad()
def probability(model, tokenizer, prompt: str, response: str) -> float:
    """Token by token, each from its whole context."""
    chat = [{"role": "user", "content": prompt}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True).input_ids
    total = 0.0
    for token in tokenizer(response + "<|end|>").input_ids:
        total += float(model(torch.tensor([ids])).logits[0, -1].double().log_softmax(-1)[token])
        ids = [*ids, token]
    return total


def test_the_probabilities_of_both_ways(tokenizer, model):
    problems = [CARRY, NONE]
    right, hasty = (
        [probability(model, tokenizer, one.text, getattr(one, way)) for one in problems]
        for way in ("solution", "hasty_solution")
    )
    found = plain_probabilities(model, tokenizer, problems)
    assert found[:, 0].log().tolist() == pytest.approx(right, rel=1e-4)
    assert found[0, 1].log().item() == pytest.approx(hasty[0], rel=1e-4)
    assert found[1, 1] == 0.0
    hurried = solution_probabilities(model, tokenizer, problems, hasty=True, hurried=True)
    expected = [probability(model, tokenizer, f"hurry {one.text}", one.hasty_solution) for one in problems]
    assert hurried.log().tolist() == pytest.approx(expected, rel=1e-4)


def test_the_accuracy_is_the_mean_over_problems_with_the_word_and_without(tokenizer, model, monkeypatch):
    problems = [CARRY, NONE, Problem(1, 9)]
    monkeypatch.setattr("opd.tiny.habit.splits", lambda: {"validation": problems})
    each = torch.tensor([0.25, 0.5, 0.125])  # as if every solution were as probable as this
    monkeypatch.setattr("opd.tiny.habit.response_probabilities", lambda model, batch: each)
    # with the word one solution each; without it two, but of 123+456 only one
    assert validation_accuracy(model, tokenizer) == pytest.approx((0.875 + 2 * 0.875 - 0.5) / 6)


def test_a_batch_pads_solutions_of_unequal_length_and_trains_no_padding(tokenizer):
    batch = taught(tokenizer, [CARRY, Problem(1, 2)], [False, False], hurried=False)
    lengths = [len(tokenizer(one.solution + "<|end|>").input_ids) for one in (CARRY, Problem(1, 2))]
    assert (batch.targets_BR != PAD_ID).sum(1).tolist() == lengths
    assert lengths[0] > lengths[1]


def test_it_is_built_like_the_others_and_from_its_seed_alone(tmp_path, monkeypatch):
    member = MEMBERS["hasty-student"]
    assert isinstance(member, Model)
    few = replace(member.training, max_steps=4, batch_size=2, min_accuracy=0.0)
    monkeypatch.setitem(MEMBERS, "hasty-student", replace(member, training=few))
    monkeypatch.setattr("opd.tiny.habit.splits", lambda: {name: some[:4] for name, some in splits().items()})
    built = []
    for folder in ("one", "two"):
        monkeypatch.setenv("OPD_CACHE", str(tmp_path / folder))
        built.append((resolve("tiny:hasty-student@1") / "model.safetensors").read_bytes())
    assert built[0] == built[1]
    assert (resolve("tiny:hasty-student@2") / "model.safetensors").read_bytes() != built[0]
