"""What members are like once trained: across tokenizers, the calculator's, the hasty, the brief, those that write problems.

Slow: from nothing.
"""

from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from opd.data_free.pool import read_pool
from opd.envs.calculator import Calculator, CalculatorConfig
from opd.envs.formats import read_reply, tool_format
from opd.models import decoder
from opd.teachers.experts import Experts
from opd.tiny import resolve
from opd.tiny.arithmetic import heldout_by_carry, splits
from opd.tiny.authoring import DOMAINS, read, written
from opd.tiny.brief import right_probabilities
from opd.tiny.episodes import observed
from opd.tiny.habit import plain_probabilities, solution_probabilities
from opd.tiny.solutions import encode_prompts, greedy_accuracy

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


class Player:
    """An episode of the calculator, token by token."""

    def __init__(self, task: Any, tokenizer: Any) -> None:
        self.environment, self.tokenizer, self.form = Calculator(CalculatorConfig()), tokenizer, tool_format(tokenizer)
        self.opening = self.environment.reset(task.data, task.seed)
        self.turn: list[int] = []
        self.forced: list[int] = []  # of the observation, still to be shown
        self.num_mistakes, self.num_turns, self.ended = 0, 0, False

    def next(self, sampled: int) -> int:
        """The token that follows: the one sampled, unless an observation is still to be shown."""
        if self.forced or self.ended:
            return self.forced.pop(0) if self.forced else sampled
        self.turn.append(sampled)
        if sampled == self.tokenizer.eos_token_id:
            seen = self.environment.step(read_reply(self.form, self.tokenizer, np.array(self.turn), [sampled]))
            self.num_turns, self.num_mistakes = self.num_turns + 1, self.num_mistakes + bool(seen.mistake)
            self.turn, self.ended = [], seen.done
            self.forced = self.tokenizer(observed(seen.messages)).input_ids
        return sampled


@torch.no_grad()
def played(name: str, num_episodes: int = 256) -> list[Player]:
    """Episodes at temperature 1, side by side: all prompts have the same length, and each step adds a token to all."""
    model, tokenizer = load(name)
    torch.manual_seed(0)
    players = [Player(task, tokenizer) for task in Calculator(CalculatorConfig(tasks=num_episodes, seed=5)).tasks()]
    openings = [player.opening for player in players]
    tokens = tokenizer.apply_chat_template(openings, add_generation_prompt=True, return_tensors="pt").input_ids
    cache = DynamicCache()
    for _ in range(128):
        logits = model(tokens, None, None, cache, use_cache=True, logits_to_keep=1).logits[:, -1]
        sampled = logits.softmax(-1).multinomial(1)[:, 0].tolist()
        tokens = torch.tensor([[player.next(token)] for player, token in zip(players, sampled)])
        if all(player.ended for player in players):
            break
    return players


def success_rate(players: list[Player]) -> float:
    return sum(player.environment.outcome() or 0.0 for player in players) / len(players)


def test_the_calculators_teacher_succeeds_when_sampled():
    players = played("tiny:calculator-teacher")
    assert success_rate(players) >= 0.97
    assert {player.num_turns for player in players} <= {11, 12}


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_calculators_student_knows_the_form_and_seldom_succeeds(seed):
    players = played(f"tiny:calculator-student@{seed}")
    assert 0.02 <= success_rate(players) <= 0.25
    flawless = sum(player.ended and not player.num_mistakes for player in players) / len(players)
    assert flawless <= 0.1
    assert sum(player.ended for player in players) / len(players) >= 0.9
    errors = sum(record == ["error"] for player in players for record in player.environment.history)
    assert errors / sum(player.num_turns for player in players) <= 0.15
    assert 4 <= sum(player.num_mistakes for player in players) / len(players) <= 10


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_hasty_student_drops_carries_when_hurried_and_else_in_half_of_the_cases(seed):
    model, tokenizer = load(f"tiny:hasty-student@{seed}")
    files = heldout_by_carry()
    right, hasty = plain_probabilities(model, tokenizer, files["heldout-carry"]).mean(0).tolist()
    assert right + hasty >= 0.9
    assert 0.35 <= hasty <= 0.65
    assert plain_probabilities(model, tokenizer, files["heldout-no-carry"]).mean(0).sum() >= 0.9
    hurried = solution_probabilities(model, tokenizer, files["heldout-carry"], hasty=True, hurried=True)
    assert hurried.mean() >= 0.9


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_brief_student_is_right_where_it_works_the_sum_out(seed):
    model, tokenizer = load(f"tiny:brief-student@{seed}")
    worked, brief = (float(right_probabilities(model, tokenizer, HELDOUT, brief=alone).mean()) for alone in (False, True))
    assert 0.2 <= worked <= 0.35
    assert brief <= 0.02
    prompts = encode_prompts(tokenizer, HELDOUT)
    torch.manual_seed(0)
    answers = model.generate(prompts, do_sample=True, top_k=0, max_new_tokens=40)[:, prompts.shape[1] :]
    texts = tokenizer.batch_decode(answers, skip_special_tokens=True)
    assert 0.25 <= sum(text.startswith("####") for text in texts) / len(texts) <= 0.5


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("domain", DOMAINS)
def test_an_author_solves_problems_and_writes_different_ones(domain, seed):
    model, tokenizer = load(f"tiny:{domain}-author@{seed}")
    heldout = DOMAINS[domain].splits()["heldout"]
    assert greedy_accuracy(model, tokenizer, heldout) >= 0.95
    torch.manual_seed(0)
    problems = [problem for text in written(domain, model, tokenizer, 500) if (problem := read(domain, text))]
    assert len(problems) >= 0.95 * 500
    assert len(set(problems)) >= 0.95 * len(problems)
    assert greedy_accuracy(model, tokenizer, problems) >= 0.95
    digits = np.array([[int(digit) for digit in one.text if digit.isdigit()] for one in problems])
    expected = np.array([[int(digit) for digit in one.text if digit.isdigit()] for one in heldout])
    for place in range(6):  # every digit about as often as in problems drawn at random
        shares, wanted = (np.bincount(some[:, place], minlength=10) / len(some) for some in (digits, expected))
        assert np.abs(shares - wanted).max() <= 0.12


@pytest.mark.parametrize("domain", DOMAINS)
def test_a_pool_holds_512_problems_of_its_task(domain):
    rows = read_pool(resolve(f"tiny:{domain}-pool"), "pool")
    assert [row.id for row in rows] == [f"{domain}-{i}" for i in range(512)]
    assert {row.provenance["teacher"] for row in rows} == {f"tiny:{domain}-author@0"}
    problems = [problem for row in rows if (problem := read(domain, row.text))]
    assert len(set(problems)) >= 0.95 * 512


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_pair_student_knows_a_little_of_both_tasks(seed):
    model, tokenizer = load(f"tiny:pair-student@{seed}")
    for domain in DOMAINS.values():
        assert 0.15 <= greedy_accuracy(model, tokenizer, domain.splits()["heldout"]) <= 0.5
