"""The pool file: what is written is read, whatever else is refused by line."""

import json

import pytest
from datasets import load_dataset

from opd.data import Columns, DatasetConfig, load_prompts
from opd.data_free.pool import Row, check_out, pool_digest, read_pool, write_pool
from opd.errors import UserError

ROWS = [
    Row("maths-0", "1 + 1?\u2028 = ?", "maths", 2, 9, {"teacher": "t", "seed": 0}),
    Row("x", [{"role": "system", "content": "s"}, {"role": "user", "content": "é"}], further={"answer": "7"}),
]


@pytest.fixture
def pool(tmp_path):
    return tmp_path / "pool.jsonl"


def test_what_is_written_is_read(pool):
    write_pool(pool, ROWS)
    assert read_pool(pool, "--pool") == ROWS
    assert [row.text for row in ROWS] == ["1 + 1?\u2028 = ?", "é"]
    first, second = map(json.loads, pool.read_text("utf-8").split("\n")[:2])
    assert list(first) == ["id", "prompt", "domain", "attempt", "num_tokens", "provenance"]
    assert second["answer"] == "7"


def test_other_readers_take_it(pool):
    write_pool(pool, ROWS[:1])
    assert load_dataset("json", data_files=str(pool), split="train")[0]["prompt"] == ROWS[0].prompt
    (prompt,) = load_prompts(DatasetConfig(str(pool), columns=Columns(prompt="prompt")), "prompts")
    assert (prompt.id, prompt.problem, prompt.domain) == ("maths-0", ROWS[0].prompt, "maths")


def test_the_digest_is_of_all_that_training_reads_in_order():
    digest = pool_digest(ROWS)
    assert len(digest) == 32
    text = ROWS[0].prompt
    assert pool_digest([Row("maths-0", text, "maths"), ROWS[1]]) == digest
    changed = [Row("maths-1", text, "maths"), Row("maths-0", text, "code"), Row("maths-0", "1", "maths")]
    changed += [Row("maths-0", text, "maths", further={name: "8"}) for name in ("answer", "tools")]
    assert len({digest, pool_digest(ROWS[::-1]), *(pool_digest([row, ROWS[1]]) for row in changed)}) == 7


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "holds no prompts"),
        ('{"id": "a", "prompt": "b"}\n{"id": ', "line 2 of .* is not valid JSON"),
        ('{"prompt": "b"}', "line 1 of .* has no 'id'; make a pool .* opd prompts import"),
        ('{"id": "a", "problem": "b"}', "line 1 of .* has no 'prompt'"),
        ('{"id": "a", "prompt": " "}', "line 1 of .* needs non-empty text"),
        ('{"id": "a", "prompt": []}', "line 1 of .* needs non-empty text"),
        ('{"id": 7, "prompt": "b"}', "line 1 of .*: 'id' is 7"),
        ('{"id": "a", "prompt": "b", "domain": ""}', "line 1 of .*: 'domain' is ''"),
        (
            '{"id": "a", "prompt": "b", "domain": "a b/c"}',
            "line 1 of .*: 'domain' is 'a b/c': it names a teacher; use letters",
        ),
        ('{"id": "a", "prompt": "b", "domain": ["a"]}', r"line 1 of .*: 'domain' is \['a'\]"),
        ('{"id": "a", "prompt": "b", "provenance": "x"}', "line 1 of .*: 'provenance' is 'x'"),
        ('{"id": "a", "prompt": "b", "provenance": {"sampling": "greedy"}}', "line 1 of .* provenance's 'sampling' is not"),
        (
            '{"id": "a", "prompt": "b", "provenance": {"selected": null}}',
            "line 1 of .* provenance's 'selected' is not a list",
        ),
        (
            '{"id": "a", "prompt": "b", "provenance": {"selected": ["x"]}}',
            "line 1 of .* provenance's 'selected' is not a list",
        ),
    ],
)
def test_no_pool(pool, content, message):
    pool.write_text(content)
    with pytest.raises(UserError, match=f"^prompts.path: .*{message}"):
        read_pool(pool, "prompts.path")


PART = {"type": "text", "text": "one of several parts"}


@pytest.mark.parametrize(
    "prompt",
    [
        [{"role": "user"}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": " "}],
        [{"role": "user", "content": [PART]}],
        [{"role": "user", "content": "fine"}, {"role": "user", "content": [PART]}],
        [{"role": "user", "content": "fine"}, {"role": "assistant", "content": None}],
        [{"content": "fine"}],
        [{"role": 7, "content": "fine"}],
        ["fine"],
        {"role": "user", "content": "fine"},
    ],
)
def test_a_prompt_without_text(pool, prompt):
    """Else all of them would count as the same text, the empty one."""
    pool.write_text(json.dumps({"id": "a", "prompt": prompt}))
    expected = r"^POOL: line 1 of .* needs non-empty text, or chat messages of which each has text as content, in 'prompt'$"
    with pytest.raises(UserError, match=expected):
        read_pool(pool, "POOL")


def test_a_conversation_with_calls_of_tools(pool):
    calls = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", "arguments": {}}}]}
    rows = [Row("a", [{"role": "user", "content": "1 + 1?"}, calls, {"role": "tool", "content": "2"}])]
    write_pool(pool, rows)
    assert read_pool(pool, "POOL") == rows


def test_what_is_read_is_never_written_over(tmp_path):
    source, out = tmp_path / "a.samples.jsonl", tmp_path / "a.jsonl"
    source.write_text("x")
    assert check_out(out, source, overwrite=False) == []
    for target in (out, source):
        with pytest.raises(UserError, match=r"a\.samples\.jsonl is what is read and would be overwritten; name another"):
            check_out(target, source, overwrite=True, beside=[".samples.jsonl"])
    (tmp_path / "link.jsonl").symlink_to(source)
    with pytest.raises(UserError, match="is what is read"):
        check_out(tmp_path / "link.jsonl", source, overwrite=True)
    out.write_text("y")
    with pytest.raises(UserError, match=r"a\.jsonl exists; replace it with --overwrite$"):
        check_out(out, source, overwrite=False)
    with pytest.raises(UserError, match=r"a\.jsonl exists; continue it with --resume or replace it with --overwrite$"):
        check_out(out, source, overwrite=False, resume=False)
    (folder := tmp_path / "folder.jsonl").mkdir()
    with pytest.raises(UserError, match=r"is a folder: name a file that ends in \.jsonl"):
        check_out(folder, overwrite=True)
    assert check_out(out, source, overwrite=True) == check_out(out, source, overwrite=False, resume=True) == [out]


def test_no_file(pool):
    with pytest.raises(UserError, match=r"^prompts\.path: no such file"):
        read_pool(pool, "prompts.path")
