"""`opd align` on small tokenizers."""

import json
import sys

import pytest
from transformers import ByT5Tokenizer

from opd.cli import main
from tests.alignment.conftest import tokenizers  # noqa: F401  the same small tokenizers


@pytest.fixture
def folder(tokenizers, tmp_path):  # noqa: F811
    """`folder(kind)`: a model's folder with that tokenizer."""

    def save(kind: str):
        path = tmp_path / kind
        (ByT5Tokenizer() if kind == "slow" else tokenizers[kind]).save_pretrained(path)
        (path / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": 1}))
        return path

    return save


@pytest.fixture
def run(monkeypatch, capsys):
    """`run(*arguments)`: the exit code of `opd align`, stdout and stderr."""

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["opd", "align", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            main()
        return end.value.code or 0, *capsys.readouterr()

    return call


def test_prints_the_table_the_units_and_the_coverage(run, folder, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    code, out, err = run("--student", folder("byte_level"), "--teacher", folder("llama"))
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[:2] == ["id  student  read as   teacher", "0   <s>      token     <s>"]
    student, teacher = (next(line for line in lines if line.startswith(head)) for head in ("student  ", "teacher  "))
    assert student.replace("|", "").replace("+", "").replace(" ", "")[7:].startswith("Tom·has·3·apples")
    assert teacher.replace("|", "").replace("+", "").replace(" ", "")[7:].startswith("·Tom·has·3·apples")
    assert lines[-1].startswith("100.00% of 374 bytes and 100.00% of ")
    assert max(map(len, lines[6:-1])) <= 80


def test_json_is_one_object(run, folder, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("the fox\n")
    code, out, _ = run("--student", folder("byte_level"), "--teacher", folder("byte_level"), "--text", text, "--json")
    found = json.loads(out)
    tokens = found["student_tokens"]
    assert (code, tokens > 2) == (0, True)
    assert found == {
        "byte_coverage": 1.0,
        "token_coverage": 1.0,
        "one_to_one": 1.0,
        "units": tokens,
        "student_tokens": tokens,
        "teacher_tokens": tokens,
    }


def test_what_is_not_aligned_is_marked(run, folder, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("the Fox eats\nnothing\n")
    code, out, _ = run(
        "--student", folder("byte_level"), "--teacher", folder("wordpiece_lower"), "--text", text, "--lines", 1
    )
    assert code == 0
    marks = out.splitlines()[
        out.splitlines().index(next(line for line in out.splitlines() if line.startswith("teacher"))) + 1
    ]
    assert "x" in marks
    assert "nothing" not in out.replace("|", "").replace("+", "")
    assert "100.00%" not in out


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read: No such file"),
        (b"caf\xe9", "is not UTF-8: byte 3 is 0xe9"),
        (b"", "is empty"),
    ],
)
def test_a_bad_text_is_one_line(run, folder, tmp_path, content, message):
    text = tmp_path / "text.txt"
    if content is not None:
        text.write_bytes(content)
    code, out, err = run("--student", folder("gemma"), "--teacher", folder("llama"), "--text", text)
    assert (code, out) == (2, "")
    assert err.startswith(f"error: --text {text} {message}")
    assert err.count("\n") == 1


@pytest.mark.parametrize(("student", "teacher", "named"), [("slow", "llama", "--student"), ("llama", "slow", "--teacher")])
def test_a_slow_tokenizer_is_refused(run, folder, student, teacher, named):
    code, _, err = run("--student", folder(student), "--teacher", folder(teacher))
    assert (code, err.count("\n")) == (2, 1)
    assert err.startswith(f"error: {named}: ByT5Tokenizer is a slow tokenizer")


def test_a_missing_model_is_refused(run, folder, tmp_path):
    code, _, err = run("--student", folder("llama"), "--teacher", tmp_path / "nowhere")
    assert (code, err.count("\n")) == (2, 1)
    assert err.startswith("error: --teacher: no such folder")


def test_special_tokens_can_be_tried(run, folder):
    words = ("--student", folder("byte_level"), "--teacher", folder("llama"))
    code, out, _ = run(*words, "--special-tokens", '{"<s>": "begin"}')
    assert code == 0
    assert any(line.split()[1:3] == ["<s>", "text"] and "'begin'" in line for line in out.splitlines())
    for wrong, said in (
        ("{", "not JSON"),
        ("[1]", "not a JSON object of texts"),
        ('{"<x>": ""}', "alignment.special_tokens: '<x>'"),
    ):
        code, _, err = run(*words, "--special-tokens", wrong)
        assert code == 2
        assert said in err


def test_what_the_student_cannot_write_is_not_covered(run, folder, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("fox 你好\n")
    code, out, _ = run("--student", folder("wordpiece"), "--teacher", folder("byte_level"), "--text", text, "--json")
    assert code == 0
    assert json.loads(out)["byte_coverage"] < 1.0
