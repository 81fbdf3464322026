"""A user's function in its workers: what it is told, what is said of its mistakes, and that it ends with the run."""

import os
import signal
import subprocess
import sys
import time

import pytest

from opd.errors import UserError
from opd.eval.grading import Item
from opd.reward import functions
from opd.reward.functions import MAX_CHARACTERS, Function

ITEMS = [Item("5", "5", prompt={"id": "a", "level": 3}), Item("6", "5", prompt={"id": "b", "level": 3})]


@pytest.fixture
def own(tmp_path, monkeypatch):
    """`own(source)`: a file `own.py` in the working folder."""
    monkeypatch.chdir(tmp_path)
    return (tmp_path / "own.py").write_text


def call(limit_s):
    function = Function("own.py:judge", "reward.score", limit_s)
    try:
        function(ITEMS)
    finally:
        function.close()


@pytest.fixture
def said(own):
    """`said(source, limit_s=5.0)`: what is said of `reward.score=own.py:judge` when it is loaded and called."""

    def called(source, limit_s=5.0):
        own(source)
        with pytest.raises(UserError) as error:
            call(limit_s)
        text = str(error.value)
        assert "\n" not in text
        assert text.startswith("reward.score: own.py:judge ")
        return text.removeprefix("reward.score: own.py:judge ")

    return called


def test_it_is_told_response_answer_and_row(own, monkeypatch, tmp_path_factory):
    own("def judge(response, answer, row):\n    return row['level'] if response == answer else -0.5\n")
    function = Function("own.py:judge", "reward.score", 5.0)
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))  # its file is where the run was started
    assert function(ITEMS) == [3.0, -0.5]
    assert function([]) == []
    function.close()


def test_what_raises_is_named_with_the_prompt_and_the_users_own_line(said):
    source = "import json\n\ndef judge(response, answer, row):\n    return json.loads(response + '{')\n"
    assert said(source) == (
        "failed on prompt a: JSONDecodeError: Extra data: line 1 column 2 (char 1) "
        "(own.py, line 4: return json.loads(response + '{'))"
    )
    assert said("def judge(*_):\n    exit(3)\n") == "failed on prompt a: SystemExit: 3 (own.py, line 2: exit(3))"
    long = said("def judge(*_):\n    raise ValueError('a\\nb' * 1000)\n")
    assert long.startswith("failed on prompt a: ValueError: a ba ba b")
    assert len(long) < MAX_CHARACTERS + 100


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("def judge(response):\n    return 1", "takes (response), but is given three arguments: (response, answer, row)"),
        ("def judge(a, b, c, *, d): ...", "takes (a, b, c, *, d), but is given three arguments: (response, answer, row)"),
        (
            "import no_such_module",
            "does not load: ModuleNotFoundError: No module named 'no_such_module' (own.py, line 1: import",
        ),
        ("exit(4)", "does not load: SystemExit: 4 (own.py, line 1: exit(4))"),
        ("judge = 3", "does not load: "),
        (
            "import os\nos._exit(4)",
            "did not load within 60 s, or ended its process; move what takes so long out",
        ),
    ],
)
def test_what_cannot_be_called_is_refused_when_it_is_loaded(said, source, expected):
    assert said(source).startswith(expected)


def test_any_signature_that_takes_three_will_do(own):
    for source in (
        "def judge(*all): return len(all)",
        "def judge(a, b, c, d=0): return 3 + d",
        "from functools import partial\njudge = partial(lambda n, *all: n, 3)",
    ):
        own(source)
        function = Function("own.py:judge", "reward.score", 5.0)
        assert function(ITEMS) == [3.0, 3.0]
        function.close()


def test_a_file_that_hangs_has_a_time_limit_too(said, monkeypatch):
    monkeypatch.setattr(functions, "LOAD_S", 0.5)
    begin_s = time.monotonic()
    found = said("import time\ntime.sleep(60)\n")
    assert found.startswith("did not load within 0.5 s")
    assert found.endswith("top level")
    assert time.monotonic() - begin_s < 10


def test_a_file_that_breaks_during_the_run_is_named(own):
    own("import os\ndef judge(response, *_):\n    os._exit(1)\n")
    function = Function("own.py:judge", "reward.outcome", 5.0)
    own("import no_such_module\n")
    with pytest.raises(UserError, match=r"^reward\.outcome: own\.py:judge: a grading worker did not start; its own message"):
        function(ITEMS)
    function.close()


def test_what_it_prints_is_on_stderr_at_once(own, capfd):
    own("import time\ndef judge(response, *_):\n    print('judging', response)\n    time.sleep(60)\n")
    function = Function("own.py:judge", "reward.outcome", 0.5)
    assert function(ITEMS) == [None, None]
    function.close()
    out, err = capfd.readouterr()
    assert out == ""
    assert sorted(err.split("\n")) == ["", "judging 5", "judging 6"]


def ended(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's signal is Linux's; elsewhere the time limit ends them")
@pytest.mark.parametrize("hang", ["time.sleep(600)", "9**9**9"])
@pytest.mark.parametrize("at_import", [False, True])
def test_busy_workers_end_with_a_run_that_is_killed(own, tmp_path, hang, at_import):
    tell = f"print(os.getpid(), flush=True); {hang}"
    own(f"import os, time\n{tell if at_import else ''}\ndef judge(*_):\n    {tell}\n")
    script = tmp_path / "script.py"
    script.write_text(
        "from opd.eval.grading import Item\nfrom opd.reward.functions import Function\n"
        "Function('own.py:judge', 'reward.outcome', 300.0)([Item('5', '5', prompt={'id': 'a'})])\n"
    )
    process = subprocess.Popen([sys.executable, str(script)], stderr=subprocess.PIPE, text=True)
    assert process.stderr
    pid = int(process.stderr.readline())
    assert not ended(pid)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stderr.close()
    deadline_s = time.monotonic() + 5
    while not ended(pid) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    gone = ended(pid)
    if not gone:
        os.kill(pid, signal.SIGKILL)
    assert gone
