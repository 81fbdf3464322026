"""`opd eval` on a micro model."""

import json
import sys

import pytest

from opd.cli import main


@pytest.fixture
def opd_eval(monkeypatch, capsys, tmp_path, model_folder):
    """`opd_eval(rows, *arguments)`: (exit code, error lines, results) of `opd eval` on these problems."""

    def call(rows, *arguments):
        (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        paths = ["--model", str(model_folder(0)), "--data", str(tmp_path / "data.jsonl"), "--out", str(tmp_path / "out")]
        monkeypatch.setattr(sys, "argv", ["opd", "eval", *paths, *arguments])
        with pytest.raises(SystemExit) as end:
            main()
        errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
        results = tmp_path / "out" / "results.json"
        return end.value.code or 0, errors, json.loads(results.read_text()) if results.exists() else None

    return call


ROWS = [{"problem": "abc", "answer": "1"}, {"problem": "de", "answer": "2"}, {"problem": "f", "answer": "3"}]


def test_counts_and_matrix(opd_eval):
    code, errors, results = opd_eval(ROWS, "--samples", "2", "--max-new-tokens", "5", "--temperature", "1.0")
    assert (code, errors) == (0, [])
    assert results["num_problems"] == 3
    assert results["num_samples"] == 6
    assert [len(row["verdicts"]) for row in results["rows"]] == [2, 2, 2]
    assert [row["id"] for row in results["rows"]] == ["line 1", "line 2", "line 3"]
    kinds = ("correct", "wrong", "no_answer", "truncated", "timeout")
    assert sum(results[f"num_{kind}"] for kind in kinds) == 6
    assert results["accuracy"] == results["correct_rate"]


def test_a_verifier_of_ones_own(opd_eval, tmp_path):
    (tmp_path / "reward.py").write_text("def score(response, answer, row):\n    return answer == '2'\n")
    code, _, results = opd_eval(ROWS, "--max-new-tokens", "5", "--reward", f"{tmp_path}/reward.py:score")
    assert code == 0
    assert results["accuracy"] == pytest.approx(1 / 3)
    assert [row["verdicts"] for row in results["rows"]][1] == ["correct"]


@pytest.mark.parametrize(
    ("rows", "arguments", "expected"),
    [
        (ROWS, ["--answer", "gold"], "--answer: a problem has no answer"),
        (ROWS, ["--samples", "2", "--temperature", "0"], "--samples above 1"),
        (ROWS, ["--reward", "nowhere.py:f"], "nowhere.py"),
        ([], [], "holds no prompts"),
        ([{"question": "abc"}], [], "no column 'problem'"),
        ([{"problem": "a" * 600, "answer": "1"}], [], "longer than the context"),
    ],
)
def test_bad_input(opd_eval, rows, arguments, expected):
    code, errors, results = opd_eval(rows, "--max-new-tokens", "4", *arguments)
    assert code == 2
    assert len(errors) == 1
    assert expected in errors[0]
    assert results is None
