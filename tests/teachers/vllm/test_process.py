"""The engine's process: answers, refusals and deaths come to whoever asked, and nothing of it is left behind."""

import asyncio
import os
import queue
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from opd.errors import UserError
from opd.teachers.server.admission import Refused
from opd.teachers.vllm.process import EngineProcess, default_python

START = {"arguments": {"max_num_batched_tokens": 8, "dtype": "float32", "max_model_len": 64}, "adapters": {}}


def ask(engine, first, kind="score", **fields):
    tensors = {"ids": np.array([first, 5, 6], np.int32)}
    return engine.ask(kind, {"n": 2, "k": 1, "adapter": None, **fields}, tensors)


def refusal(engine, first):
    with pytest.raises(Refused) as caught:
        asyncio.run(ask(engine, first))
    return caught.value


def test_many_questions_at_once(engine):
    facts = engine.start(START)
    assert facts["rows"] == 45

    async def run():
        return await asyncio.gather(*(ask(engine, first) for first in range(3, 28)))

    answers = asyncio.run(run())
    assert len({float(arrays["logps"][0]) for _, arrays in answers}) == 25
    assert asyncio.run(engine.ask("reset", {}, {}))[0]["kind"] == "done"


def test_refusals_and_faults_are_those_of_one_question(engine):
    engine.start(START)
    refused, fault = refusal(engine, 30), refusal(engine, 31)
    assert (refused.status, refused.message) == (400, "vLLM: this prompt cannot be")
    assert (fault.status, fault.message) == (500, "vLLM: a bug")
    asyncio.run(ask(engine, 3))


@pytest.mark.parametrize(
    ("first", "why"),
    [
        (32, "the engine's process ended with code 7: out of memory, say"),
        (33, "the engine's process ended with code 1: vLLM's engine has died: RuntimeError: EngineCore is gone"),
    ],
)
def test_a_death_fails_all_that_wait_and_is_told(engine_log, engine, first, why):
    engine.start(START)
    told = []
    engine.when_dead(told.append)

    async def run():
        waiting = asyncio.create_task(ask(engine, 34))
        await asyncio.to_thread(engine_log, "hangs")
        return await asyncio.gather(ask(engine, first), waiting, return_exceptions=True)

    errors = asyncio.run(run())
    assert isinstance(errors[1], Refused)
    assert (errors[1].status, errors[1].message) == (503, why)
    assert told == [why]
    assert refusal(engine, 3).message == why
    engine.when_dead(told.append)
    assert told == [why, why]


def test_an_engine_that_dies_while_nobody_asks(fake_python, monkeypatch):
    monkeypatch.setenv("OPD_FAKE", "idle")
    engine, told = EngineProcess(fake_python), queue.SimpleQueue()
    engine.start(START)
    engine.when_dead(told.put)
    assert told.get(timeout=20).endswith("vLLM's engine has died: RuntimeError: EngineCore is gone")
    engine.close()


def test_a_question_that_is_given_up_is_aborted(engine_log, engine):
    engine.start(START)

    async def run():
        task = asyncio.create_task(ask(engine, 34))
        await asyncio.to_thread(engine_log, "hangs")
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(run())
    engine_log("aborted")
    asyncio.run(ask(engine, 3))


def test_the_end_of_the_pipe_ends_it_in_order(fake_python, engine_log):
    engine, told = EngineProcess(fake_python), []
    pid = engine.start(START)["pid"]
    engine.when_dead(told.append)
    engine.close()
    engine_log("shut down")
    assert told == []
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_it_does_not_outlive_its_parent(fake_python, engine_log, tmp_path):
    code = (
        "import os, signal\nfrom opd.teachers.vllm.process import EngineProcess\n"
        f"print(EngineProcess({fake_python!r}).start({START!r})['pid'], flush=True)\nos.kill(os.getpid(), signal.SIGKILL)\n"
    )
    (tmp_path / "parent.py").write_text(code)
    parent = subprocess.run([sys.executable, tmp_path / "parent.py"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    pid = int(parent.stdout)
    engine_log("shut down")
    deadline = time.monotonic() + 10
    while _lives(pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0] != "Z"


def test_a_model_that_does_not_start(fake_python, monkeypatch):
    monkeypatch.setenv("OPD_FAKE", "trouble")
    engine = EngineProcess(fake_python)
    with pytest.raises(UserError, match=r"^--backend vllm: ValueError: no room for the model on this device$"):
        engine.start(START)
    engine.close()


def test_an_interpreter_that_cannot_be_used(tmp_path):
    with pytest.raises(UserError, match=r"--vllm-python: /nowhere/python cannot be run: No such file"):
        EngineProcess("/nowhere/python")
    engine = EngineProcess("/bin/false")
    with pytest.raises(UserError, match="--backend vllm: the engine's process ended with code 1"):
        engine.start(START)
    engine.close()
    plain = EngineProcess(sys.executable)
    with pytest.raises(UserError, match=rf"--vllm-python: {sys.executable}: No module named 'vllm'; name a Python"):
        plain.start(START)
    plain.close()


def test_a_killed_engine(engine):
    pid = engine.start(START)["pid"]
    os.kill(pid, signal.SIGKILL)
    assert refusal(engine, 34).message.startswith("the engine's process ended with signal SIGKILL")


def test_the_interpreter_of_the_environment(monkeypatch, tmp_path):
    monkeypatch.delenv("OPD_VLLM", raising=False)
    assert default_python() == sys.executable
    monkeypatch.setenv("OPD_VLLM", str(tmp_path))
    assert default_python() == str(tmp_path / "python")
    monkeypatch.setenv("OPD_VLLM", str(tmp_path / "python3"))
    assert default_python() == str(tmp_path / "python3")
