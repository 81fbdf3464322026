"""The second task: its problems, worked solutions and splits, and the files of both tasks."""

import json
import random
from itertools import islice

import pytest

from opd.tiny import arithmetic, resolve
from opd.tiny.arithmetic import extract_answer
from opd.tiny.members import MEMBERS, Model
from opd.tiny.subtraction import SPLIT_SIZES, Difference, drawn, splits, supervised_problems


def test_a_problem_and_its_worked_solution():
    problem = Difference(585, 347)
    assert (problem.text, problem.answer) == ("585-347", "238")
    assert problem.solution == "15-7-0=8,8-4-1=3,5-3-0=2\n#### 238"


def test_leading_zeros_and_borrowing_from_a_zero():
    assert Difference(7, 0).text == "007-000"
    assert Difference(7, 0).solution == "7-0-0=7,0-0-0=0,0-0-0=0\n#### 7"
    assert Difference(100, 1).solution == "10-1-0=9,10-0-1=9,1-0-1=0\n#### 99"
    assert Difference(500, 500).solution.endswith("\n#### 0")


def test_the_steps_of_a_solution_are_right_and_spell_its_answer():
    for problem in islice(drawn(random.Random(3)), 500):
        working, answer = problem.solution.split("\n")
        steps = [[int(part) for part in step.replace("=", "-").split("-")] for step in working.split(",")]
        assert all(x - y - borrowed == digit and 0 <= digit <= 9 for x, y, borrowed, digit in steps)
        assert int("".join(str(step[3]) for step in reversed(steps))) == problem.a - problem.b == int(answer.split()[1])
        assert extract_answer(problem.solution) == problem.answer


def test_the_splits_are_disjoint_without_repeats_and_never_negative():
    found = [problem for split in splits().values() for problem in split]
    assert len(found) == len(set(found)) == sum(SPLIT_SIZES.values())
    assert all(999 >= problem.a >= problem.b >= 0 for problem in found)


@pytest.mark.parametrize("name", ["subtraction-author@0", "subtraction-author@0 written", "pair-student@1 subtraction"])
def test_supervised_examples_are_in_no_split(name):
    member = MEMBERS[name.partition("@")[0]]
    assert isinstance(member, Model)
    most = member.training.max_steps * member.training.batch_size
    examples = set(islice(supervised_problems(name), most))
    for split in splits().values():
        assert examples.isdisjoint(split)


def rows_of(name: str) -> list[dict]:
    return [json.loads(line) for line in resolve(name).read_text(encoding="utf-8").splitlines()]


def test_the_files_on_disk(tmp_path, monkeypatch):
    monkeypatch.setenv("OPD_CACHE", str(tmp_path))
    for split in ("prompts", "heldout"):
        rows = rows_of(f"tiny:subtraction-{split}")
        assert [row["problem"] for row in rows] == [problem.text for problem in splits()[split]]
        assert len({row["id"] for row in rows}) == len(rows)
        assert ("answer" in rows[0]) == (split == "heldout")
    assert [row["answer"] for row in rows] == [problem.answer for problem in splits()["heldout"]]
    assert not any("domain" in row for row in rows)


def test_the_held_out_problems_of_both_tasks_by_turns(tmp_path, monkeypatch):
    monkeypatch.setenv("OPD_CACHE", str(tmp_path))
    rows = rows_of("tiny:pair-heldout")
    assert len(rows) == len({row["id"] for row in rows}) == 1000
    for first, task, problems in ((0, "addition", arithmetic.splits()), (1, "subtraction", splits())):
        own = rows[first::2]
        assert {row["domain"] for row in own} == {task}
        assert [(row["problem"], row["answer"]) for row in own] == [(one.text, one.answer) for one in problems["heldout"]]
