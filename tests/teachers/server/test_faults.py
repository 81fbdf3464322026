"""Whatever comes over the wire or goes wrong inside: one status, one line, and the server goes on."""

import gc
import json
import logging
import socket
import time
import weakref

import numpy as np
import pytest
import torch

from opd.records import SampleRequest, Sampling, Scores
from opd.teachers.wire import decode_scores, encode_sample_request, encode_scores


def mutated(frame: bytes, rng: np.random.Generator) -> bytes:
    """The frame after one of the accidents that happen to bytes."""
    body = bytearray(frame)
    kind = rng.integers(6)
    at = int(rng.integers(len(body)))
    if kind == 0:
        body[at] ^= 1 << int(rng.integers(8))
    elif kind == 1:
        del body[at:]
    elif kind == 2:
        body[at:at] = rng.bytes(int(rng.integers(1, 64)))
    elif kind == 3:
        body[:8] = int(rng.integers(2**62)).to_bytes(8, "little")
    elif kind == 4:
        header = int.from_bytes(body[:8], "little")
        at = 8 + int(rng.integers(header))
        body[at : at + 4] = rng.bytes(4)
    else:
        start = int(rng.integers(len(body)))
        body[start : start + 16] = b"\xff" * len(body[start : start + 16])
    return bytes(body)


def test_2000_mutated_frames(live, frame):
    server = live()
    sampled = SampleRequest(np.array([1, 5], np.int32), 3, 2, Sampling(num_topk=2))
    ids = np.zeros((4, 2), np.int32)
    frames = [
        ("/v1/score", frame(0, 3, 4, k=2)),
        ("/v1/score", frame(1, 3, 4, ids=ids)),
        ("/v1/score", frame(2, 3, 4, stream="s", hidden=True)),
        ("/v1/generate", encode_sample_request(sampled)),
        ("/v1/generate", frame(3, 3, 4)),
        ("/v1/score", encode_scores(Scores(np.zeros(3, np.float32)), "0" * 32)),
    ]
    before = server.call("POST", "/v1/score", frames[0][1]).body
    rng = np.random.default_rng(0)
    connection, statuses = server.connect(), []
    for i in range(2000):
        path, whole = frames[i % len(frames)]
        answer = server.call("POST", path, mutated(whole, rng), connection)
        statuses.append(answer.status)
        assert answer.status == 200 or answer.error
    connection.close()
    assert set(statuses) <= {200, 400, 409, 413, 503}
    assert statuses.count(400) > 1000
    assert server.call("GET", "/health").status == 200
    assert server.call("POST", "/v1/score", frames[0][1]).body == before
    server.wait_until_idle()


@pytest.mark.parametrize(
    "garbage", [b"\x16\x03\x01\x02\x00\x01", b"\r\n\r\n", b"GET\r\n\r\n", b"\x00" * 4096, b"A" * 100_000]
)
def test_bytes_that_are_no_http(live, garbage, caplog):
    server = live()
    with socket.create_connection(("127.0.0.1", server.server.port), timeout=20) as raw:
        raw.sendall(garbage)
        raw.shutdown(socket.SHUT_WR)
        answer = b"".join(iter(lambda: raw.recv(65536), b""))
    assert b"Traceback" not in answer
    assert not answer or b" 400 " in answer.splitlines()[0]
    assert "Traceback" not in caplog.text
    assert server.call("GET", "/health").status == 200


