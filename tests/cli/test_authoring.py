"""`opd prompts author` on a micro model, in process and behind `opd serve teacher`."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import pytest
from datasets import load_dataset

import opd
from opd.cli import main
from opd.data_free.author import Request, instruction_text, provenance
from opd.data_free.pool import pool_digest, read_pool
from opd.eval.options import EvalOptions

# drafts of every unusable kind occur among those of this model
FIXED = ("--max-new-tokens", "40", "--max-prompt-tokens", "10", "--max-attempts", "20", "--max-rows", "4")
HERE = {"dtype": "auto", "max_rows": 4}  # part of the provenance of what is sampled in process


@pytest.fixture(scope="module")
def teacher(model_folder):
    return str(model_folder(2))


@pytest.fixture
def author(monkeypatch, capsys, tmp_path, teacher):
    """`author(*arguments, name="pool")`: (exit code, error lines, facts or None); `NAME.jsonl` in `tmp_path` is the pool."""

    def call(*arguments, name="pool"):
        words = ["--teacher", teacher, "--n", "6", "--out", str(tmp_path / f"{name}.jsonl"), *arguments]
        monkeypatch.setattr(sys, "argv", ["opd", "prompts", "author", *words])
        with pytest.raises(SystemExit) as end:
            main()
        said = capsys.readouterr()
        errors = [line for line in said.err.splitlines() if line.startswith("error")]
        return end.value.code or 0, errors, json.loads(said.out or "null")

    return call


def drafts_in(path):
    """(header, drafts) of a file."""
    header, *lines = path.read_text("utf-8").splitlines()
    return json.loads(header), [json.loads(line) for line in lines]


def test_a_pool(author, tmp_path, teacher, micro_tokenizer):
    (tmp_path / "say.txt").write_text(" tell {domain} ab\n")
    code, errors, facts = author(*FIXED, "--n", "30", "--domain", "maths", "--instruction", str(tmp_path / "say.txt"))
    assert (code, errors) == (0, [])
    rows = read_pool(tmp_path / "pool.jsonl", "POOL")
    assert [row.id for row in rows] == [f"maths-{i}" for i in range(30)]
    assert {row.domain for row in rows} == {"maths"}
    provenance = {
        "teacher": teacher.rpartition("/")[2],  # no path of this machine
        "weights": rows[0].provenance["weights"],
        "instruction": "tell maths ab",
        "system": None,
        "sampling": {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_new_tokens": 40, **HERE, "thinking": None},
        "max_prompt_tokens": 10,
        "seed": 0,
        "opd": version("opd"),
    }
    assert all(row.provenance == provenance for row in rows)
    _, drafts = drafts_in(tmp_path / "pool.drafts.jsonl")
    of = {(draft["index"], draft["sample"]): draft for draft in drafts if draft["index"] < 30}
    kinds = {"empty": 0, "truncated": 0, "too_long": 0}
    for (index, attempt), draft in of.items():
        row = rows[index]
        if attempt == row.attempt:
            assert (row.prompt, row.num_tokens) == (draft["response"], draft["num_tokens"])
            assert row.prompt == row.prompt.strip() != ""
            assert draft["finish"] == "eos"
            assert len(micro_tokenizer(row.prompt)["input_ids"]) <= 10
        else:
            assert attempt < row.attempt
            kinds["truncated" if draft["finish"] != "eos" else "too_long" if draft["response"] else "empty"] += 1
    assert facts["unusable"] == kinds
    assert min(kinds.values()) > 0  # every kind occurs
    assert len(of) == 30 + sum(kinds.values())
    assert facts["num_tokens"] == sum(draft["num_tokens"] for draft in of.values())
    assert (facts["num_prompts"], facts["digest"]) == (30, pool_digest(rows))
    assert len({row.prompt for row in rows}) > 20
    assert load_dataset("json", data_files=str(tmp_path / "pool.jsonl"), split="train")[3]["prompt"] == rows[3].prompt


def test_a_smaller_pool_is_the_beginning_of_a_larger_one(author, tmp_path):
    for n in (1, 6, 21):
        assert author(*FIXED, "--n", str(n), name=str(n))[0] == 0
    pools = [(tmp_path / f"{n}.jsonl").read_bytes() for n in (1, 6, 21)]
    assert pools[2].startswith(pools[1])
    assert pools[1].startswith(pools[0])
    assert any(json.loads(line)["attempt"] for line in pools[0].splitlines() + pools[1].splitlines())
    drafted = {draft["index"] for draft in drafts_in(tmp_path / "6.drafts.jsonl")[1]}
    assert drafted == set(range(8))  # whole blocks of four: a draft's neighbours are the same in every pool
    assert author(*FIXED, "--n", "21", "--resume", name="6")[0] == 0
    assert (tmp_path / "6.jsonl").read_bytes() == pools[2]


def test_an_interrupted_command_ends_with_the_same_file(author, tmp_path):
    assert author(*FIXED, "--n", "10")[0] == 0
    files = pool, drafts = tmp_path / "pool.jsonl", tmp_path / "pool.drafts.jsonl"
    whole = [file.read_bytes() for file in files]
    for end in (1, len(whole[1]) // 2, len(whole[1]) - 1):  # a kill leaves a beginning of the drafts
        pool.unlink()
        drafts.write_bytes(whole[1][:end])
        assert author(*FIXED, "--n", "10", "--resume")[0] == 0
        assert [file.read_bytes() for file in files] == whole


@pytest.mark.slow
def test_a_command_killed_twice_ends_with_the_same_file(author, tmp_path, teacher):
    words = ["--n", "60", *FIXED]
    assert author(*words)[0] == 0
    pool, drafts = tmp_path / "pool.jsonl", tmp_path / "pool.drafts.jsonl"
    whole = [file.read_bytes() for file in (pool, drafts)]
    pool.unlink()
    drafts.unlink()
    command = [sys.executable, "-m", "opd", "prompts", "author", "--teacher", teacher, "--out", str(pool), *words]
    for more in ([], ["--resume"]):
        before = len(drafts.read_bytes()) if more else 0
        killed = subprocess.Popen([*command, *more], env=os.environ, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        while not drafts.exists() or len(drafts.read_bytes()) < before + 2000:
            assert killed.poll() is None
            time.sleep(0.002)
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        assert len(drafts.read_bytes()) < len(whole[1])
        assert not pool.exists()
    assert author(*words, "--resume")[0] == 0
    assert [file.read_bytes() for file in (pool, drafts)] == whole


def test_nothing_is_overwritten_by_accident(author, tmp_path):
    author(*FIXED)
    before = (tmp_path / "pool.jsonl").read_bytes()
    assert "exists; continue it with --resume" in author(*FIXED)[1][0]
    assert author(*FIXED, "--seed", "1", "--resume")[1][0].endswith(
        "has seed 0, not 1; give the same options, another --out, or --overwrite"
    )
    differs = {"max-prompt-tokens 9": "max_prompt_tokens 10, not 9", "domain maths": "domain 'default', not 'maths'"}
    differs |= {"system a": "begun with another --instruction, --system or --thinking;", "max-rows 5": "max_rows 4, not 5"}
    for other, said in differs.items():
        assert said in author(*FIXED, *f"--{other}".split(), "--resume")[1][0]
    assert (tmp_path / "pool.jsonl").read_bytes() == before
    edited = before.replace(b'"attempt"', b'"answer": "1", "attempt"', 1)
    (tmp_path / "pool.jsonl").write_bytes(edited)
    assert "was changed since: default-0 is not" in author(*FIXED, "--n", "8", "--resume")[1][0]
    assert (tmp_path / "pool.jsonl").read_bytes() == edited
    assert author(*FIXED, "--seed", "1", "--overwrite")[0] == 0
    assert (tmp_path / "pool.jsonl").read_bytes() != before
    (tmp_path / "pool.drafts.jsonl").unlink()
    assert "has no drafts beside it" in author(*FIXED, "--seed", "1", "--resume")[1][0]


def test_a_pool_that_stays_short(author, tmp_path):
    few = [*FIXED, "--n", "12", "--max-attempts", "2"]
    code, (error,), _ = author(*few)
    assert code == 2
    found = re.fullmatch(
        r"error: --max-attempts is 2: no draft of (default-\d+) can be used \((.*)\); "
        r"raise --max-(?:new|prompt)-tokens and add --overwrite, or go on without such prompts with --resume --allow-short",
        error,
    )
    assert found
    assert not (tmp_path / "pool.jsonl").exists()
    assert "exists; continue it with --resume" in author(*few)[1][0]
    assert author(*few, "--resume")[1] == [error]
    code, _, facts = author(*few, "--resume", "--allow-short")
    assert code == 0
    short = {row.id: row for row in read_pool(tmp_path / "pool.jsonl", "POOL")}
    assert found.group(1) not in short
    assert len(short) == facts["num_prompts"] < 12
    assert author(*FIXED, "--n", "12", "--resume")[0] == 0  # with more attempts, it is what it would have been at once
    rows = read_pool(tmp_path / "pool.jsonl", "POOL")
    assert {row.id: row.prompt for row in rows if row.id in short} == {row.id: row.prompt for row in short.values()}
    assert [row.attempt >= 2 for row in rows] == [row.id not in short for row in rows]


def test_a_resumed_command_takes_no_prompt_out_of_a_pool(author, tmp_path):
    few = [*FIXED, "--n", "12", "--max-attempts", "2", "--allow-short"]
    assert author(*few)[0] == 0
    pool, drafts = tmp_path / "pool.jsonl", tmp_path / "pool.drafts.jsonl"
    before = pool.read_bytes(), drafts.read_bytes()
    short = read_pool(pool, "POOL")
    last = int(short[-1].id.rpartition("-")[2])
    assert len(short) < last  # so that the number of prompts alone tells nothing
    fewer = re.escape(f"error: --resume: {pool} has default-{last}, which is not written with --n {last}")
    (error,) = author(*few, "--n", str(last), "--resume")[1]
    assert re.match(f"{fewer} and --max-attempts 2; raise them, name another --out, or use --overwrite$", error)
    (error,) = author(*few, "--max-attempts", "1", "--resume")[1]
    assert "which is not written with --n 12 and --max-attempts 1" in error
    assert (pool.read_bytes(), drafts.read_bytes()) == before
    assert author(*few, "--resume")[0] == 0
    assert pool.read_bytes() == before[0]


def test_no_draft_at_all(author, tmp_path):
    code, (error,), _ = author("--max-new-tokens", "1", "--allow-short", name="short")
    assert code == 2
    expected = r"error: --allow-short: no draft can be used \(\d+ .*\); raise --max-new-tokens and add --overwrite"
    assert re.fullmatch(expected, error)
    assert not (tmp_path / "short.jsonl").exists()


def test_thinking(author, tmp_path, teacher):
    switch = tmp_path / "switch"
    shutil.copytree(teacher, switch)
    template = switch / "chat_template.jinja"
    template.write_text(template.read_text().replace("(suffix or '')", "('<think>' if enable_thinking else '')"))
    assert author(*FIXED, "--teacher", str(switch), "--no-thinking")[0] == 0
    assert read_pool(tmp_path / "pool.jsonl", "POOL")[0].provenance["sampling"]["thinking"] is False
    code, (error,), _ = author(*FIXED, "--teacher", str(switch), "--thinking", name="thought")
    assert code == 2  # it never stops thinking
    assert "empty" in error
    assert "too long" not in error
    assert author("--thinking", name="other")[1] == [
        "error: --thinking: the teacher's chat template has no such switch; leave it out"
    ]


@pytest.fixture(scope="module")
def served(teacher, tmp_path_factory):
    """(address of a server of the teacher, file with its token)."""
    token = tmp_path_factory.mktemp("token") / "token"
    token.write_text("open-sesame")
    command = [sys.executable, "-m", "opd", "serve", "teacher", "--model", teacher, "--port", "0"]
    command += ["--token-file", str(token)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            yield server.stdout.readline().split(" at ")[1].split()[0], str(token)
        finally:
            server.kill()


def test_a_served_teacher_writes_the_same_prompts(author, tmp_path, served, teacher):
    url, token = served
    there = [*FIXED[:6], "--teacher", url, "--token-file", token]
    assert author(*FIXED, name="here")[0] == 0
    assert author(*there, "--n", "3", "--max-in-flight", "2", name="there")[0] == 0
    assert author(*there, "--resume", name="there")[0] == 0
    here, others = (read_pool(tmp_path / f"{name}.jsonl", "POOL") for name in ("here", "there"))
    sampling = here[0].provenance["sampling"]
    assert {name: sampling.pop(name) for name in HERE} == HERE  # rows of one file do not share it
    assert others[0] == here[0]  # the rest of the provenance, too
    assert [(row.id, row.prompt, row.attempt, row.num_tokens) for row in others] == [
        (row.id, row.prompt, row.attempt, row.num_tokens) for row in here
    ]
    header, drafts = drafts_in(tmp_path / "there.drafts.jsonl")
    assert header["sampler"] == "opd"
    assert {draft["index"] for draft in drafts} == set(range(6))  # each is a request of its own


def test_what_a_server_refuses(author, served):
    url, _ = served
    code, (error,), _ = author("--teacher", url)
    assert code == 2
    assert error.startswith(f"error: --teacher: {url} answers 401")
    assert "--token-file" in error
    code, (error,), _ = author("--teacher", "http://127.0.0.1:9", "--deadline-s", "1")
    assert (code, error[:38]) == (2, "error: --teacher: no answer within 1 s")


def test_the_weights_behind_vllm_are_unknown(teacher):
    """The server names its model, by whatever name; `opd serve teacher` and a model in process have a digest."""
    told = [
        provenance(Request(name, 1, EvalOptions(url=url), "Write."), "big", "identity")
        for name, url in ((teacher, "http://a:1"), ("http://a:1", "http://a:1"), (teacher, None))
    ]
    assert [one["weights"] for one in told] == [None, "identity", "identity"]
    assert ["dtype" in one["sampling"] for one in told] == [False, False, True]


WATCHED = """
import json, os, sys
opened, asked = set(), []
def watch(event, args):
    if event == "open" and isinstance(args[0], str | bytes) and not args[2] & os.O_EXCL:  # that is one made just now
        opened.add(os.fsdecode(args[0]))
    elif event == "socket.connect":
        asked.append(repr(args[1]))
