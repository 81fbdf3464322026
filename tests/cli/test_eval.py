"""`opd eval` on a micro model."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from opd.cli import main

ROWS = [{"problem": "abc", "answer": "1"}, {"problem": "de", "answer": "2"}, {"problem": "f", "answer": "3"}]
VERDICTS = ("correct", "wrong", "no_answer", "truncated", "timeout")


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def opd_eval(monkeypatch, capsys, tmp_path, model_folder):
    """`opd_eval(rows, *arguments)`: (exit code, error lines, results) of `opd eval` on these problems."""
    model = str(model_folder(0))

    def call(rows, *arguments):
        data = write(tmp_path / "data.jsonl", rows)
        paths = ["--model", model, "--data", str(data), "--out", str(tmp_path / "out")]
        monkeypatch.setattr(sys, "argv", ["opd", "eval", *paths, *arguments])
        with pytest.raises(SystemExit) as end:
            main()
        errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
        results = tmp_path / "out" / "data.json"
        return end.value.code or 0, errors, json.loads(results.read_text()) if results.exists() else None

    return call


def test_counts_and_matrix(opd_eval, tmp_path):
    code, errors, results = opd_eval(ROWS, "--samples", "2", "--max-new-tokens", "5", "--temperature", "1.0")
    assert (code, errors) == (0, [])
    assert (results["suite"], results["num_problems"], results["num_samples"]) == ("data", 3, 6)
    assert [len(row["verdicts"]) for row in results["rows"]] == [2, 2, 2]
    assert [row["id"] for row in results["rows"]] == ["line 1", "line 2", "line 3"]
    assert sum(results[f"num_{kind}"] for kind in VERDICTS) == 6
    assert results["accuracy"] == results["correct_rate"]
    low, high = results["intervals"]["accuracy"]
    assert low <= results["accuracy"] <= high
    assert "3 problems x 2 samples" in results["notes"][-1]
    _, *samples = (tmp_path / "out" / "data.samples.jsonl").read_text().splitlines()
    responses = {(row["index"], row["sample"]): row["response"] for row in map(json.loads, samples)}
    assert len(set(responses.values())) == 6  # each sample has noise of its own
    found = {(row["index"], row["sample"]): row["num_tokens"] for row in map(json.loads, samples)}
    assert found == {(i, s): n for i, row in enumerate(results["rows"]) for s, n in enumerate(row["num_tokens"])}


def test_a_verifier_of_ones_own(opd_eval, tmp_path):
    (tmp_path / "reward.py").write_text("def score(response, answer, row):\n    return answer == '2'\n")
    code, _, results = opd_eval(ROWS, "--max-new-tokens", "5", "--reward", f"{tmp_path}/reward.py:score")
    assert code == 0
    assert results["accuracy"] == pytest.approx(1 / 3)
    assert [row["verdicts"] for row in results["rows"]][1] == ["correct"]


def test_an_evaluation_is_never_overwritten_by_accident(opd_eval, tmp_path):
    arguments = ("--max-new-tokens", "5")
    opd_eval(ROWS, *arguments)
    before = (tmp_path / "out" / "data.json").read_bytes()
    code, errors, _ = opd_eval(ROWS, *arguments)
    assert code == 2
    assert "--resume" in errors[0]
    assert opd_eval(ROWS, *arguments, "--seed", "1", "--resume")[1][0].startswith("error: --resume")
    assert (tmp_path / "out" / "data.json").read_bytes() == before
    assert opd_eval(ROWS, *arguments, "--resume")[0] == 0
    assert (tmp_path / "out" / "data.json").read_bytes() == before
    assert opd_eval(ROWS[:1], *arguments, "--overwrite")[2]["num_problems"] == 1


def test_protocol_fills_what_is_left_open(opd_eval):
    arguments = ("--protocol", "nsd", "--samples", "2", "--max-new-tokens", "4")
    _, errors, results = opd_eval(ROWS, *arguments)
    assert errors == []
    settings = results["settings"]
    assert (settings["samples"], settings["temperature"], settings["top_p"], settings["top_k"]) == (2, 0.6, 0.95, 20)
    assert settings["chat_template_kwargs"] == {"enable_thinking": False}
    assert "2609.11699" in results["notes"][0]
    assert results["notes"][0].endswith("NOT as there: max_new_tokens 4, not 32768, samples 2, not 8")


def test_what_a_paper_does_not_state_is_named(opd_eval):
    _, _, results = opd_eval(ROWS, "--protocol", "stride", "--samples", "2", "--max-new-tokens", "4")
    assert "not stated there: temperature 0.7, top_p 1.0, max_new_tokens 4" in results["notes"][0]


def test_several_suites_from_a_folder(monkeypatch, capsys, tmp_path, model_folder):
    for name in ("gsm8k", "aime24"):
        write(tmp_path / f"{name}.jsonl", ROWS)
    command = ["opd", "eval", "--model", str(model_folder(0)), "--suite-dir", str(tmp_path), "--out", str(tmp_path / "out")]
    words = ["--suite", "gsm8k", "--suite", "aime24", "--template", "{prompt}", "--limit", "2", "--max-new-tokens", "3"]
    monkeypatch.setattr(sys, "argv", [*command, *words])
    with pytest.raises(SystemExit) as end:
        main()
    assert not end.value.code
    results = [json.loads((tmp_path / "out" / f"{name}.json").read_text()) for name in ("gsm8k", "aime24")]
    assert [result["num_problems"] for result in results] == [2, 2]
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["suite"], line["accuracy"]) for line in lines] == [(r["suite"], r["accuracy"]) for r in results]
    assert [row["key"] for row in results[0]["rows"]] == [row["key"] for row in results[1]["rows"]]


def test_a_killed_evaluation_resumes_to_the_same_result(tmp_path, model_folder):
    data = write(tmp_path / "data.jsonl", [{"problem": "abcdefgh"[:n] * 2, "answer": "1"} for n in range(1, 9)])
    fixed = [sys.executable, "-m", "opd", "eval", "--model", str(model_folder(0)), "--data", str(data)]
    fixed += ["--samples", "4", "--max-rows", "4", "--max-new-tokens", "400", "--temperature", "1", "--plain"]

    def start(name, *more):
        return subprocess.Popen([*fixed, "--out", str(tmp_path / name), *more], env=os.environ, stderr=subprocess.DEVNULL)

    assert start("whole").wait() == 0
    killed = start("killed")
    samples = tmp_path / "killed" / "data.samples.jsonl"
    while not (samples.exists() and len(samples.read_bytes().splitlines()) > 6):
        assert killed.poll() is None
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert len(samples.read_bytes().splitlines()) < 33
    assert start("killed", "--resume").wait() == 0
    whole, resumed = ((tmp_path / name / "data.json").read_bytes() for name in ("whole", "killed"))
    assert whole == resumed


@pytest.mark.parametrize(
    ("rows", "arguments", "expected"),
    [
        (ROWS, ["--answer", "gold"], "--answer: line 1 of data has no answer"),
        ([*ROWS, {"problem": "g", "answer": {"value": 1}}], [], "--answer: line 4 of data has no answer"),
        ([*ROWS, {"problem": "g", "answer": []}], [], "--answer: line 4 of data has no answer"),
        (ROWS, ["--samples", "2", "--temperature", "0"], "--samples above 1"),
        (ROWS, ["--reward", "nowhere.py:f"], "nowhere.py"),
        ([], [], "holds no prompts"),
        ([{"question": "abc"}], [], "no column 'problem'"),
        ([{"problem": "\ud800", "answer": "1"}], [], "line 1 of"),
        ([{"problem": "a" * 600, "answer": "1"}], [], "longer than the context"),
        (ROWS, ["--suite", "gsm8k"], "--suite and --data exclude each other"),
        (ROWS, ["--protocol", "ns"], "did you mean 'nsd'"),
        (ROWS, ["--sampler", "vllm"], "--sampler vllm needs --url"),
        (ROWS, ["--resume", "--overwrite"], "exclude each other"),
        (ROWS, ["--template", "no place"], "{prompt}"),
        (ROWS, ["--checkpoint", "best"], "--checkpoint:"),
    ],
)
def test_bad_input(opd_eval, rows, arguments, expected):
    code, errors, results = opd_eval(rows, "--max-new-tokens", "4", *arguments)
    assert code == 2
    assert len(errors) == 1
    assert expected in errors[0]
    assert results is None


def test_what_has_no_effect_on_episodes_is_refused(monkeypatch, capsys, tmp_path, model_folder):
    command = ["opd", "eval", "--model", str(model_folder(0)), "--out", str(tmp_path), "--suite", "environment:calculator"]
    for words in (["--template", "{prompt}!"], ["--plain"]):
        monkeypatch.setattr(sys, "argv", [*command, *words])
        with pytest.raises(SystemExit) as end:
            main()
        assert end.value.code == 2
        assert f"error: {words[0]} has no effect on episodes" in capsys.readouterr().err
    fewer = [*command, "--limit", "2", "--max-new-tokens", "2"]
    monkeypatch.setattr(sys, "argv", [*fewer, "--system", "be brief"])
    with pytest.raises(SystemExit) as end:
        main()
    assert not end.value.code
    settings = json.loads((tmp_path / "calculator.json").read_text())["settings"]
    assert (settings["template"], settings["system"]) == (None, "be brief")
