"""What a server takes on: sizes, the queue, clients that leave, and draining."""

import asyncio
import gzip
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from http.client import IncompleteRead

import numpy as np
import pytest

from opd.records import SampleRequest, Sampling
from opd.teachers.server import gate as server_gate
from opd.teachers.wire import encode_sample_request, encode_score_request


class Held:
    """Answers of a model that wait until they are let go."""

    def __init__(self, model) -> None:
        self._own, self._go, self.num_begun, self.num_cancelled = model.score, threading.Event(), 0, 0

    async def score(self, asked):
        self.num_begun += 1
        try:
            while not self._go.is_set():
                await asyncio.sleep(0.005)
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        return await self._own(asked)

    def let_go(self) -> None:
        self._go.set()


@pytest.fixture
def held(served, monkeypatch):
    """The served model's answers, held."""
    one = Held(served)
    monkeypatch.setattr(served, "score", one.score)
    yield one
    one.let_go()


@pytest.fixture
def posts():
    """`posts(server, *frames)`: futures of the answers to frames sent at once."""
    with ThreadPoolExecutor(16) as pool:
        yield lambda server, *frames: [pool.submit(server.call, "POST", "/v1/score", one) for one in frames]


def wait_until(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_over_the_limit(live, frame, chunked):
    server = live(body_bytes=4096)
    body = b"x" * 5000
    answer = server.call("POST", "/v1/score", iter([body[:3000], body[3000:]]) if chunked else body)
    assert answer.status == 413
    assert "4096" in answer.error
    assert server.call("POST", "/v1/generate", body).status == 413
    exact = frame(0, 2, 3)
    assert server.call("POST", "/v1/score", iter([exact[:50], exact[50:]]) if chunked else exact).status == 200
    server.wait_until_idle()


def test_a_huge_announced_body_is_refused_before_it_comes(live):
    connection = live().connect()
    connection.putrequest("POST", "/v1/score")
    connection.putheader("Content-Length", str(10**15))
    connection.endheaders()
    assert connection.getresponse().status == 413
    connection.close()


def test_a_body_is_counted_as_it_unpacks(live):
    server, packed = live(body_bytes=2**20), gzip.compress(bytes(2**25))
    assert len(packed) < 2**20
    assert server.call("POST", "/v1/score", packed, **{"Content-Encoding": "gzip"}).status == 413
    assert server.server.admission.num_bytes == 0


def test_an_answer_over_the_limit(live, frame):
    server = live(body_bytes=4096)
    assert server.call("POST", "/v1/score", frame(0, 2, 20, k=20)).status == 200  # 20 * 8 * 21
    large = server.call("POST", "/v1/score", frame(0, 2, 20, k=30))
    assert large.status == 413
    assert "answer" in large.error
    assert server.call("POST", "/v1/score", frame(0, 2, 32, hidden=True)).status == 200  # 32 * 32 * 4
    assert server.call("POST", "/v1/score", frame(0, 2, 33, hidden=True)).status == 413
    sampled = SampleRequest(np.array([1], np.int32), 0, 40, Sampling(num_topk=30))
    assert server.call("POST", "/v1/generate", encode_sample_request(sampled)).status == 413


IDS = np.zeros((3, 39), np.int32)
IMPOSSIBLE = {
    "model": ({"model": "math"}, {}, "'math' is not served here, only base"),
    "vocab": ({"vocab": 46}, {}, "46 ids, but the model's output head has 45 rows"),
    "k": ({}, {"k": 39}, "k: 39 of each token"),
    "ids": ({}, {"ids": IDS}, "ids: 39 of each token"),
    "context": ({}, {"context_ids": np.full(510, 3, np.int32)}, "513 tokens, but the model's context holds 512"),
    "stream": ({}, {"stream": "s", "keep_tokens": 600}, "605 tokens, but the model's context holds 512"),
}


@pytest.mark.parametrize(("fields", "wanted", "message"), IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_what_the_model_cannot_score(live, ask, fields, wanted, message):
    server, asked = live(), ask(0, 2, 3)
    asked = replace(asked, request=replace(asked.request, **wanted), **fields)
    answer = server.call("POST", "/v1/score", encode_score_request(asked))
    assert answer.status == 400
    assert message in answer.error


SAMPLES = {
    "model": ({}, "math", "'math' is not served"),
    "ids": ({"context_ids": np.array([38], np.int32)}, "base", "id 38, but the model knows those below 38"),
    "length": ({"max_new_tokens": 512}, "base", "513, but the model's context holds 512"),
    "topk": ({"sampling": Sampling(num_topk=39)}, "base", "num_topk: 39"),
}


@pytest.mark.parametrize(("fields", "model", "message"), SAMPLES.values(), ids=SAMPLES)
def test_what_the_model_cannot_sample(live, fields, model, message):
    asked = replace(SampleRequest(np.array([1], np.int32), 0, 4, Sampling()), **fields)
    answer = live().call("POST", "/v1/generate", encode_sample_request(asked, model))
    assert answer.status == 400
    assert message in answer.error


def test_a_full_queue_says_come_again(live, frame, held, posts):
    server = live(queue_tokens=20)
    first, second = posts(server, frame(0, 5, 5), frame(1, 5, 5))
    wait_until(lambda: server.server.admission.num_tokens == 20)
    assert server.value("opd_outstanding_tokens") == 20
    refused = server.call("POST", "/v1/score", frame(2, 1, 0))
    assert (refused.status, refused.headers["Retry-After"]) == (503, "1")
    assert "20 tokens are waiting" in refused.error
    sampled = SampleRequest(np.array([1], np.int32), 0, 4, Sampling())
    assert server.call("POST", "/v1/generate", encode_sample_request(sampled)).status == 503
    assert held.num_begun == 2
    held.let_go()
    assert [first.result().status, second.result().status] == [200, 200]
    assert server.call("POST", "/v1/score", frame(2, 1, 0)).status == 200
    never = server.call("POST", "/v1/score", frame(2, 11, 10))
    assert never.status == 413
    assert "the server's queue takes 20" in never.error
    server.wait_until_idle()


def test_bytes_held_are_bounded(live, frame, held, posts, monkeypatch):
    monkeypatch.setattr("opd.teachers.server.base.HELD_BODIES", 3)
    server = live(body_bytes=4096)
    accepted = posts(server, *(frame(i, 2, 20, k=20) for i in range(3)))  # 3360 bytes of answer each
    wait_until(lambda: server.server.admission.num_accepted == 3)
    refused = server.call("POST", "/v1/score", frame(3, 2, 20, k=20))
    assert (refused.status, refused.headers["Retry-After"]) == (503, "1")
    held.let_go()
    assert {one.result().status for one in accepted} == {200}
    server.wait_until_idle()


def test_a_client_that_leaves_frees_its_place(live, frame, held, caplog):
    server = live(queue_tokens=10)
    connection = server.connect()
    connection.request("POST", "/v1/score", frame(0, 5, 5))
    wait_until(lambda: held.num_begun == 1)
    connection.close()
    server.wait_until_idle()
    assert held.num_cancelled == 1
    assert server.value('opd_requests_total{route="/v1/score",status="499"}') == 1
    held.let_go()
    assert server.call("POST", "/v1/score", frame(1, 5, 5)).status == 200
    assert caplog.records == []


def test_a_place_is_held_as_long_as_the_model_works_on_it(live, load_served, model_folder, frame):
    model = load_served(model_folder(0))
    server, own = live(model), model.model._pass
    entered, go = threading.Event(), threading.Event()

    def slow(asked):
        entered.set()
        assert go.wait(30)
        return own(asked)

    model.model._pass = slow
    connection = server.connect()
    connection.request("POST", "/v1/score", frame(0, 5, 5))
    assert entered.wait(30)
    connection.close()
    time.sleep(0.1)
    assert server.server.admission.num_tokens == 10
    go.set()
    server.wait_until_idle()
    assert server.call("POST", "/v1/score", frame(1, 5, 5)).status == 200


def test_a_client_that_leaves_in_the_middle_of_a_body(live, frame):
    server, body = live(), frame(0, 5, 5)
    connection = server.connect()
    connection.putrequest("POST", "/v1/score")
    connection.putheader("Content-Length", str(len(body)))
    connection.endheaders(body[:100])
    wait_until(lambda: server.server.admission.num_bytes == 100)
    assert server.server.admission.num_accepted == 0
    connection.close()
    server.wait_until_idle()


def test_a_body_that_stalls(live, monkeypatch):
    monkeypatch.setattr(server_gate, "STALL_S", 0.05)
    connection = live().connect()
    connection.putrequest("POST", "/v1/score")
    connection.putheader("Content-Length", "100")
    connection.endheaders(b"x")
    assert connection.getresponse().status == 408
    connection.close()


def test_a_client_that_does_not_take_its_answer(live, served, frame, monkeypatch, caplog):
    async def large(asked):
        return b"x" * 2**26

    monkeypatch.setattr("opd.teachers.server.app.SEND_S", 0.2)
    monkeypatch.setattr(served, "score", large)
    server = live()
    connection = server.connect()
    connection.request("POST", "/v1/score", frame(0, 5, 5))
    wait_until(lambda: server.server.admission.num_accepted == 1)
    server.wait_until_idle()
    with connection.getresponse() as response, pytest.raises((IncompleteRead, ConnectionError)):
        response.read()
    connection.close()
    assert caplog.records == []
    monkeypatch.setattr("opd.teachers.server.app.SEND_S", 60.0)
    assert len(server.call("POST", "/v1/score", frame(0, 5, 5)).body) == 2**26


def test_draining_answers_what_was_accepted(live, frame, held, posts):
    server = live()
    accepted = posts(server, *(frame(i, 3, 4) for i in range(8)))
    wait_until(lambda: server.server.admission.num_accepted == 8)
    stopping = asyncio.run_coroutine_threadsafe(server.server.stop(20.0), server.loop)
    wait_until(lambda: server.server.admission.draining)
    health = server.call("GET", "/health")
    assert (health.status, health.body) == (503, b'{"status": "draining"}')
    refused = server.call("POST", "/v1/score", frame(9, 3, 4))
    assert (refused.status, refused.headers["Retry-After"], refused.error) == (503, "1", "the server is shutting down")
    assert server.call("GET", "/v1/info").status == 200
    held.let_go()
    assert [one.result().status for one in accepted] == [200] * 8
    assert stopping.result(20) is True
    with pytest.raises(ConnectionRefusedError):
        server.call("GET", "/health")
    server.stopped = True
    server.loop.call_soon_threadsafe(server.loop.stop)


def test_the_grace_period_is_bounded(live, load_served, model_folder, frame, caplog, monkeypatch):
    """A pass that never ends: the server gives up, and says that its thread has not ended."""
    monkeypatch.setattr("opd.teachers.server.base.CLOSE_S", 0.1)
    model = load_served(model_folder(0))
    server, go = live(model), threading.Event()
    model.model._pass = lambda asked: go.wait(30) and [None]
    connection = server.connect()
    connection.request("POST", "/v1/score", frame(0, 5, 5))
    wait_until(lambda: server.server.admission.num_accepted == 1)
    begin = time.monotonic()
    assert server.stop(grace_s=0.1) is False
    assert time.monotonic() - begin < 10
    assert "1 requests were not answered within 0.1 s" in caplog.text
    go.set()
    connection.close()
