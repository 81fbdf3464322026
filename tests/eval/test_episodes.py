"""Evaluation on episodes: the environment's verifier has the last word, and no answer is looked for."""

import asyncio
import copy
import hashlib
import re
import sys
import types
from dataclasses import dataclass

import pytest

from opd.contexts import Contexts
from opd.envs.config import EnvironmentConfig, load_tasks
from opd.envs.environment import Observation, Task
from opd.eval.evaluate import accuracy, matrix, sample_pairs
from opd.eval.grading import Grader
from opd.eval.samples import Sampled, SampleFile
from opd.records import Prompt, Sampling
from opd.registry import ENVIRONMENTS
from opd.students.hf_sampler import HFSampler

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
ENDS = (2, *range(5, 18))  # half of the letters end a turn
ENDINGS = "abcdefghijklm"
WARM = Sampling(temperature=1.0)


@dataclass(frozen=True)
class OracleConfig:
    turns: int = 3
    silent: bool = False
    """It says nothing of an episode that it has brought to its end."""


def omen(said):
    """0, 0.5 or 1: what becomes of an episode in which this was said."""
    return int(hashlib.sha256("|".join(said).encode()).hexdigest(), 16) % 3 / 2


class Oracle:
    """Answers with a letter until it has heard enough; its verdict is the digest of what it heard."""

    Config = OracleConfig
    single_turn, restores = False, True
    tools = ()
    max_turns = 9

    def __init__(self, config):
        self.config = config

    def tasks(self):
        return [Task(f"oracle-{number}", {"word": "uvwxyz"[number]}, number) for number in range(6)]

    def reset(self, data, seed):
        self.said = []
        return [{"role": "user", "content": data["word"]}]

    def step(self, reply):
        self.said.append(re.sub("<[a-z]+>", "", reply.content))
        done = len(self.said) >= self.config.turns
        return Observation(() if done else ({"role": "user", "content": "z"},), done=done)

    def outcome(self):
        if self.config.silent and len(self.said) >= self.config.turns:
            return None
        return omen(self.said)

    def state_hash(self):
        return "|".join(self.said)


class Riddle(Oracle):
    """One reply is all."""

    single_turn = True
    max_turns = 1


class Unasked(Grader):
    """Grades nothing but answers of plain problems."""

    def grade_many(self, items):
        assert all(item.answer is not None for item in items), "an episode has no answer to grade"
        return super().grade_many(items)


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    module = types.ModuleType("a_third_partys_oracle")
    for kind in (Oracle, Riddle):
        setattr(module, kind.__name__, kind)
        monkeypatch.setitem(ENVIRONMENTS.builtin, kind.__name__.lower(), f"{module.__name__}:{kind.__name__}")
    monkeypatch.setitem(sys.modules, module.__name__, module)


@pytest.fixture
def grader():
    one = Unasked(num_workers=1)
    yield one
    one.close()


@pytest.fixture(scope="module")
def contexts(micro_tokenizer):
    tokenizer = copy.deepcopy(micro_tokenizer)
    tokenizer.chat_template = TEMPLATE
    return Contexts(tokenizer, max_context=200, max_new_tokens=5, eos_ids=ENDS)


@pytest.fixture(scope="module")
def sampler(micro_model, vocab):
    return HFSampler(micro_model(0), vocab, ENDS, chunk_tokens=4)


@pytest.fixture
def measure(sampler, contexts, grader):
    """`measure(problems)`: two samples of each."""

    def run(problems, **options):
        options = {"samples": 2, "seed": 7, **options}
        return asyncio.run(accuracy(sampler, problems, contexts, grader, WARM, **options))

    return run


def tasks_of(name="oracle", **options):
    return load_tasks(EnvironmentConfig(name, options), "eval.environment")


def heard(response):
    """The replies as the environment heard them: without what ended them."""
    return [line.rstrip(ENDINGS) for line in response.split("\n")]


