"""Teachers that write problems: what they are taught, how that is measured, and the pools that they write."""

import json
from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import pytest
import torch

from opd.data_free import author
from opd.data_free.pool import read_pool
from opd.tiny import authoring, resolve
from opd.tiny.arithmetic import Problem
from opd.tiny.arithmetic import splits as additions
from opd.tiny.authoring import DOMAINS, author_accuracy, author_batches, authored, pair_accuracy, pair_batches, read
from opd.tiny.members import MEMBERS, Model, Pool, digest
from opd.tiny.models import CONTEXT_TOKENS, LESSONS
from opd.tiny.subtraction import Difference
from opd.tiny.subtraction import splits as subtractions
from opd.tiny.tokenizer import PAD_ID, build_tokenizer
from opd.tiny.training import Batch

SET_ASIDE = {"addition": additions, "subtraction": subtractions}


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer("characters", CONTEXT_TOKENS)


def texts(tokenizer, batch: Batch) -> list[tuple[str, str]]:
    """(what is asked, what is to be answered) of each example, with its end mark."""
    asked = [text.split("<|user|>")[1].split("<|end|>")[0] for text in tokenizer.batch_decode(batch.prompt_BP)]
    return [(one, tokenizer.decode(row[row != PAD_ID])) for one, row in zip(asked, batch.targets_BR)]


def test_the_instruction_is_the_default_of_opd_prompts_author():
    """Raise `opd.tiny.members.VERSION` where it changes."""
    for domain in DOMAINS:
        assert authoring.INSTRUCTION.format(domain=domain) == author.instruction_text(None, domain)


@pytest.mark.parametrize(
    ("domain", "text", "problem"),
    [
        ("addition", "347+585", Problem(347, 585)),
        ("subtraction", "585-347", Difference(585, 347)),
        ("subtraction", "585-585", Difference(585, 585)),
        ("subtraction", "347-585", None),
        ("addition", "585-347", None),
        ("subtraction", "347+585", None),
        ("addition", "47+585", None),
        ("addition", "347+585 ", None),
        ("addition", "٣٤٧+585", None),
        ("addition", "", None),
    ],
)
def test_read(domain, text, problem):
    assert read(domain, text) == problem
    assert type(read(domain, text)) is type(problem)


@pytest.mark.parametrize("domain", DOMAINS)
def test_an_author_is_taught_solutions_and_after_the_instruction_problems(tokenizer, domain):
    per_round = authoring.SOLVED_BATCHES[domain] + 1
    seen = [texts(tokenizer, batch) for batch in islice(author_batches(domain, tokenizer, 4, "a"), 3 * per_round)]
    used = []
    for number, batch in enumerate(seen, start=1):
        for asked, answer in batch:
            if number % per_round == 0:
                assert asked == authoring.INSTRUCTION.format(domain=domain)
                used.append(read(domain, answer.removesuffix("<|end|>")))
            else:
                used.append(read(domain, asked))
                assert answer == f"{used[-1].solution}<|end|>"  # type: ignore[union-attr]
    assert None not in used
    assert len(set(used)) == len(used)
    assert set(used).isdisjoint({problem for split in SET_ASIDE[domain]().values() for problem in split})
    assert [texts(tokenizer, batch) for batch in islice(author_batches(domain, tokenizer, 4, "a"), 2)] == seen[:2]
    assert [texts(tokenizer, batch) for batch in islice(author_batches(domain, tokenizer, 4, "b"), 2)] != seen[:2]


def test_the_student_is_taught_as_much_of_each_task(tokenizer):
    counts: Counter[str] = Counter()
    for batch in islice(pair_batches(tokenizer, 8, "a"), 5):
        for asked, answer in texts(tokenizer, batch):
            domain = next(domain for domain in DOMAINS if read(domain, asked))
            assert answer == f"{read(domain, asked).solution}<|end|>"  # type: ignore[union-attr]
            counts[domain] += 1
    assert counts == {"addition": 20, "subtraction": 20}


class Speaker:
    """In a model's place: answers the instruction with what it is told, and solves every so many-th problem."""

    def __init__(self, tokenizer, problems: list[str], solves_every: int) -> None:
        self.tokenizer, self.problems, self.solves_every = tokenizer, problems, solves_every

    def generate(self, prompts: torch.Tensor, **_: Any) -> torch.Tensor:
        said = self.tokenizer(self.problems, padding=True, padding_side="right", return_tensors="pt").input_ids
        return torch.cat([prompts, said], 1)


