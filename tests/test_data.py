"""Prompts from files: formats, columns, and every mistake in one line that names the place."""

import json

import pytest

from opd.data import Columns, DatasetConfig, check_options, check_path, load_prompts
from opd.errors import UserError
from opd.records import Prompt
from opd.tokenization import render_text


@pytest.fixture(autouse=True)
def quiet():
    from datasets import disable_progress_bars

    disable_progress_bars()


@pytest.fixture
def load(tmp_path):
    """`load(content, name, **settings)`: the prompts of a file with that content, text or rows for JSON lines."""

    def read(content: str | bytes | list, name: str = "rows.jsonl", **settings) -> list[Prompt]:
        if isinstance(content, list):
            content = "".join(json.dumps(row) + "\n" for row in content)
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return load_prompts(DatasetConfig(path=str(path), **settings), "prompts")

    return read


def test_text_becomes_a_user_message(load):
    rows = [{"id": 7, "prompt": "2+2?", "answer": 4, "level": "easy"}, {"prompt": "3+3?", "domain": "maths"}]
    first, second = load(rows)
    assert first == Prompt("7", ({"role": "user", "content": "2+2?"},), answer="4", problem="2+2?", meta={"level": "easy"})
    assert second == Prompt("line 2", ({"role": "user", "content": "3+3?"},), problem="3+3?", domain="maths")


def test_template_and_system_message(load):
    (prompt,) = load([{"prompt": "{x}"}], template="Solve {prompt} now", system="Be brief.")
    assert [dict(message) for message in prompt.messages] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Solve {x} now"},
    ]
    assert prompt.problem == "{x}"


def test_messages_stay_as_they_are(load):
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    (prompt,) = load([{"prompt": messages}], system="S")
    assert list(prompt.messages) == [{"role": "system", "content": "S"}, *messages]
    assert prompt.problem == "hi"  # what users say is what identifies it
    assert prompt.text is None


def test_plain_text_has_no_messages(load):
    (prompt,) = load([{"prompt": "once"}], plain=True, template="{prompt} upon")
    assert (prompt.text, prompt.messages) == ("once upon", ())


def test_columns_of_other_names(load):
    columns = Columns(prompt="question", answer="solution", domain="topic", tools="functions")
    tool = {"name": "add"}
    rows = [{"question": "q", "solution": ["1", 2], "topic": "x", "functions": [tool], "prompt": "else"}]
    (prompt,) = load(rows, columns=columns)
    assert prompt.messages[0]["content"] == "q"
    assert (prompt.answer, prompt.domain, prompt.tools) == (("1", "2"), "x", (tool,))
    assert prompt.meta == {"prompt": "else"}


def test_tools_and_chat_arguments_reach_the_template(load, micro_tokenizer):
    (prompt,) = load([{"prompt": "abc", "tools": [{"name": "t"}]}], chat_template_kwargs={"suffix": "z"})
    assert render_text(micro_tokenizer, prompt) == "<bos>t<user>abc<assistant>z"


def test_other_formats(load):
    content = {
        "rows.csv": "prompt,answer\nx,1\ny,2\n",
        "rows.json": '[{"prompt": "x", "answer": "1"}, {"prompt": "y", "answer": "2"}]',
    }
    for name, text in content.items():
        assert [(p.messages[0]["content"], p.answer) for p in load(text, name)] == [("x", "1"), ("y", "2")]
    assert [p.id for p in load("x\ny\n", "rows.txt", columns=Columns(prompt="text"))] == ["row 1", "row 2"]


def test_blank_lines_a_byte_order_mark_and_a_limit(load):
    assert [p.id for p in load(b'\xef\xbb\xbf{"prompt":"x"}\n\n \n{"prompt":"y"}')] == ["line 1", "line 4"]
    assert [p.id for p in load([{"prompt": "x"}, {"prompt": 5}], limit=1)] == ["line 1"]  # what follows is not read


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "rows.jsonl holds no prompts"),
        ("\n \n", "rows.jsonl holds no prompts"),
        ('{"prompt": "x"}\n{broken\n', "prompts.path: line 2 of "),
        (b'{"prompt": "x"}\n{"prompt": "\xff"}\n', "prompts.path: line 2 of "),
        ('{"prompt": "x"}\n\n[1]\n', "rows.jsonl is not a JSON object"),
        ([{"promt": "x"}], "prompts.columns.prompt: line 1 has no column 'prompt'; did you mean 'promt'?"),
        ([{"question": "x", "id": 3}], "line 1 has no column 'prompt'; known: id, question"),
        ([{"prompt": "x"}, {"prompt": 5}], "prompts.columns.prompt: line 2 needs non-empty text or a list of messages"),
        ([{"prompt": None}], "line 1 needs non-empty text"),
        ([{"prompt": "  "}], "line 1 needs non-empty text"),
        ([{"prompt": []}], "line 1 needs non-empty text"),
        ([{"prompt": ["x"]}], "line 1 needs non-empty text"),
        ([{"prompt": [{"content": "x"}]}], "line 1 needs non-empty text"),
    ],
)
def test_mistakes_in_json_lines(load, content, message):
    with pytest.raises(UserError) as error:
        load(content)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.xml", "x", "rows.xml is none of .jsonl .csv .json .parquet .txt"),
        ("rows.csv", "promt\nx\n", "row 1 has no column 'prompt'; did you mean 'promt'?"),
        ("rows.csv", "", "rows.csv cannot be read"),
        ("rows.json", "{broken", "rows.json cannot be read"),
        ("rows.parquet", "nothing", "rows.parquet cannot be read"),
    ],
)
def test_mistakes_in_other_formats(load, name, content, message):
    with pytest.raises(UserError) as error:
        load(content, name)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("template", ["{prompt} {answer}", "{problem}"])
def test_templates_are_looked_at_before_any_row(template):
    with pytest.raises(UserError, match=r"^eval\.prompts\.template: "):
        check_options(DatasetConfig("none.jsonl", template=template), "eval.prompts")
    check_options(DatasetConfig("none.jsonl", template=r"{prompt} \boxed{} \frac{1}{2}"), "eval.prompts")


@pytest.mark.parametrize("path", ["none.jsonl", "none", "./a/b.jsonl", "/none", "a/b/c"])
def test_paths_that_do_not_exist(path):
    for refuse in (
        lambda: load_prompts(DatasetConfig(path=path), "eval.prompts"),
        lambda: check_path(path, "eval.prompts"),
    ):
        with pytest.raises(UserError, match=rf"^eval\.prompts\.path: no such file '{path}'$"):
            refuse()


def test_a_folder_is_no_file(tmp_path):
    with pytest.raises(UserError, match="is a folder; name a file in it"):
        load_prompts(DatasetConfig(path=str(tmp_path)), "prompts")


def test_a_hub_data_set_that_cannot_be_reached():
    with pytest.raises(UserError) as error:
        load_prompts(DatasetConfig(path="no-such-owner/no-such-data"), "prompts")
    assert str(error.value).startswith("prompts.path: 'no-such-owner/no-such-data' cannot be loaded: ")
    assert "\n" not in str(error.value)
