"""Teacher servers on micro models, in this process and behind real HTTP on a loopback port."""

import asyncio
import http.client
import json
import threading
import time
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from aiohttp import web
from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

from opd.records import ScoreRequest, Scores
from opd.teachers.server.app import Limits, TeacherServer
from opd.teachers.server.model import ServedModel
from opd.teachers.server.options import ServeOptions, bind
from opd.teachers.wire import Asked, decode_score_request, encode_score_request, encode_scores


@dataclass
class Answer:
    """What came back over HTTP."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def error(self) -> str:
        """The one line of an error."""
        message = json.loads(self.body)["error"]
        assert "\n" not in message
        assert "Traceback" not in message
        return message


@dataclass
class Live:
    """A running server and a client of it."""

    server: TeacherServer
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.new_event_loop)
    stopped: bool = False

    def start(self) -> None:
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.do(self.server.start(bind("127.0.0.1", 0, has_token=False)))

    def do(self, work):
        """What a coroutine gives in the server's loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(60)

    def stop(self, grace_s: float = 30.0) -> bool:
        self.stopped = True
        ended = self.do(self.server.stop(grace_s))
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(10)
        self.loop.close()
        return ended

    def wait_until_idle(self) -> None:
        """Until nothing is held for a client; places are given back just after the last byte of an answer."""
        admission, deadline = self.server.admission, time.monotonic() + 20
        while admission.num_tokens or admission.num_bytes or admission.num_accepted:
            assert time.monotonic() < deadline
            time.sleep(0.002)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.port}"

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=60)

    def call(self, method: str, path: str, body=None, connection=None, **headers) -> Answer:
        """One request, over a connection of its own unless one is given."""
        used = connection or self.connect()
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        try:
            used.request(method, path, body=body, headers=named)
            response = used.getresponse()
            return Answer(response.status, dict(response.headers), response.read())
        finally:
            if connection is None:
                used.close()

    def value(self, name: str) -> float:
        """A metric without labels, or with those given in the name."""
        lines = self.call("GET", "/metrics").body.decode().splitlines()
        return next(float(line.rpartition(" ")[2]) for line in lines if line.rpartition(" ")[0] == name)


@pytest.fixture(scope="session")
def load_served():
    """`load_served(folder, **options)`: a model as a server holds it."""

    def load(folder, **options) -> ServedModel:
        return ServedModel.load(ServeOptions(str(folder), device="cpu", **options))

    return load


@pytest.fixture(scope="session")
def moe_folder(micro_tokenizer, tmp_path_factory):
    """A Qwen2-MoE model with random weights: three of six experts for each token, and a shared one."""
    config = Qwen2MoeConfig(
        vocab_size=45,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=24,
        num_experts=6,
        num_experts_per_tok=3,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.2,
        eos_token_id=2,
    )
    folder = tmp_path_factory.mktemp("moe")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        Qwen2MoeForCausalLM(config).save_pretrained(folder)
    micro_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def served(model_folder, load_served):
    """One model that the servers of many tests hold one after another."""
    return load_served(model_folder(0))


@pytest.fixture
def live(served):
    """`live(model=served, token=None, **limits)`: a running server; those that still run are stopped afterwards."""
    started: list[Live] = []

    def start(model=served, token=None, **limits) -> Live:
        one = Live(TeacherServer(model, token=token, limits=Limits(**limits)))
        one.start()
        started.append(one)
        return one

    yield start
    for one in started:
        if not one.stopped:
            one.stop(grace_s=5.0)


@pytest.fixture(scope="session")
def ask(vocab):
    """`ask(seed, context, sampled, model="base", **wanted)`: a question about so many random tokens."""

    def build(seed: int, context: int, sampled: int, model: str = "base", **wanted) -> Asked:
        rng = np.random.default_rng(seed)
        ids = rng.integers(3, vocab, context + sampled).astype(np.int32)
        return Asked(ScoreRequest(ids[:context], ids[context:], **wanted), vocab, -30.0, model)

    return build


@pytest.fixture(scope="session")
def frame(ask):
    """`frame(...)`: such a question as a frame."""

    def build(*args, **wanted) -> bytes:
        return encode_score_request(ask(*args, **wanted))

    return build