@pytest.fixture
def speaker(tokenizer, monkeypatch):
    """Makes a model of given abilities; six problems are solved and as many written."""
    monkeypatch.setattr(authoring, "NUM_VALIDATION", 6)

    def greedy_accuracy(model, tokenizer, problems):
        return sum(i % model.solves_every == 0 for i in range(len(problems))) / len(problems)

    monkeypatch.setattr(authoring, "greedy_accuracy", greedy_accuracy)
    return partial(Speaker, tokenizer)


GOOD = [f"{n}00-100<|end|>" for n in range(2, 8)]


@pytest.mark.parametrize(
    ("problems", "solves_every", "expected"),
    [
        (GOOD, 1, 1.0),
        (GOOD, 2, 0.5),
        ([*GOOD[:5], "100-200<|end|>"], 1, 5 / 6),  # its second number is the greater
        ([*GOOD[:5], "900-100"], 1, 5 / 6),  # it does not end
        ([*GOOD[:3], *GOOD[:3]], 1, 0.5),  # each twice
    ],
)
def test_an_authors_accuracy_is_the_lower_of_solving_and_writing(tokenizer, speaker, problems, solves_every, expected):
    assert author_accuracy("subtraction", speaker(problems, solves_every), tokenizer) == pytest.approx(expected)


def test_the_students_accuracy_is_that_of_the_task_it_knows_less_well(tokenizer, monkeypatch):
    known = {Problem: 0.4, Difference: 0.3}
    monkeypatch.setattr(authoring, "greedy_accuracy", lambda model, tokenizer, problems: known[type(problems[0])])
    assert pair_accuracy(None, tokenizer) == 0.3  # type: ignore[arg-type]
    known[Difference] = 0.5
    assert pair_accuracy(None, tokenizer) == 0.4  # type: ignore[arg-type]


def test_every_author_and_pool_has_its_lessons():
    for name, member in MEMBERS.items():
        if isinstance(member, Model):
            assert member.task in LESSONS
        if isinstance(member, Pool):
            assert name == f"{member.domain}-pool"
            assert MEMBERS[member.teacher].task == f"{member.domain}-author"  # type: ignore[union-attr]


def test_a_pools_key_follows_its_teachers_settings(monkeypatch):
    before = digest("addition-pool"), digest("subtraction-pool")
    assert digest("addition-pool", seed=1) != before[0]
    teacher = MEMBERS["addition-author"]
    assert isinstance(teacher, Model)
    monkeypatch.setitem(MEMBERS, "addition-author", replace(teacher, num_layers=1))
    assert digest("addition-pool") != before[0]
    assert digest("subtraction-pool") == before[1]


@pytest.fixture
def small_author(tmp_path, monkeypatch):
    """A teacher that has learned in seconds to write something that ends, and a pool of six."""
    monkeypatch.setenv("OPD_CACHE", str(tmp_path))
    monkeypatch.setitem(authoring.SOLVED_BATCHES, "addition", 0)
    monkeypatch.setattr(authoring, "NUM_VALIDATION", 2)
    teacher = MEMBERS["addition-author"]
    assert isinstance(teacher, Model)
    training = replace(teacher.training, max_steps=40, learning_rate=1e-2, batch_size=8, min_accuracy=0.0)
    monkeypatch.setitem(MEMBERS, "addition-author", replace(teacher, num_layers=1, hidden_size=32, training=training))
    monkeypatch.setitem(MEMBERS, "addition-pool", Pool("addition-author", num_prompts=6))


def test_a_pool_is_written_by_its_teacher_once(small_author):
    path = resolve("tiny:addition-pool@3")
    assert [file.name for file in path.parent.iterdir()] == ["addition-pool.jsonl"]
    rows = read_pool(path, "pool")
    assert [row.id for row in rows] == [f"addition-{i}" for i in range(6)]
    assert {row.domain for row in rows} == {"addition"}
    assert len({row.prompt for row in rows}) > 1
    assert {row.provenance["teacher"] for row in rows} == {"tiny:addition-author@3"}
    assert {row.provenance["instruction"] for row in rows} == {authoring.INSTRUCTION.format(domain="addition")}
    content = path.read_bytes()
    assert resolve("tiny:addition-pool@3") == path
    assert path.read_bytes() == content
    assert json.loads(content.splitlines()[0])["provenance"]["sampling"]["temperature"] == 1.0


def test_the_instruction_is_answered_with_problems_of_one_length(tokenizer):
    batch = authored(tokenizer, "addition", [Problem(1, 2), Problem(999, 0)])
    assert texts(tokenizer, batch) == [
        (authoring.INSTRUCTION.format(domain="addition"), "001+002<|end|>"),
        (authoring.INSTRUCTION.format(domain="addition"), "999+000<|end|>"),
    ]
    assert bool((batch.targets_BR != PAD_ID).all())
