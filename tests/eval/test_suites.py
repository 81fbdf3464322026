"""Suites: by name from a folder, any file, the hub's table, and reasoning-gym."""

import json

import pytest

from opd.data import DatasetConfig
from opd.errors import UserError
from opd.eval import gym, suites
from opd.eval.protocols import PROTOCOLS
from opd.eval.suites import BOXED, SUITES, check_suite, load_suite

STYLE = DatasetConfig("", template=BOXED)


@pytest.fixture
def folder(tmp_path):
    rows = [{"id": f"g{i}", "problem": f"{i}+1?", "answer": str(i + 1)} for i in range(4)]
    (tmp_path / "gsm8k.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    worked = [{"problem": "Two apples and 1,000 more?", "answer": "There are 2 + 1000.\n#### 1,002"}]
    (tmp_path / "other.jsonl").write_text("".join(json.dumps(row) + "\n" for row in worked))
    return tmp_path


def test_from_a_folder(folder):
    loaded = load_suite("gsm8k", STYLE, folder, limit=3)
    assert (loaded.name, loaded.reward, loaded.notes) == ("gsm8k", None, ())
    assert [problem.id for problem in loaded.problems] == ["g0", "g1", "g2"]
    first = loaded.problems[0]
    assert first.problem == "0+1?"  # the identity of a problem has no template in it
    assert first.messages[-1]["content"] == BOXED.replace("{prompt}", "0+1?")


def test_any_file(folder):
    (problem,) = load_suite(str(folder / "other.jsonl"), STYLE).problems
    assert (problem.id, problem.answer) == ("other-0", "There are 2 + 1000.\n#### 1,002")


def test_gsm8k_answers_are_the_number_after_the_hashes(folder):
    (folder / "other.jsonl").rename(folder / "gsm8k.jsonl")
    (problem,) = load_suite("gsm8k", STYLE, folder).problems
    assert problem.answer == "1,002"


def test_from_the_hub(monkeypatch):
    seen = []

    def rows(config, key):
        seen.append((config.path, config.subset, config.split))
        yield "row 1", {"question": "1+1?", "final_answer": ["2", "two"]}

    monkeypatch.setattr("opd.data._hub_rows", rows)
    loaded = load_suite("olympiadbench", STYLE)
    assert seen == [("Hothan/OlympiadBench", "OE_TO_maths_en_COMP", "train")]
    assert loaded.problems[0].answer == ("2", "two")
    assert "held 1 problems, where 674 were expected" in loaded.notes[0]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("aim24", "did you mean 'aime24'"),
        ("nowhere.jsonl", "no such file"),
        ("reasoning_gym:chain_sums", "did you mean 'chain_sum'"),
        ("reasoning_gym:chain_sum@x", "the seed after @ must be a whole number, at least 0"),
        ("reasoning_gym:chain_sum@-1", "the seed after @ must be a whole number, at least 0"),
        ("reasoning_gym:qqq", "reasoning-gym has no task 'qqq'$"),
    ],
)
def test_unknown_names(name, expected):
    with pytest.raises(UserError, match=expected):
        check_suite(name)


def test_unknown_in_a_folder(folder):
    with pytest.raises(UserError, match=r"no file gsm8.jsonl.*did you mean 'gsm8k'"):
        check_suite("gsm8", folder)


def test_protocols_name_known_suites():
    assert set().union(*(protocol.suites for protocol in PROTOCOLS.values())) <= set(SUITES)


def test_reasoning_gym_is_repeatable_and_judged_by_its_own_verifier():
    problems = load_suite("reasoning_gym:chain_sum@3", STYLE, limit=5).problems
    again = load_suite("reasoning_gym:chain_sum@3", STYLE, limit=5).problems
    other = load_suite("reasoning_gym:chain_sum@4", STYLE, limit=5).problems
    assert [p.problem for p in problems] == [p.problem for p in again] != [p.problem for p in other]
    for problem in problems:
        right = problem.meta["entry"]["answer"]
        assert gym.score(f"so \\boxed{{{right}}}", None, dict(problem.meta))
        assert gym.score(f"<answer>{right}</answer>", None, dict(problem.meta))
        assert not gym.score(f"so \\boxed{{{int(right) + 1}}}", None, dict(problem.meta))
        assert not gym.score(f"it is {right}", None, dict(problem.meta))  # no number is fished out of prose


def test_suites_are_listed_once():
    with pytest.raises(UserError) as raised:
        check_suite("zzz")
    assert str(raised.value).count("gsm8k") == 1


def test_episodes_with_other_options():
    loaded = load_suite("environment:returns_desk@3?kinds=[status,cancel],told=0.5,tasks=4", STYLE)
    assert loaded.name == "returns_desk@3-kinds=-status,cancel-,told=0.5,tasks=4"
    assert len(loaded.problems) == 4
    task = loaded.problems[0].task
    assert task is not None
    assert task.options == {"tasks": 4, "seed": 3, "kinds": ["status", "cancel"], "told": 0.5}
    assert len(load_suite("environment:reasoning_gym?task=chain_sum", STYLE, limit=2).problems) == 2


def test_reasoning_gym_missing(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "reasoning_gym.factory", None)
    with pytest.raises(UserError, match=r"pip install 'opd\[gym\]'"):
        suites.check_suite("reasoning_gym:chain_sum")


def test_episodes_of_an_environment():
    loaded = load_suite("environment:calculator@7", STYLE, limit=3)
    assert loaded.name == "calculator@7"
    assert [problem.id for problem in loaded.problems] == [f"calculator-7-{i}" for i in range(3)]
    assert all(problem.task is not None and problem.answer is None for problem in loaded.problems)
    assert len(load_suite("environment:calculator", STYLE).problems) == 100


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("environment:calculater", "^--suite: no environment is called 'calculater'.*calculator"),
        ("environment:calculator@", "the seed after @ must be a whole number, at least 0"),
        ("environment:calculator@1.5", "the seed after @ must be a whole number, at least 0"),
        ("environment:calculator?length=0", r"^--suite: length is 0 and must be at least 1"),
        ("environment:calculator?lenth=3", r"^--suite: unknown key 'lenth'; did you mean 'length'\?"),
        ("environment:reasoning_gym", r"^--suite: task is missing"),
    ],
)
def test_episodes_that_cannot_be_played_are_refused(name, message):
    with pytest.raises(UserError, match=message):
        check_suite(name)
