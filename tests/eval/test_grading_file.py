import json
from pathlib import Path

import pytest

from opd.errors import UserError
from opd.eval import grading_file
from opd.eval.grading import Grade, Grader
from opd.eval.grading_file import Columns, grade_file, read_items, read_rows, summary


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def test_answers_may_be_text_numbers_or_lists(tmp_path: Path):
    file = write(
        tmp_path / "rows.jsonl",
        {"id": 7, "response": "a", "answer": "5"},
        "",
        {"response": "b", "answer": 5.5},
        {"response": "c", "answer": ["x", 5], "finish": "length"},
        {"response": "d", "answer": "5", "truncated": True},
    )
    names, items = zip(*read_items(read_rows(file), Columns()))
    assert names == (7, None, None, None)
    assert [item.answer for item in items] == ["5", "5.5", ["x", "5"], "5"]
    assert [item.truncated for item in items] == [False, False, True, True]


def test_columns_have_other_names(tmp_path: Path):
    file = write(tmp_path / "rows.jsonl", {"output": "a", "gold": "5"})
    assert next(read_items(read_rows(file), Columns("output", "gold")))[1].answer == "5"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{", "line 2 of .* is not valid JSON"),
        ("[1]", "line 2 of .* is not a JSON object"),
        ("[" * 100_000, "line 2 of .* is not valid JSON"),
        ({"respons": "a", "answer": "5"}, "line 2 of .* has no 'response'; did you mean 'respons'"),
        ({"response": 5, "answer": "5"}, "line 2 of .*: 'response' must be text, not int"),
        ({"response": "a"}, "line 2 of .* has no 'answer'; name the column"),
        ({"response": "a", "answer": []}, "line 2 of .* has no 'answer'"),
        ({"response": "a", "answer": None}, "line 2 of .* has no 'answer'"),
        ({"response": "a", "answer": True}, "'answer' must be text, a number, or a list"),
        ({"response": "a", "answer": ["5", {}]}, "'answer' must be text, a number, or a list"),
    ],
)
def test_a_bad_row_names_its_line(tmp_path: Path, row: object, message: str):
    file = write(tmp_path / "rows.jsonl", {"response": "a", "answer": "5"}, row)
    with pytest.raises(UserError, match=message):
        list(read_items(read_rows(file), Columns()))


def test_a_missing_file_is_a_user_error(tmp_path: Path):
    with pytest.raises(UserError, match="cannot be read"):
        read_rows(tmp_path / "none.jsonl")


def test_rows_keep_their_order_over_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(grading_file, "CHUNK_ROWS", 3)
    rows = [{"id": i, "response": f"\\boxed{{{i % 4}}}", "answer": "1"} for i in range(10)]
    with Grader(num_workers=1) as grader:
        lines = [line for line, _ in grade_file(read_rows(write(tmp_path / "rows.jsonl", *rows)), Columns(), grader)]
    assert [line["id"] for line in lines] == list(range(10))
    assert [line["verdict"] for line in lines] == ["correct" if i % 4 == 1 else "wrong" for i in range(10)]
    assert lines[2] == {"id": 2, "verdict": "wrong", "extracted": "2"}


def test_summary_keeps_the_kinds_of_failure_apart():
    grades = [Grade("correct", "5"), Grade("wrong", "6"), Grade("no_answer", None), Grade("truncated", None)]
    counts = summary([*grades, Grade("timeout", "9^9")])
    assert counts["rows"] == 5
    for verdict in ("correct", "wrong", "no_answer", "truncated", "timeout"):
        assert (counts[verdict], counts[f"{verdict}_rate"]) == (1, 0.2)
    assert "mean_score" not in counts
    assert summary([Grade("correct", "5", 0.75), Grade("wrong", "5", 0.25)])["mean_score"] == 0.5
