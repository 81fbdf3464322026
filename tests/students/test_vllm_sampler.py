"""The vLLM sampler against a server that answers as vLLM 0.32 does: `vllm_answers.json` was recorded from one (SmolLM2)."""

import asyncio
import copy
import json
import socket
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from opd.errors import UserError
from opd.records import SampleRequest, Sampling, Turn
from opd.students import vllm_sampler
from opd.students.vllm_sampler import VLLMSampler

RECORDED = json.loads(Path(__file__).with_name("vllm_answers.json").read_text("utf-8"))
EOS = (2, 7)
CONTEXT = np.array(RECORDED["eos"]["choices"][0]["prompt_token_ids"], np.int32)
IDS = RECORDED["eos"]["choices"][0]["token_ids"]
LOGPS = RECORDED["eos"]["choices"][0]["logprobs"]["token_logprobs"]
PLAIN, GREEDY = Sampling(), Sampling(temperature=0.0)


class Stub:
    """A server with one turn to say, whole or up to the limit asked for. `faults` come before answers, one a request."""

    def __init__(self, tokenizer) -> None:
        self.tokenizer = tokenizer
        self.models = copy.deepcopy(RECORDED["models"])
        self.processed = False  # started with --logprobs-mode processed_logprobs
        self.cap = 1000  # a limit of its own on the tokens of a turn
        self.edit = lambda answer: answer
        self.faults: list[Any] = []
        self.asked: list[dict[str, Any]] = []  # bodies of completions
        self.headers: list[Any] = []
        self.free = asyncio.Event()
        self.free.set()
        self.running = self.most_running = self.aborted = 0

    async def list_models(self, request: web.Request) -> web.Response:
        self.headers.append(request.headers)
        return web.json_response(self.models)

    async def tokenize(self, request: web.Request) -> web.Response:
        body = await request.json()
        assert body["add_special_tokens"] is False
        ids = self.tokenizer(body["prompt"], add_special_tokens=False)["input_ids"]
        return web.json_response(RECORDED["tokenize"] | {"tokens": ids, "count": len(ids)})

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.asked.append(body)
        fault = self.faults.pop(0) if self.faults else None
        if fault == "reset":
            assert request.transport is not None
            request.transport.abort()
        elif isinstance(fault, tuple):
            return web.json_response(fault[1], status=fault[0])
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await self.free.wait()
        except asyncio.CancelledError:
            self.aborted += 1
            raise
        finally:
            self.running -= 1
        return web.json_response(self.edit(self.answer(body)))

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        n = min(body["max_tokens"], self.cap)
        answer = copy.deepcopy(RECORDED["eos" if n >= len(IDS) else "length"])
        (choice,) = answer["choices"]
        choice["token_ids"], choice["prompt_token_ids"] = IDS[:n], body["prompt"]
        choice["logprobs"]["token_logprobs"] = [0.0] * n if self.processed and body["top_k"] == 1 else LOGPS[:n]
        if body["logprobs"] is None:
            choice["logprobs"] = None
        return answer

    @asynccontextmanager
    async def serve(self):
        """Its address."""
        app = web.Application()
        app.router.add_get("/v1/models", self.list_models)
        app.router.add_post("/tokenize", self.tokenize)
        app.router.add_post("/v1/completions", self.complete)
        # as uvicorn under vLLM: a handler ends when its client is gone
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        assert site._server is not None
        try:
            yield f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"  # type: ignore[attr-defined]
        finally:
            await runner.cleanup()


@pytest.fixture
def stub(micro_tokenizer, monkeypatch):
    monkeypatch.setattr(vllm_sampler, "pause_s", lambda num_failures: 0.001)
    return Stub(micro_tokenizer)


def request(n: int = 64, sampling: Sampling = PLAIN, seed: int = 2**62) -> SampleRequest:
    return SampleRequest(CONTEXT, seed, n, sampling)


async def turn_of(sampler: VLLMSampler, asked: SampleRequest) -> Turn:
    async with aclosing(sampler.generate(asked)) as stream:  # type: ignore[type-var]
        return Turn.of(asked.context_ids, [chunk async for chunk in stream])


def turns(stub: Stub, *asked: SampleRequest, eos=EOS, **options) -> list[Turn]:
    async def run() -> list[Turn]:
        async with stub.serve() as url, VLLMSampler(url, stub.tokenizer, eos, **options) as sampler:
            found = await asyncio.gather(*(turn_of(sampler, one) for one in asked))
            assert not sampler.busy
            return found

    return asyncio.run(run())


