"""Pools to other forms and back."""

import json
import re
from dataclasses import replace

import pytest
from datasets import load_dataset
from hypothesis import given
from hypothesis import strategies as st

from opd.cli import main
from opd.data import Columns, DatasetConfig, prompt_of
from opd.data_free.exchange import exported, imported
from opd.data_free.pool import Row, read_pool, write_pool

TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(str.strip)
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "assistant"]), "content": TEXT}), min_size=1
)
ROWS = [
    Row("maths-0", "1 + 1?", "maths", 1, 5, {"teacher": "t"}),
    Row("maths-1", [{"role": "system", "content": "s"}, {"role": "user", "content": "2"}], "maths", further={"answer": "2"}),
]


@pytest.fixture
def prompts(monkeypatch, capsys, tmp_path):
    """`prompts(command, file, out, *arguments)`: (exit code, error lines, facts) of `opd prompts`; both in `tmp_path`."""

    def call(command, file, out, *arguments):
        words = ["opd", "prompts", command, str(tmp_path / file), "--out", str(tmp_path / out), *arguments]
        monkeypatch.setattr("sys.argv", words)
        with pytest.raises(SystemExit) as end:
            main()
        said = capsys.readouterr()
        errors = [line for line in said.err.splitlines() if line.startswith("error")]
        return end.value.code or 0, errors, json.loads(said.out or "null")

    return call


@given(prompt=TEXT | MESSAGES, name=TEXT, domain=st.sampled_from(["default", "maths"]), to=st.sampled_from(["trl", "jsonl"]))
def test_every_prompt_comes_back(prompt, name, domain, to):
    row = Row(name, prompt, domain)
    line = json.dumps(exported(row, to), ensure_ascii=False)
    back = imported(json.loads(line.encode()), "FILE", 0, {})
    assert (back.id, back.domain, back.text) == (row.id, row.domain, row.text)
    config = DatasetConfig("x", columns=Columns(prompt="prompt"))
    was, now = (prompt_of(one.columns, "x", config, "prompts") for one in (row, back))
    assert now.messages == was.messages


@pytest.mark.parametrize("to", ["trl", "jsonl"])
def test_there_and_back(prompts, tmp_path, to):
    write_pool(tmp_path / "pool.jsonl", ROWS)
    assert prompts("export", "pool.jsonl", "other.jsonl", "--format", to) == (0, [], {"num_prompts": 2, "format": to})
    assert prompts("import", "other.jsonl", "back.jsonl") == (0, [], {"num_prompts": 2, "domains": ["maths"]})
    back = read_pool(tmp_path / "back.jsonl", "POOL")
    assert [(row.id, row.prompt, row.domain, row.further) for row in back] == [
        (row.id, row.prompt, row.domain, row.further) for row in ROWS
    ]
    assert {row.provenance["imported"] for row in back} == {"other.jsonl"}


def test_the_forms(prompts, tmp_path):
    write_pool(tmp_path / "pool.jsonl", ROWS[:1])
    prompts("export", "pool.jsonl", "trl.jsonl")
    (row,) = load_dataset("json", data_files=str(tmp_path / "trl.jsonl"), split="train")
    assert row == {"prompt": [{"role": "user", "content": "1 + 1?"}], "id": "maths-0", "domain": "maths"}
    prompts("export", "pool.jsonl", "plain.jsonl", "--format", "jsonl")
    assert json.loads((tmp_path / "plain.jsonl").read_text()) == {"id": "maths-0", "problem": "1 + 1?", "domain": "maths"}


def test_prompts_from_elsewhere(prompts, tmp_path):
    (tmp_path / "mine.jsonl").write_text('{"question": "1?", "answer": "1", "level": 3}\n\n{"question": "2?", "id": 7}\n')
    assert prompts("import", "mine.jsonl", "pool.jsonl", "--prompt", "question", "--domain", "code")[0] == 0
    assert read_pool(tmp_path / "pool.jsonl", "POOL") == [
        Row("code-0", "1?", "code", provenance={"imported": "mine.jsonl"}, further={"answer": "1"}),
        Row("7", "2?", "code", provenance={"imported": "mine.jsonl"}),
    ]