sys.addaudithook(watch)
from opd.cli import main
try:
    main()
except SystemExit as end:
    assert not end.code
files = sorted(filter(os.path.isfile, opened))
print(json.dumps({"opened": files, "asked": asked, "datasets": "datasets" in sys.modules}))
"""


def test_nothing_is_read_but_the_model(tmp_path, teacher):
    """Of all files: Python's code and that of its packages, the machine's, the teacher's, and the pool's own."""
    command = ["prompts", "author", "--teacher", teacher, "--n", "3", "--out", str(tmp_path / "pool.jsonl"), *FIXED]
    done = subprocess.run([sys.executable, "-c", WATCHED, *command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    assert (seen["datasets"], seen["asked"]) == (False, [])
    prefixes = (sys.prefix, sys.base_prefix)
    known = [*prefixes, *map(os.path.realpath, prefixes), "/proc", "/sys", "/dev", "/etc", "/usr", teacher, tmp_path]
    code = Path(opd.__file__).parents[1]
    others = [Path(path) for path in seen["opened"] if not any(Path(path).is_relative_to(one) for one in known)]
    assert [path for path in others if not (path.is_relative_to(code) and path.suffix in {".py", ".pyc"})] == []
    assert f"{teacher}/config.json" in seen["opened"]


def test_instructions():
    assert instruction_text(None, None) == "Write one challenging problem. Output only the problem statement."
    assert instruction_text(None, "maths") == "Write one challenging maths problem. Output only the problem statement."
    assert instruction_text("{domain}, {domain}, x_{y}\n", "maths") == "maths, maths, x_{y}"
    assert instruction_text("Ask.", "maths") == "Ask."


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--teacher", "./nowhere"], "--teacher: no such folder"),
        (["--teacher", "http://:1"], "--teacher: 'http://:1' names no host"),
        (["--teacher", "http://a:1,http://a:1"], "--teacher: http://a:1 is given twice"),
        (["--teacher", "http://a:1", "--url", "http://b:1"], "--url and --served-as are of vLLM"),
        (["--teacher", "http://a:1", "--served-as", "b"], "--url and --served-as are of vLLM"),
        (["--teacher", "http://a:1", "--max-rows", "4"], "--max-rows has no effect on a teacher on a server"),
        (["--teacher", "http://a:1", "--dtype", "auto"], "--dtype has no effect on a teacher on a server"),
        (["--teacher", "http://a:1", "--token-file", "none"], "--token-file: none cannot be read"),
        (["--url", "http://a:1", "--max-rows", "4"], "--max-rows has no effect on a teacher on a server"),
        (["--url", "nowhere"], "--url"),
        (["--served-as", "x"], "--served-as has no effect without --url"),
        (["--token-file", "x"], "--token-file has no effect on a teacher in this process"),
        (["--max-in-flight", "3"], "--max-in-flight has no effect on a teacher in this process"),
        (["--deadline-s", "3"], "--deadline-s has no effect on a teacher in this process"),
        (["--resume", "--overwrite"], "--resume and --overwrite exclude each other"),
        (["--out", "pool.txt"], "--out: pool.txt: name a file that ends in .jsonl"),
        (["--temperature", "0"], "--temperature is 0: every prompt would be the same"),
        (["--domain", "a b"], "--domain is 'a b'"),
        (["--domain", ""], "--domain is ''"),
        (["--instruction", "missing.txt"], "--instruction: missing.txt cannot be read: No such file"),
        (["--instruction", "latin.txt"], "--instruction: latin.txt cannot be read: it is not UTF-8 text"),
        (["--instruction", "empty.txt"], "--instruction: the file is empty"),
        (["--instruction", "domain.txt"], "--instruction: its {domain} has nothing to stand for; name one with --domain"),
        (["--instruction", "typo.txt"], "--instruction: {doman} stands for nothing; allowed is {domain}"),
        (["--instruction", "long.txt"], "--instruction: it leaves no room in the teacher's context of 512 tokens"),
        (
            ["--instruction", "mine.jsonl", "--out", "mine.jsonl", "--overwrite"],
            "--out: mine.jsonl is what is read and would be overwritten",
        ),
    ],
)
def test_bad_input(author, tmp_path, monkeypatch, arguments, expected):
    monkeypatch.chdir(tmp_path)
    files = {
        "latin.txt": b"\xe9",
        "empty.txt": b"\n",
        "domain.txt": b"{domain}",
        "typo.txt": b"{doman}",
        "long.txt": b"a" * 600,
        "mine.jsonl": b"a",
    }
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    code, errors, _ = author(*arguments)
    assert (code, len(errors)) == (2, 1)
    assert errors[0].startswith(f"error: {expected}")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == files


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("--n", "0"), ("--top-p", "0"), ("--top-p", "2"), ("--top-k", "-1"), ("--max-new-tokens", "0")),
        *(("--max-prompt-tokens", "0"), ("--max-attempts", "0"), ("--seed", "-1"), ("--max-rows", "0")),
        *(("--dtype", "int8"), ("--max-in-flight", "0"), ("--deadline-s", "0"), ("--temperature", "-1")),
        *(("--temperature", "nan"), ("--temperature", "inf"), ("--top-p", "nan"), ("--max-rows", "4097")),
    ],
)
def test_numbers_out_of_range(author, tmp_path, option, value):
    assert author(option, value)[0] == 2
    assert not list(tmp_path.iterdir())


def test_a_teacher_that_cannot_be_told(author, tmp_path, teacher):
    bare = tmp_path / "bare"
    shutil.copytree(teacher, bare)
    template = bare / "chat_template.jinja"
    template.write_text("{{ raise_exception('no system') if messages[0].role == 'system' }}")
    (error,) = author("--teacher", str(bare), "--system", "s")[1]
    assert error == "error: --system: the instruction does not fit the chat template: no system"
    template.unlink()
    expected = "error: --teacher: its tokenizer has no chat template; name a model that has one"
    assert author("--teacher", str(bare))[1] == [expected]
