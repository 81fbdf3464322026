"""`opd prompts answer` on a micro model."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
from datasets import load_dataset

from opd.cli import main

ROWS = [{"id": f"p{n}", "problem": "abcdefgh"[:n], "answer": str(n)} for n in range(1, 7)]
SAMPLED = ("--samples", "3", "--temperature", "1", "--max-new-tokens", "30", "--max-rows", "4")


@pytest.fixture(scope="module")
def teacher(model_folder):
    return str(model_folder(3))


@pytest.fixture
def answer(monkeypatch, capsys, tmp_path, teacher):
    """`answer(*arguments)`: (exit code, error lines, rows or None, what lies beside them)."""
    data, out = tmp_path / "data.jsonl", tmp_path / "answers.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS))

    def call(*arguments):
        fixed = ["--teacher", teacher, "--data", str(data), "--out", str(out)]
        monkeypatch.setattr(sys, "argv", ["opd", "prompts", "answer", *fixed, *arguments])
        with pytest.raises(SystemExit) as end:
            main()
        errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
        if not out.exists():
            return end.value.code or 0, errors, None, {}
        rows = [json.loads(line) for line in out.read_text().splitlines()]
        about = out.with_suffix(".about.json")
        return end.value.code or 0, errors, rows, json.loads(about.read_text())

    return call


def test_only_answers_that_ended_are_kept(answer, tmp_path, micro_tokenizer):
    code, errors, rows, about = answer(*SAMPLED, "--template", "{prompt}z", "--system", "s")
    assert (code, errors) == (0, [])
    _, *lines = (tmp_path / "answers.samples.jsonl").read_text().splitlines()
    samples = sorted(map(json.loads, lines), key=lambda row: (row["index"], row["sample"]))
    assert len(samples) == 18
    kept = [row for row in samples if row["finish"] == "eos" and row["response"].strip()]
    assert 0 < len(kept) < 18  # both kinds occur
    assert [row["completion"] for row in rows] == [[{"role": "assistant", "content": row["response"]}] for row in kept]
    assert [(row["id"], row["sample"]) for row in rows] == [(f"p{row['index'] + 1}", row["sample"]) for row in kept]
    assert rows[0]["prompt"][0] == {"role": "system", "content": "s"}
    assert all(row["prompt"][1]["content"].endswith("z") for row in rows)
    assert all(row["answer"] == row["id"][1:] for row in rows)
    assert not any(token in row["completion"][0]["content"] for row in rows for token in micro_tokenizer.all_special_tokens)
    assert about["num_answers"] == len(rows)
    assert about["num_answers"] + about["num_truncated"] + about["num_empty"] == 18
    assert about["num_tokens"] == sum(row["num_tokens"] for row in kept)
    assert (about["temperature"], about["seed"], about["template"]) == (1.0, 0, "{prompt}z")
    assert about["data"] == "data.jsonl"  # no path of this machine
    loaded = load_dataset("json", data_files=str(tmp_path / "answers.jsonl"), split="train")
    assert loaded[0]["completion"] == rows[0]["completion"]


def test_nothing_is_overwritten_by_accident(answer, tmp_path):
    _, _, rows, _ = answer(*SAMPLED)
    before = (tmp_path / "answers.jsonl").read_bytes()
    code, errors, _, _ = answer(*SAMPLED)
    assert code == 2
    assert "--resume" in errors[0]
    assert answer(*SAMPLED, "--seed", "1", "--resume")[1][0].startswith("error: --resume")
    assert answer(*SAMPLED, "--resume")[0] == 0
    assert (tmp_path / "answers.jsonl").read_bytes() == before
    assert answer(*SAMPLED, "--seed", "1", "--overwrite")[2] != rows


def test_no_more_rows_than_can_be_decoded_at_once(answer):
    assert answer(*SAMPLED[:-1], "4097")[0] == 2


@pytest.mark.parametrize("ending", [".jsonl", ".samples.jsonl", ".about.json"])
@pytest.mark.parametrize("option", ["--overwrite", "--resume", None])
def test_the_prompts_are_never_overwritten(answer, tmp_path, ending, option):
    data = tmp_path / f"mine{ending}"
    content = (tmp_path / "data.jsonl").read_text()
    data.write_text(content)
    code, errors, _, _ = answer("--data", str(data), "--out", str(tmp_path / "mine.jsonl"), *([option] if option else []))
    assert code == 2
    assert errors[0].startswith(f"error: --out: {data} is what is read and would be overwritten")
    assert data.read_text() == content


@pytest.mark.parametrize("name", ["answers.jsonl", "answers.samples.jsonl", "answers.about.json"])
def test_a_foreign_file_is_not_resumed(answer, tmp_path, name):
    (tmp_path / name).write_text("[1]\n")
    (tmp_path / "answers.about.json").write_text("[1]\n")
    code, errors, _, _ = answer(*SAMPLED, "--resume")
    assert code == 2
    assert "belongs to no interrupted answer file" in errors[0]
    assert (tmp_path / name).read_text() == "[1]\n"


def test_a_teacher_without_a_template(answer, tmp_path, teacher):
    bare = tmp_path / "bare"
    shutil.copytree(teacher, bare)
    (bare / "chat_template.jinja").unlink()
    assert answer("--teacher", str(bare))[1] == [
        "error: --teacher: its tokenizer has no chat template; name a model that has one"
    ]


def test_a_killed_command_resumes_to_the_same_file(answer, tmp_path, teacher):
    words = ["--samples", "6", "--max-rows", "4", "--max-new-tokens", "300", "--temperature", "1"]
    assert answer(*words)[0] == 0
    names = [f"answers{ending}" for ending in (".jsonl", ".about.json", ".samples.jsonl")]
    whole = [(tmp_path / name).read_bytes() for name in names]
    for name in names:
        (tmp_path / name).unlink()
    paths = ["--teacher", teacher, "--data", str(tmp_path / "data.jsonl"), "--out", str(tmp_path / "answers.jsonl")]
    command = [sys.executable, "-m", "opd", "prompts", "answer", *paths, *words]
    killed = subprocess.Popen(command, env=os.environ, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    samples = tmp_path / names[2]
    while not (samples.exists() and len(samples.read_bytes().splitlines()) > 6):
        assert killed.poll() is None
        time.sleep(0.005)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert len(samples.read_bytes().splitlines()) < 37
    assert not (tmp_path / names[0]).exists()
    assert answer(*words, "--resume")[0] == 0
    assert [(tmp_path / name).read_bytes() for name in names[:2]] == whole[:2]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--prompt", "question"], "no column 'question'"),
        (["--samples", "2", "--temperature", "0"], "--samples above 1"),
        (["--served-as", "x"], "--served-as has no effect without --url"),
        (["--resume", "--overwrite"], "exclude each other"),
        (["--teacher", "./nowhere"], "--teacher: no such folder"),
        (["--data", "missing.jsonl"], "error: --data: no such file"),
        (["--out", "answers.txt"], "ends in .jsonl"),
        (["--template", "no place"], "error: --template: it must contain {prompt}"),
        (["--template", "{prompt} {promt}"], "error: --template: {promt} stands for nothing"),
        (["--teacher", "http://a:1"], "error: --teacher: http://a:1 is an address; name a model folder, and a vLLM"),
        (["--prompt", "nothing"], "error: --prompt: line 1 needs non-empty text"),
        (["--prompt", "null"], "error: --data: p1: a user message has no content"),
        (["--prompt", "strange"], "error: --data: p1 does not fit the chat template"),
        (["--prompt", "long"], "error: --data: every problem is longer than the context"),
        ([], "error: --max-new-tokens is 1: no answer is left (6 cut short, 0 without text); raise it"),
        (["--url", "nowhere"], "--url"),
    ],
)
def test_bad_input(answer, tmp_path, arguments, expected):
    strange = {"nothing": "", "null": [{"role": "user"}], "strange": [{"role": "user", "content": 5}], "long": "a" * 9999}
    (tmp_path / "data.jsonl").write_text("".join(json.dumps({**row, **strange}) + "\n" for row in ROWS))
    code, errors, rows, _ = answer("--max-new-tokens", "1", *arguments)
    assert code == 2
    assert len(errors) == 1
    assert expected in errors[0]
    assert rows is None
