from functools import partial
from pathlib import Path

import pytest

from opd.errors import UserError
from opd.eval.grading import Grade, Grader, Item
from opd.eval.verifier import load_verifier, verifier_score

SOURCE = """
import time

def judge(response, answer, prompt):
    if response == "raise":
        raise KeyError("no such unit test")
    if response == "hang":
        time.sleep(60)
    if response == "odd":
        return "yes"
    return {"half": 0.5, "low": -1.0}.get(response, response == answer and prompt["level"] == 3)

not_a_function = 3
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "judge.py"
    path.write_text(SOURCE)
    return path


def test_a_verifier_decides(file: Path):
    with Grader(limit_s=1, num_workers=2, verifier=f"{file}:judge") as grader:
        prompt = {"level": 3}
        items = [
            Item("yes", "yes", prompt=prompt),
            Item("no", None, prompt=prompt),
            Item("half", "yes"),
            Item("low", "yes", truncated=True),
            Item("hang", "yes"),
        ]
        assert grader.grade_many(items) == [
            Grade("correct", None, 1.0),
            Grade("wrong", None, 0.0),
            Grade("correct", None, 0.5),
            Grade("truncated", None, -1.0),
            Grade("timeout", None, 0.0),
        ]
        assert grader.grade_many(items[3:4])[0].reward == -1.0
        with pytest.raises(UserError, match=r"item 1: KeyError: 'no such unit test' \(.*judge.py, line 6\)"):
            grader.grade_many([items[0], Item("raise", "yes")])
        with pytest.raises(UserError, match="it returned 'yes'; return a bool or a finite number"):
            grader.grade_many([Item("odd", "yes")])


def test_a_verifier_of_extracted_answers_has_no_answer_to_judge(file: Path):
    file.write_text(SOURCE + "\njudge.judges_extracted = True\n")
    with Grader(limit_s=1, num_workers=1, verifier=f"{file}:judge") as grader:
        items = [Item("low", "yes"), Item("low", "yes", truncated=True), Item(r"\boxed{5}", "yes", prompt={"level": 3})]
        assert grader.grade_many(items) == [
            Grade("no_answer", None, -1.0),
            Grade("truncated", None, -1.0),
            Grade("wrong", "5", 0.0),
        ]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("judge.py", "not of the form"),
        ("judge:judge", "not of the form"),
        ("missing.py:judge", "there is no file"),
        ("judge.py:missing", "defines no function 'missing'"),
        ("judge.py:not_a_function", "defines no function"),
        ("broken.py:judge", "does not load: SyntaxError"),
    ],
)
def test_a_bad_spec_is_refused(file: Path, monkeypatch: pytest.MonkeyPatch, spec: str, message: str):
    monkeypatch.chdir(file.parent)
    Path("broken.py").write_text("def judge(:")
    with pytest.raises(UserError, match=message):
        Grader(verifier=spec)


def test_a_loaded_verifier_is_the_function(file: Path):
    assert load_verifier(f"{file}:judge")("half", None, {}) == 0.5


@pytest.mark.parametrize("score", [None, "1", float("nan"), float("inf")])
def test_a_score_must_be_a_finite_number(score: object):
    with pytest.raises(TypeError, match="return a bool or a finite number"):
        verifier_score(lambda *_: score, ("", None, {}))  # type: ignore[arg-type, return-value]


def test_workers_find_a_relative_file_after_a_change_of_folder(
    file: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(file.parent)
    with Grader(limit_s=5, num_workers=1, verifier="judge.py:judge") as grader:
        monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
        assert grader.grade_many([Item("half", None)])[0].score == 0.5


def test_scores_are_plain_floats():
    assert verifier_score(partial(lambda *_: True), ("", None, {})) == 1.0