def refusal(stub: Stub, *asked: SampleRequest, **options) -> str:
    with pytest.raises(UserError) as info:
        turns(stub, *asked, **options)
    assert "\n" not in str(info.value)
    return str(info.value)


def test_a_turn_that_ends(stub):
    (turn,) = turns(stub, request(), logps=True)
    assert turn.finish == "eos"
    assert turn.sampled_ids.tolist() == IDS
    assert IDS[-1] == 2  # a sampled EOS is part of the turn
    assert turn.sampled_ids.dtype == np.int32
    np.testing.assert_array_equal(turn.sampler_logps, np.array(LOGPS, np.float32))


@pytest.mark.parametrize(("n", "finish"), [(5, "length"), (len(IDS) - 1, "length"), (len(IDS), "eos")])
def test_a_turn_at_its_limit(stub, n, finish):
    (turn,) = turns(stub, request(n))
    assert turn.finish == finish
    assert turn.sampled_ids.tolist() == IDS[:n]


def test_every_parameter_is_sent(stub):
    sampling = Sampling(temperature=0.7, top_p=0.9, top_k=40, presence_penalty=2.0)
    turns(stub, request(9, sampling), request(4, GREEDY, seed=3))
    common = {"model": "smollm2", "prompt": CONTEXT.tolist(), "stop_token_ids": [2, 7], "ignore_eos": True}
    common |= {"min_p": 0.0, "repetition_penalty": 1.0, "frequency_penalty": 0.0, "logprobs": None, "return_token_ids": True}
    drawn = {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "presence_penalty": 2.0, "max_tokens": 9, "seed": 2**62}
    greedy = {"temperature": 0.0, "top_p": 1.0, "top_k": -1, "presence_penalty": 0.0, "max_tokens": 4, "seed": 3}
    assert sorted(stub.asked, key=lambda body: body["seed"]) == [common | greedy, common | drawn]


def test_logps_are_zero_unless_asked_for_and_when_greedy(stub):
    (turn,) = turns(stub, request(5))
    np.testing.assert_array_equal(turn.sampler_logps, np.zeros(5, np.float32))
    (turn,) = turns(stub, request(5, GREEDY), logps=True)
    np.testing.assert_array_equal(turn.sampler_logps, np.zeros(5, np.float32))
    assert [body["logprobs"] for body in stub.asked] == [None, 0, None]  # the second looks which log-probs it gets


@pytest.mark.parametrize(
    "sampling", [Sampling(temperature=0.7), Sampling(top_k=3), Sampling(top_p=0.9), Sampling(presence_penalty=1.0)], ids=str
)
def test_other_logps_than_those_sampled_from_are_refused(stub, sampling):
    assert "--logprobs-mode processed_logprobs" in refusal(stub, request(5, sampling), logps=True)
    stub.processed = True
    turns(stub, request(5, sampling), logps=True)


@pytest.mark.parametrize(
    "fault",
    [(500, {"error": {"message": "dead", "code": 500}}), (503, "busy"), (429, {}), (408, None), "reset"],
    ids=["500", "503", "429", "408", "reset"],
)
def test_a_failed_attempt_is_repeated(stub, fault):
    stub.faults = [fault] * 3
    (turn,) = turns(stub, request())
    assert turn.sampled_ids.tolist() == IDS
    assert len(stub.asked) == 4
    assert stub.asked[0] == stub.asked[3]


def test_attempts_are_bounded(stub):
    stub.faults = [(500, {"error": {"message": "EngineCore\nis dead", "code": 500}}), *["reset"] * 100]
    message = refusal(stub, request())
    assert len(stub.asked) == vllm_sampler.TRIES
    assert "--url: http://127.0.0.1:" in message
    assert "it answers 500: EngineCore is dead, then " in message  # the first failure says most
    assert "vllm serve" in message


def test_a_dead_server(stub):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"

        async def run():
            async with VLLMSampler(url, stub.tokenizer, EOS):
                raise AssertionError

        with pytest.raises(UserError, match=f"^--url: {url} gave no answer .*start it"):
            asyncio.run(run())


def test_the_deadline(stub):
    stub.free.clear()
    assert "nothing within 0.3 s" in refusal(stub, request(), deadline_s=0.3)
    assert len(stub.asked) == 1


@pytest.mark.parametrize("kind", ["out_of_vocabulary", "unknown_model"])
def test_what_the_server_refuses_is_passed_on(stub, kind):
    error = RECORDED[kind]["error"]
    stub.faults = [(error["code"], RECORDED[kind])]
    assert f"answers {error['code']}: {error['message']}" in refusal(stub, request())
    assert len(stub.asked) == 1  # never repeated


