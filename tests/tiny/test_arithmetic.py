import json
from itertools import islice

import pytest

from opd.tiny.arithmetic import SPLIT_SIZES, Problem, extract_answer, splits, supervised_problems, write_rows
from opd.tiny.members import MEMBERS, Data, Model

ADDING = [name for name, member in MEMBERS.items() if isinstance(member, Model) and member.task is None]


def test_a_problem_and_its_worked_solution():
    problem = Problem(347, 585)
    assert (problem.text, problem.answer) == ("347+585", "932")
    assert problem.solution == "7+5+0=12,4+8+1=13,3+5+1=9\n#### 932"


def test_leading_zeros_and_a_four_digit_answer():
    assert Problem(7, 0).text == "007+000"
    assert Problem(7, 0).solution == "7+0+0=7,0+0+0=0,0+0+0=0\n#### 7"
    assert Problem(999, 999).solution.endswith("9+9+1=19\n#### 1998")


@pytest.mark.parametrize(
    ("response", "answer"), [("1\n#### 932", "932"), ("#### 1 #### 2", "2"), ("932", None), ("####", "")]
)
def test_extract_answer(response, answer):
    assert extract_answer(response) == answer


def test_the_splits_are_disjoint_and_without_repeats():
    drawn = [problem for split in splits().values() for problem in split]
    assert len(drawn) == len(set(drawn)) == sum(SPLIT_SIZES.values())


def test_the_held_out_problems_never_change():
    assert [problem.text for problem in splits()["heldout"][:3]] == ["336+608", "063+940", "905+957"]


@pytest.mark.parametrize("name", ADDING)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_supervised_examples_are_in_no_split(name, seed):
    member = MEMBERS[name]
    assert isinstance(member, Model)
    most = member.training.max_steps * member.training.batch_size
    examples = set(islice(supervised_problems(f"{name}@{seed}"), most))
    for split in splits().values():
        assert examples.isdisjoint(split)


def test_supervised_examples_depend_on_the_seed_alone():
    first, again, other = (list(islice(supervised_problems(seed), 50)) for seed in ("a", "a", "b"))
    assert first == again != other


def test_rows_have_answers_only_where_the_member_has(tmp_path):
    for data in (Data("prompts", with_answers=False), Data("heldout", with_answers=True)):
        path = tmp_path / data.file_name
        write_rows(path, data)
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        assert len({row["id"] for row in rows}) == len(rows) == SPLIT_SIZES[data.split]
        assert len({row["problem"] for row in rows}) == len(rows)
        assert all(("answer" in row) == data.with_answers for row in rows)
    a, b = map(int, rows[0]["problem"].split("+"))
    assert rows[0]["answer"] == str(a + b)