def test_joined_pools_get_new_ids(prompts, tmp_path):
    told = [{"teacher": name, "sampling": {"temperature": 1.0}, "selected": [{"by": "filter"}]} for name in "xy"]
    rows = [Row("maths-0", "1?", "maths", 2, 9, told[0]), Row("maths-1", "2?", "maths", 0, 9, told[0], {"pass_rate": 0.5})]
    others = [Row("maths-0", "3?", "maths", 0, 4, told[1]), Row("code-7", "4?", "code", 0, 4, told[1])]
    write_pool(tmp_path / "a.jsonl", rows)
    write_pool(tmp_path / "b.jsonl", others)
    (tmp_path / "both.jsonl").write_bytes((tmp_path / "a.jsonl").read_bytes() + (tmp_path / "b.jsonl").read_bytes())
    code, (error,), _ = prompts("import", "both.jsonl", "pool.jsonl")
    assert code == 2
    assert re.match(r"error: FILE: line 3 of .* has the id 'maths-0', as an earlier line has; .* --renumber$", error)
    assert prompts("import", "both.jsonl", "pool.jsonl", "--renumber")[2] == {"num_prompts": 4, "domains": ["code", "maths"]}
    ids = ["maths-0", "maths-1", "maths-2", "code-0"]
    pool = read_pool(tmp_path / "pool.jsonl", "POOL")
    assert pool == [replace(row, id=name) for row, name in zip([*rows, *others], ids, strict=True)]


@pytest.mark.parametrize(
    ("command", "content", "arguments", "expected"),
    [
        ("import", None, [], "FILE: no such file"),
        ("import", "", [], "FILE: .* holds no prompts"),
        ("import", '{"prompt": "a"}\n[', [], "FILE: line 2 of .* is not valid JSON"),
        ("import", '{"promt": "a"}', [], "FILE: line 1 of .* has no column 'prompt' or 'problem'; did you mean 'promt'"),
        ("import", '{"prompt": "a"}', ["--prompt", "question"], "FILE: line 1 of .* has no column 'question'"),
        ("import", '{"prompt": ""}', [], "FILE: line 1 of .* needs non-empty text"),
        ("import", '{"problem": [{"role": "user"}]}', [], "FILE: line 1 of .* needs non-empty text, .* in 'problem'"),
        ("import", '{"prompt": "a", "domain": "a b/c"}', [], "FILE: line 1 of .*: 'domain' is 'a b/c': it names a teacher"),
        ("import", '{"prompt": "a", "domain": ["a"]}', [], r"FILE: line 1 of .*: 'domain' is \['a'\]"),
        ("import", '{"prompt": "a", "id": ["b"]}', [], r"FILE: line 1 of .*: 'id' is \['b'\]; write text, or leave"),
        ("import", '{"prompt": "a", "id": ""}', [], "FILE: line 1 of .*: 'id' is ''; write text"),
        ("import", '{"prompt": "a", "provenance": "me"}', [], "FILE: line 1 of .*: 'provenance' is 'me', .* leave the"),
        ("import", '{"prompt": "\udcff"}', [], "FILE: line 1 of .* is not UTF-8 text$"),
        (
            "import",
            '{"id": 1, "prompt": "a"}\n{"id": "1", "prompt": "b"}',
            [],
            "FILE: line 2 of .* has the id '1', as",
        ),
        (
            "import",
            '{"prompt": "a", "provenance": {"sampling": "greedy"}}',
            [],
            "FILE: line 1 of .* 'sampling' is not a JSON object; leave the column 'provenance' out",
        ),
        ("import", '{"prompt": "a"}', ["--domain", "a b"], "--domain is 'a b'"),
        ("import", '{"prompt": "a"}', ["--out", "pool.txt"], "--out: pool.txt: name a file that ends in .jsonl"),
        ("export", None, [], "POOL: no such file"),
        ("export", '{"prompt": "a"}', [], "POOL: line 1 of .* has no 'id'"),
        ("export", '{"id": "a", "prompt": "a"}', ["--out", "pool.txt"], "--out: pool.txt: name a file that ends in .jsonl"),
    ],
)
def test_bad_input(prompts, tmp_path, command, content, arguments, expected):
    if content is not None:
        (tmp_path / "in.jsonl").write_text(content, errors="surrogateescape")
    code, (error,), _ = prompts(command, "in.jsonl", "out.jsonl", *arguments)
    assert code == 2
    assert re.match(f"error: {expected}", error)
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize("command", ["import", "export"])
def test_nothing_is_overwritten_by_accident(prompts, tmp_path, command):
    content = '{"id": "a", "prompt": "b"}\n'
    (tmp_path / "in.jsonl").write_text(content)
    (tmp_path / "out.jsonl").write_text("mine")
    assert prompts(command, "in.jsonl", "out.jsonl")[1][0].endswith("exists; replace it with --overwrite")
    assert (tmp_path / "out.jsonl").read_text() == "mine"
    assert prompts(command, "in.jsonl", "in.jsonl", "--overwrite")[1][0].endswith(
        "in.jsonl is what is read and would be overwritten; name another file"
    )
    assert (tmp_path / "in.jsonl").read_text() == content
    assert prompts(command, "in.jsonl", "out.jsonl", "--overwrite")[0] == 0
