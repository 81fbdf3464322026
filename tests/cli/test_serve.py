"""`opd serve teacher` as a process: ready line, signals, and what it refuses to start with."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection

import numpy as np
import pytest

from opd.cli import main
from opd.records import ScoreRequest
from opd.teachers.wire import Asked, decode_scores, encode_score_request

READY = re.compile(r"serving (\S+) at http://127\.0\.0\.1:(\d+) \(weights ([0-9a-f]{32}), tokens ([0-9a-f]{32})\)\n")


@pytest.fixture(scope="module")
def folder(model_folder):
    """A model that takes some ten milliseconds for a long sequence."""
    return model_folder(0, hidden_size=128, intermediate_size=512, num_hidden_layers=4)


@pytest.fixture
def start(folder):
    """`start(*options)`: (a server's process that is ready, its port)."""
    processes = []

    def run(*options):
        command = [sys.executable, "-m", "opd", "serve", "teacher", "--model", str(folder), "--port", "0", *options]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        processes.append(process)
        assert process.stdout is not None
        ready = READY.fullmatch(process.stdout.readline())
        assert ready, process.communicate()[1]
        assert ready[1] == folder.name
        return process, int(ready[2])

    yield run
    for process in processes:
        process.kill()
        process.communicate()


def call(port, method, path, body=None, token=None):
    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    try:
        connection.request(method, path, body, headers)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def question(seed, length):
    ids = np.random.default_rng(seed).integers(3, 38, length).astype(np.int32)
    return encode_score_request(Asked(ScoreRequest(ids[:5], ids[5:], k=4), 38, -30.0))


def outstanding(port):
    text = call(port, "GET", "/metrics")[1].decode()
    return float(text.partition("\nopd_outstanding_tokens ")[2].split()[0])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_it_answer_what_it_accepted(start, number):
    process, port = start("--max-batch-tokens", "1")  # one request a pass
    with ThreadPoolExecutor(25) as pool:
        answers = [pool.submit(call, port, "POST", "/v1/score", question(i, 500)) for i in range(24)]
        while outstanding(port) < 12 * 500:
            time.sleep(0.002)
        process.send_signal(number)
        results = [answer.result() for answer in answers]
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, "")
    statuses = [status for status, _ in results]
    assert statuses.count(200) >= 12
    assert set(statuses) <= {200, 503}
    for status, body in results:
        if status == 200:
            scores, _ = decode_scores(body)
            assert scores.logps is not None
            assert len(scores.logps) == 495
    assert "Traceback" not in err
    stopping, stopped = err.splitlines()
    assert 0 < int(stopping.partition("stopping; ")[2].split()[0]) <= 24
    assert stopped.endswith("stopped")


def test_a_token_and_an_open_address(start, tmp_path):
    (tmp_path / "token").write_text("  s3cret\n")
    (tmp_path / "token").chmod(0o600)
    process, port = start_on_all(start, tmp_path / "token")
    assert call(port, "GET", "/v1/info")[0] == 401
    assert call(port, "GET", "/v1/info", token="s3cret")[0] == 200
    assert call(port, "GET", "/health")[0] == 200
    process.terminate()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "s3cret" not in err


def start_on_all(start, token):
    """A server on 0.0.0.0; the ready line names that address."""
    global READY
    before, READY = READY, re.compile(READY.pattern.replace(r"127\.0\.0\.1", r"0\.0\.0\.0"))
    try:
        return start("--host", "0.0.0.0", "--token-file", str(token))
    finally:
        READY = before


@pytest.fixture
def refused(monkeypatch, capsys, folder):
    """`refused(*options, model=folder)`: the one line of a start that exits with 2."""

    def run(*options, model=folder):
        monkeypatch.setattr(sys, "argv", ["opd", "serve", "teacher", "--model", str(model), "--port", "0", *options])
        with pytest.raises(SystemExit) as end:
            main()
        out, err = capsys.readouterr()
        assert (end.value.code, out) == (2, "")
        lines = [line for line in err.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1, err
        return lines[0].removeprefix("error: ")

    return run


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--host", "0.0.0.0"], "--host: '0.0.0.0' can be reached from other machines: give --token-file"),
        (["--host", "::"], "--host: '::' can be reached"),
        (["--host", ""], "--host: "),
        (["--host", "no such host"], "--host: 'no such host' is no address"),
        (["--token-file", "/nowhere/token"], "--token-file: /nowhere/token cannot be read"),
        (["--adapter", "math"], "--adapter: 'math' is not NAME=DIR"),
        (["--adapter", "math="], "--adapter: 'math=' is not NAME=DIR"),
        (["--adapter", "a b=x"], "--adapter: 'a b=x' is not NAME=DIR"),
        (["--adapter", "base=x"], "--adapter: the name 'base' is taken"),
        (["--adapter", "m=x", "--adapter", "m=y"], "--adapter: the name 'm' is taken"),
        (["--adapter", "math=/nowhere"], "--adapter math: /nowhere holds no adapter"),
        (["--active-experts", "weak"], "--active-experts: 'weak' is not NAME=N"),
        (["--active-experts", "weak=x"], "--active-experts: 'weak=x' is not NAME=N"),
        (["--active-experts", "weak=-1"], "--active-experts: 'weak=-1' is not NAME=N"),
        (["--active-experts", "base=1"], "--active-experts: the name 'base' is taken"),
        (["--active-experts", "w=1", "--active-experts", "w=2"], "--active-experts: the name 'w' is taken"),
        (["--active-experts", "weak=1"], "--active-experts weak: the model has no experts whose number can be set"),
        (["--quantization", "int4"], "--quantization: not JSON"),
        (["--quantization", "[1]"], "--quantization: not a JSON object"),
        (["--device", "tpu"], "--device: 'tpu' is none of"),
        (["--device", "cuda:x"], "--device: 'cuda:x' is none of"),
        (["--device", "cuda:99"], "--device: cuda:99 is not there"),
        (["--max-logprobs", "9"], "--max-logprobs: an option of --backend vllm; leave it out with hf"),
        (
            ["--backend", "vllm", "--max-logits-mib", "64"],
            "--max-logits-mib: an option of --backend hf",
        ),
        (["--backend", "vllm", "--active-experts", "w=1"], "--active-experts: an option of --backend hf"),
        (["--backend", "vllm", "--vllm-python", "/nowhere/python"], "--vllm-python: /nowhere/python cannot be run"),
    ],
)
def test_what_it_refuses_to_start_with(refused, options, message):
    assert refused(*options).startswith(message)


def test_a_model_that_is_not_there(refused):
    assert refused(model="./nowhere").startswith("--model: no such folder './nowhere'")


def test_a_port_in_use(refused):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        message = f"--port: 127.0.0.1:{port} cannot be served: Address already in use; choose another (0 is any)"
        assert refused("--port", str(port)) == message


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (" \n", "is empty"),
        ("two words", "more than one word"),
        ("a\nb", "more than one word"),
        ("pässword", "more than one word of ASCII"),
    ],
)
def test_a_token_file_without_a_token(refused, tmp_path, content, message):
    (tmp_path / "token").write_text(content)
    line = refused("--token-file", str(tmp_path / "token"))
    assert message in line
    assert content.strip() not in line or not content.strip()


def test_nothing_but_the_line_when_it_cannot_start(folder):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        command = [sys.executable, "-m", "opd", "serve", "teacher", "--model", str(folder), "--port", port]
        begin = time.monotonic()
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ)
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    assert time.monotonic() - begin < 30