def test_verdicts_are_the_environments(measure):
    found = measure(tasks_of())
    rows = found["rows"]
    assert [row["id"] for row in rows] == [f"oracle-{number}" for number in range(6)]
    judged = [pair for row in rows for pair in zip(row["scores"], row["verdicts"], row["finish"], strict=True)]
    assert len(judged) == found["num_samples"] == 12
    for score, verdict, finish in judged:
        assert verdict == ("correct" if score >= 0.5 else "truncated" if finish == "length" else "wrong")
    assert {score for score, _, _ in judged} == {0.0, 0.5, 1.0}
    assert {finish for _, _, finish in judged} == {"env", "length"}
    assert found["accuracy"] == sum(score >= 0.5 for score, _, _ in judged) / 12
    assert all(row["extracted"] == [None, None] for row in rows)


def test_the_outcome_is_that_of_what_was_said(measure):
    """Heard again, turn by turn, it is the same."""
    for row in measure(tasks_of())["rows"]:
        for response, score, finish in zip(row["responses"], row["scores"], row["finish"], strict=True):
            if finish == "env":  # a turn that was cut off was not heard
                said = heard(response)
                assert len(said) == 3
                assert score == omen(said)


def test_an_environment_that_says_nothing_has_no_answer(measure):
    """And none is looked for in the text: there is no correct one to compare it with."""
    found = measure(tasks_of(silent=True))
    for row in found["rows"]:
        for verdict, score, finish in zip(row["verdicts"], row["scores"], row["finish"], strict=True):
            if finish == "env":
                assert (verdict, score) == ("no_answer", 0.0)
            else:
                assert verdict in ("correct", "truncated")
    assert found["num_no_answer"] == sum(row["finish"].count("env") for row in found["rows"]) > 0
    assert found["accuracy"] == sum(row["verdicts"].count("correct") for row in found["rows"]) / 12


def test_single_answers_are_judged_even_where_they_are_cut(measure):
    found = measure(tasks_of("riddle"), samples=3)
    seen = set()
    for row in found["rows"]:
        for response, score, verdict, finish in zip(row["responses"], row["scores"], row["verdicts"], row["finish"]):
            seen.add(finish)
            assert score == omen(heard(response))
            assert verdict == ("correct" if score >= 0.5 else "truncated" if finish == "length" else "wrong")
    assert seen == {"eos", "length"}


def test_problems_are_dealt_to_processes_by_place(measure):
    """Samples of one problem do not depend on which process has it."""
    whole = measure(tasks_of())
    parts = [measure(tasks_of(), rank=rank, num_processes=2)["rows"] for rank in range(2)]
    assert [len(part) for part in parts] == [3, 3]
    merged = sorted([*parts[0], *parts[1]], key=lambda row: row["index"])
    assert [row["responses"] for row in merged] == [row["responses"] for row in whole["rows"]]


def sampled(index, outcome, finish="env", response="a"):
    return Sampled(index, 0, response, 3, finish, False, outcome)


def test_plain_problems_beside_episodes_keep_their_own_grades(grader):
    plain = [Prompt(id=f"plain-{answer}", answer=answer, problem=answer) for answer in ("1", "2")]
    problems = [plain[0], *tasks_of()[:2], plain[1], tasks_of()[2]]
    said = [
        sampled(0, None, "eos", r"\boxed{1}"),
        sampled(1, 1.0, response=r"\boxed{2}"),
        sampled(2, None, response=r"\boxed{1}"),
        sampled(3, None, "eos", r"\boxed{1}"),
        sampled(4, 0.25, "length"),
    ]
    rows = matrix(problems, {(one.index, one.sample): one for one in said}, grader)
    assert [row["verdicts"][0] for row in rows] == ["correct", "correct", "no_answer", "wrong", "truncated"]
    assert [row["scores"][0] for row in rows] == [1.0, 1.0, 0.0, 0.0, 0.25]


def test_outcomes_come_back_from_disk(sampler, contexts, grader, tmp_path):
    """What was sampled before a kill is judged as it was then."""
    problems = tasks_of()
    pairs = [(index, 0) for index in range(len(problems))]
    file = SampleFile(tmp_path / "oracle.samples.jsonl", {"model": "m"})
    for block in file.blocks(pairs, 3):
        asyncio.run(sample_pairs(sampler, problems, contexts, WARM, 7, block, file.add))
    again = SampleFile(tmp_path / "oracle.samples.jsonl", {"model": "m"}, resume=True)
    assert again.blocks(pairs, 3) == []
    assert again.done == file.done
    assert any(one.outcome == 0.5 for one in again.done.values())
    assert matrix(problems, again.done, grader) == matrix(problems, file.done, grader)
