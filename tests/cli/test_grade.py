"""`opd grade` on small files."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from opd.cli import main

ROWS = [
    {"id": "a", "response": r"So \boxed{\frac{1}{2}}.", "answer": 0.5},
    {"response": "The answer is $2x$.", "answer": ["y", "x + x"]},
    {"id": 3, "response": "and then", "answer": "5", "finish": "length"},
    {"response": "No idea: 5", "answer": "5"},
    {"response": r"\boxed{x^{x^{9^{9^9}}}}", "answer": "9^{9^{9^{9}}} + x"},
    {"response": "\\boxed{\ud800}", "answer": "5"},
    {"response": "\\boxed{x + \ud800\0}", "answer": "\ud800 x\0"},
]
GRADED = [
    {"id": "a", "verdict": "correct", "extracted": r"\frac{1}{2}"},
    {"verdict": "correct", "extracted": "2x"},
    {"id": 3, "verdict": "truncated", "extracted": None},
    {"verdict": "no_answer", "extracted": None},
    {"verdict": "timeout", "extracted": r"x^{x^{9^{9^9}}}"},
    {"verdict": "wrong", "extracted": "\ud800"},
    {"verdict": "wrong", "extracted": "x + \ud800\0"},
]


@pytest.fixture
def opd_grade(monkeypatch, capsys, tmp_path):
    """`opd_grade(rows, *arguments)`: (exit code, lines of stdout, lines of stderr)."""

    def call(rows, *arguments):
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        monkeypatch.setattr(sys, "argv", ["opd", "grade", str(tmp_path / "rows.jsonl"), "--time-limit", "0.5", *arguments])
        with pytest.raises(SystemExit) as end:
            main()
        printed = capsys.readouterr()
        return end.value.code or 0, printed.out.splitlines(), printed.err.splitlines()

    return call


def test_lines_on_stdout_and_a_summary_on_stderr(opd_grade):
    code, out, err = opd_grade(ROWS)
    assert code == 0
    assert [json.loads(line) for line in out] == GRADED
    summary = json.loads(err[-1])
    assert summary["rows"] == 7
    assert {name: summary[name] for name in ("correct", "wrong", "no_answer", "truncated", "timeout")} == {
        "correct": 2, "wrong": 2, "no_answer": 1, "truncated": 1, "timeout": 1,
    }  # fmt: skip


def test_lines_in_a_file_and_the_summary_on_stdout(opd_grade, tmp_path):
    code, out, err = opd_grade(ROWS[:4], "--out", str(tmp_path / "graded.jsonl"))
    assert (code, err) == (0, [])
    assert [json.loads(line) for line in (tmp_path / "graded.jsonl").read_text().splitlines()] == GRADED[:4]
    assert json.loads(out[0])["correct_rate"] == 0.5


def test_a_verifier_of_ones_own(opd_grade, tmp_path):
    (tmp_path / "reward.py").write_text("def score(response, answer, row):\n    return row['level'] / 4\n")
    rows = [{"response": "a", "level": 3}, {"response": r"\boxed{5}", "level": 1}]
    code, out, err = opd_grade(rows, "--reward", f"{tmp_path}/reward.py:score")
    assert code == 0
    assert [json.loads(line)["score"] for line in out] == [0.75, 0.25]
    assert [json.loads(line)["verdict"] for line in out] == ["correct", "wrong"]
    assert json.loads(err[-1])["mean_score"] == 0.5
    (tmp_path / "reward.py").write_text("def score(response, answer, row):\n    return row['nothing']\n")
    code, out, err = opd_grade(rows, "--reward", f"{tmp_path}/reward.py:score")
    assert (code, out) == (2, [])
    assert "rows 1 to 2" in err[-1]


@pytest.mark.parametrize(
    ("rows", "arguments", "expected"),
    [
        ([*ROWS, {"response": 3}], [], "line 8 of"),
        ([{"response": "a"}], [], "no 'answer'"),
        (ROWS, ["--response", "output"], "has no 'output'"),
        (ROWS, ["--reward", "nowhere.py:f"], "nowhere.py"),
        (ROWS[:1], ["--out", "/proc/nowhere/graded.jsonl"], "cannot be written"),
        ([], [], "holds no rows"),
    ],
)
def test_bad_input(opd_grade, rows, arguments, expected):
    code, out, err = opd_grade(rows, *arguments)
    assert (code, out) == (2, [])
    assert len(err) == 1
    assert err[0].startswith("error: ")
    assert expected in err[0]


def test_a_missing_file(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["opd", "grade", str(Path("/nowhere/rows.jsonl"))])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    assert "cannot be read" in capsys.readouterr().err


def run(*arguments: str, **options) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from opd.cli import main; main()", "grade", *arguments]
    return subprocess.run(command, stderr=subprocess.PIPE, text=True, **options)


@pytest.mark.parametrize("name", ["-", "/dev/stdin"])
def test_rows_from_a_pipe(name: str):
    done = run(name, input=json.dumps(ROWS[0]), stdout=subprocess.PIPE)
    assert done.returncode == 0
    assert json.loads(done.stdout) == GRADED[0]


@pytest.mark.parametrize("arguments", [(), ("--out", "/dev/full")])
def test_a_full_output_is_one_line(tmp_path, arguments: tuple[str, ...]):
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROWS[0]))
    with Path("/dev/full").open("w") as full:
        done = run(str(tmp_path / "rows.jsonl"), *arguments, stdout=full)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert Path("/dev/full").is_char_device()


def test_a_closed_output_is_one_line(tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROWS[0]))
    reading, writing = os.pipe()
    os.close(reading)
    done = run(str(tmp_path / "rows.jsonl"), stdout=writing)
    os.close(writing)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)


def test_output_that_would_replace_something(opd_grade, tmp_path):
    code, out, err = opd_grade(ROWS[:1], "--out", str(tmp_path / "rows.jsonl"))
    assert (code, out, len(err)) == (2, [], 1)
    assert json.loads((tmp_path / "rows.jsonl").read_text()) == ROWS[0]
    code, out, err = opd_grade(ROWS[:1], "--out", ".")
    assert (code, out, len(err)) == (2, [], 1)
    assert "is a folder" in err[0]