class Faulty:
    """A teacher server that answers by rule and fails on demand, in a loop and a thread of its own.

    `faults` are taken one by one by the next score requests; with none left, `always` is. None is a right answer.
    """

    def __init__(self) -> None:
        self.port, self.weights, self.healthy, self.token = 0, "ab" * 16, True, None
        self.faults: list[str | None] = []
        self.always: str | None = None
        self.poison: bytes | None = None  # a body that always gets a malformed answer
        self.asked: list[Asked] = []  # every score request that came whole
        self.answered: list[Asked] = []  # those that were answered well
        self.closed: list[str] = []  # streams
        self.under_way = self.most_under_way = self.num_probes = 0
        self.info_changes: dict | str = {}  # a text stands for the whole
        self._loop = asyncio.new_event_loop()
        self._release: asyncio.Event
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        self._do(self._start())

    def stop(self) -> None:
        """Like a kill: connections end, the port is refused."""
        self._do(self._runner.cleanup())

    def end(self) -> None:
        self.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def release(self) -> None:
        """Lets what hangs go on."""
        self._loop.call_soon_threadsafe(self._release.set)

    def _do(self, work):
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    async def _start(self) -> None:
        app = web.Application(client_max_size=2**28)
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/info", self._info)
        app.router.add_post("/v1/score", self._score)
        app.router.add_delete("/v1/streams/{name}", self._delete)
        self._release = asyncio.Event()
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def _health(self, request: web.Request) -> web.Response:
        self.num_probes += 1
        return web.json_response({}, status=200 if self.healthy else 503)

    async def _info(self, request: web.Request) -> web.Response:
        if self.token is not None and request.headers.get("Authorization") != f"Bearer {self.token}":
            return web.json_response({"error": "give the server's token"}, status=401)
        if isinstance(self.info_changes, str):
            return web.Response(text=self.info_changes)
        limits = {"body_bytes": 2**20}
        info = {"protocol": 1, "models": {"base": {"weights": self.weights}}, "tokens": "cd" * 16, "num_tokens": 38}
        info |= {"rows": 45, "head": "ef" * 16, "eos_ids": [2], "max_context": 512, "limits": limits}
        return web.json_response(info | self.info_changes)

    async def _delete(self, request: web.Request) -> web.Response:
        self.closed.append(request.match_info["name"])
        return web.Response(status=204)

    async def _score(self, request: web.Request) -> web.StreamResponse:
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        try:
            body = await request.read()
            asked = decode_score_request(body)
            self.asked.append(asked)
            fault = self.faults.pop(0) if self.faults else "nan" if body == self.poison else self.always
            kind, _, value = (fault or "").partition(":")
            if kind in ("slow", "hang"):
                await asyncio.sleep(float(value)) if kind == "slow" else await self._release.wait()
                kind = ""
            if kind == "reset":
                assert request.transport is not None
                request.transport.abort()
                await asyncio.sleep(60)
            response = await self._broken(request, asked, kind, value) if kind else None
            if response is None:
                self.answered.append(asked)
                response = web.Response(body=encode_scores(rule(asked.request), self.weights))
            return response
        finally:
            self.under_way -= 1

    async def _broken(self, request: web.Request, asked: Asked, kind: str, value: str) -> web.StreamResponse:
        right, transport = rule(asked.request), request.transport
        assert right.logps is not None
        assert transport is not None
        if kind == "status":
            return web.json_response({"error": "as it was told"}, status=int(value))
        if kind == "busy":
            return web.json_response({"error": "busy"}, status=503, headers={"Retry-After": value} if value else {})
        if kind == "redirect":
            return web.Response(status=307, headers={"Location": "/v1/score"})
        if kind == "weights":
            return web.Response(body=encode_scores(right, "99" * 16))
        if kind == "nan":
            return web.Response(body=encode_scores(replace(right, logps=right.logps * np.nan), self.weights))
        if kind == "short":
            return web.Response(body=encode_scores(replace(right, logps=right.logps[1:]), self.weights))
        if kind == "long":
            return web.Response(body=b"x" * 10**6)
        if kind == "endless":
            response = web.StreamResponse()
            await response.prepare(request)
            while True:
                await response.write(b"x" * 2**16)
        if kind == "garbage":
            return web.Response(body=b"<html>no frame</html>")
        if kind == "nohttp":
            transport.write(b"\x00\xff what is this\r\n\r\n")
            transport.close()
            await asyncio.sleep(60)
        assert kind == "truncated"
        response = web.StreamResponse(headers={"Content-Length": "1000"})
        await response.prepare(request)
        await response.write(b"x" * 100)
        transport.close()
        return response


def rule(request: ScoreRequest) -> Scores:
    """The scores of a `Faulty`: no two requests of the tests have the same."""
    total = int(np.asarray(request.context_ids, np.int64).sum()) + 100 * request.keep_tokens
    return Scores(logps=-(np.asarray(request.token_ids) + total / 1000).astype(np.float32) / 50)


@pytest.fixture
def faulty():
    """`faulty(always=None, **attributes)`: such a server, which runs until the test ends."""
    started: list[Faulty] = []

    def start(always=None, **attributes) -> Faulty:
        one = Faulty()
        one.always = always
        for name, value in attributes.items():
            setattr(one, name, value)
        one.start()
        started.append(one)
        return one

    yield start
    for one in started:
        one.end()


@pytest.fixture(scope="session")
def by_rule():
    """`by_rule(request)`: the scores of a `Faulty`."""
    return rule