def test_a_cancelled_turn_is_aborted_on_the_server(stub):
    async def run():
        stub.free.clear()
        async with stub.serve() as url, VLLMSampler(url, stub.tokenizer, EOS) as sampler:
            turn = asyncio.create_task(turn_of(sampler, request()))
            async with asyncio.timeout(10):
                while not stub.running:
                    await asyncio.sleep(0.01)
                assert sampler.busy
                turn.cancel()
                while not stub.aborted:
                    await asyncio.sleep(0.01)
            assert not sampler.busy
            await asyncio.gather(turn, return_exceptions=True)
            assert turn.cancelled()

    asyncio.run(run())


def test_only_so_many_turns_are_in_flight(stub):
    async def run():
        stub.free.clear()
        async with stub.serve() as url, VLLMSampler(url, stub.tokenizer, EOS, max_in_flight=3) as sampler:
            work = [asyncio.create_task(turn_of(sampler, request(4, seed=i))) for i in range(10)]
            await asyncio.sleep(0.2)
            assert stub.running == 3
            stub.free.set()
            await asyncio.gather(*work)

    asyncio.run(run())
    assert stub.most_running == 3
    assert sorted(body["seed"] for body in stub.asked) == list(range(10))


def test_another_tokenizer(stub, micro_tokenizer):
    class Shifted:
        def __call__(self, text, **options):
            return {"input_ids": [i + 1 for i in micro_tokenizer(text, **options)["input_ids"]]}

    stub.tokenizer = Shifted()

    async def run():
        async with stub.serve() as url, VLLMSampler(url, micro_tokenizer, EOS):
            raise AssertionError

    with pytest.raises(UserError, match="another tokenizer"):
        asyncio.run(run())


def test_which_model_is_asked(stub):
    (card,) = stub.models["data"]
    stub.models["data"].append(card | {"id": "adapter", "max_model_len": None})
    assert "serves smollm2, adapter; name one" in refusal(stub)
    assert "serves no 'other', only smollm2, adapter" in refusal(stub, served_as="other")
    turns(stub, request(4), served_as="adapter")
    assert stub.asked[-1]["model"] == "adapter"


@pytest.mark.parametrize("models", [[], {}, {"data": []}, {"data": [{"id": "gpt"}]}, {"data": ["gpt"]}], ids=str)
def test_what_is_no_vllm_server(stub, models):
    stub.models = models
    assert "is no vLLM server" in refusal(stub)


def test_more_tokens_than_the_server_takes(stub):
    turns(stub, request(1024 - len(CONTEXT)))
    message = refusal(stub, request(1025 - len(CONTEXT)))
    assert "takes 1024 tokens and a prompt with its completion may have 1025" in message
    assert len(stub.asked) == 1  # the server would have cut the turn in silence


def without(name: str):
    def edit(answer: dict[str, Any]) -> dict[str, Any]:
        answer["choices"][0][name] = None
        return answer

    return edit


@pytest.mark.parametrize("edit", [without("token_ids"), without("prompt_token_ids"), without("logprobs"), lambda answer: {}])
def test_answers_that_are_of_no_use(stub, edit):
    stub.edit = edit
    assert "no usable ids" in refusal(stub, request(), logps=True)


def test_another_prompt_than_it_was_sent(stub):
    def edit(answer):
        answer["choices"][0]["prompt_token_ids"].insert(0, 1)  # a BOS that nobody asked for
        return answer

    stub.edit = edit
    assert "another prompt" in refusal(stub, request())


def test_a_limit_of_the_servers_own_is_no_length(stub):
    stub.cap = 4
    assert "after 4 of 64 tokens, at no EOS (length)" in refusal(stub, request())


def test_an_eos_that_is_not_the_models_own_is_none(stub):
    with pytest.raises(UserError, match="at no EOS"):
        turns(stub, request(), eos=(7,))


def test_the_address_and_the_token(stub):
    async def run():
        async with stub.serve() as url, VLLMSampler(f"{url}/v1/", stub.tokenizer, EOS, token="secret") as sampler:
            assert (sampler.url, sampler.model, sampler.max_context) == (url, "smollm2", 1024)
            with pytest.raises(UserError, match="weights of its own"):
                sampler.sync(None, 1)  # type: ignore[arg-type]

    asyncio.run(run())
    assert stub.headers[0]["Authorization"] == "Bearer secret"
    with pytest.raises(UserError, match="--url: 'localhost:8077' must begin with http://"):
        VLLMSampler("localhost:8077", stub.tokenizer, EOS)