@pytest.mark.parametrize(
    ("head", "body"),
    [
        ("Transfer-Encoding: chunked", b"zz\r\nhello\r\n0\r\n\r\n"),
        ("Transfer-Encoding: chunked", b"5\r\nhelloXXXX\r\n0\r\n\r\n"),
        ("Content-Encoding: gzip\r\nContent-Length: 5", b"hello"),
        ("Content-Encoding: br\r\nContent-Length: 5", b"hello"),
        ("Content-Length: -3", b""),
        ("Content-Length: 3\r\nContent-Length: 4", b"abcd"),
        ("Content-Length: 3\r\nTransfer-Encoding: chunked", b"3\r\nabc\r\n0\r\n\r\n"),
        ("Expect: nonsense\r\nContent-Length: 0", b""),
    ],
)
def test_bodies_that_cannot_be_read(live, head, body):
    server = live()
    with socket.create_connection(("127.0.0.1", server.server.port), timeout=20) as raw:
        raw.sendall(f"POST /v1/score HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{head}\r\n\r\n".encode() + body)
        answer = b"".join(iter(lambda: raw.recv(65536), b""))
    status = int(answer.split()[1])
    assert 400 <= status < 500, answer
    assert b"Traceback" not in answer
    assert server.call("GET", "/health").status == 200
    server.wait_until_idle()


FAILURES = {
    "any": (RuntimeError("shape [3, 5] of /secret/path"), "the server failed at this request: its log has the reason"),
    "memory": (torch.OutOfMemoryError("tried to allocate 3 GiB"), "the model ran out of memory: serve it with a smaller"),
}


@pytest.mark.parametrize(("error", "message"), FAILURES.values(), ids=FAILURES)
def test_a_failure_inside_the_model(live, load_served, model_folder, frame, caplog, error, message):
    model = load_served(model_folder(0))
    server, own = live(model), model.model._pass

    def fail(asked):
        raise error

    model.model._pass = fail
    with caplog.at_level(logging.ERROR):
        answer = server.call("POST", "/v1/score", frame(0, 2, 3))
    assert answer.status == 500
    assert answer.error.startswith(message)
    assert "secret" not in answer.error
    assert caplog.text.count("Traceback") == 1
    assert str(error) in caplog.text
    model.model._pass = own
    scores, _ = decode_scores(server.call("POST", "/v1/score", frame(0, 2, 3)).body)
    assert scores.logps is not None
    assert len(scores.logps) == 3
    server.wait_until_idle()


def test_a_failure_frees_what_the_model_held(live, load_served, model_folder, frame):
    """Else the next pass would run out of memory as well."""
    model = load_served(model_folder(0))
    server, tensors = live(model), []

    def fail(asked):
        large = torch.zeros(1000)
        tensors.append(weakref.ref(large))
        raise torch.OutOfMemoryError("no more")

    model.model._pass = fail
    logging.disable()  # pytest keeps what is logged
    gc.disable()
    try:
        for seed in range(3):
            assert server.call("POST", "/v1/score", frame(seed, 2, 3)).status == 500
        deadline = time.monotonic() + 20  # the model's thread is just leaving the failed pass
        while any(tensor() is not None for tensor in tensors):
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        gc.enable()
        logging.disable(logging.NOTSET)


def test_a_head_that_breaks_off(live, load_served, model_folder, monkeypatch, caplog):
    """Half an answer must not be followed by an error that looks like its rest."""
    model = load_served(model_folder(0))
    server = live(model)

    class Broken:
        num_bytes = 1000

        def __iter__(self):
            yield b"x" * 10
            raise RuntimeError("gone")

    monkeypatch.setattr("opd.teachers.server.app.encode_head", lambda *_: Broken())
    connection = server.connect()
    connection.request("GET", f"/v1/heads/{model.head_id}")
    with connection.getresponse() as response, pytest.raises(Exception, match="IncompleteRead"):
        response.read()
    connection.close()
    assert "gone" in caplog.text
    assert server.call("GET", "/health").status == 200


def test_errors_are_json_of_one_line(live, frame):
    server = live()
    for answer in (
        server.call("POST", "/v1/score", b""),
        server.call("POST", "/v1/score", frame(0, 2, 3).replace(b'"protocol":"1"', b'"protocol":"2"')),
        server.call("GET", "/v1/score"),
        server.call("GET", "/v1/heads/../../etc/passwd"),
        server.call("DELETE", "/v1/streams/" + "x" * 65),
    ):
        assert 400 <= answer.status < 500
        assert answer.headers["Content-Type"].startswith("application/json")
        assert list(json.loads(answer.body)) == ["error"]
        assert answer.error
