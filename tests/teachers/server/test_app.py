"""Every route over real HTTP: what it answers, that it answers the same as the model in process, and who may ask."""

import asyncio
import itertools
import json
import threading
import time
from dataclasses import replace
from typing import Any

import aiohttp
import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, MistralConfig, MistralForCausalLM

from opd.models import load_causal_lm, output_head
from opd.records import SampleRequest, Sampling, Turn
from opd.students.hf_sampler import HFSampler
from opd.teachers.digest import tokens_digest, weights_digest
from opd.teachers.hf import HFModel, View
from opd.teachers.wire import (
    MEDIA_TYPE,
    decode_head,
    decode_scores,
    decode_turn,
    encode_sample_request,
    encode_score_request,
)


@pytest.fixture(scope="module")
def folder(model_folder):
    return model_folder(0)  # the same weights as those of `served`


@pytest.fixture
def in_process(folder):
    """A second copy of the served model."""
    return HFModel("--model", str(folder), device=torch.device("cpu"), chunk_bytes=2**20)


def compare(scores, expected):
    """Equal answers, up to rounding that depends on the batch."""
    assert scores.num_floored == expected.num_floored
    for name in ("logps", "topk_logps", "tail", "hidden"):
        ours, theirs = getattr(scores, name), getattr(expected, name)
        assert (ours is None) == (theirs is None), name
        if ours is not None:
            np.testing.assert_allclose(np.asarray(ours), np.asarray(theirs), rtol=0, atol=1e-5, err_msg=name)
    if expected.topk_ids is not None:
        np.testing.assert_array_equal(scores.topk_ids, expected.topk_ids)


def test_info(live, served, folder):
    info = live().call("GET", "/v1/info")
    assert info.status == 200
    assert info.headers["Content-Type"].startswith("application/json")
    answer = json.loads(info.body)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    digest = weights_digest(load_causal_lm(str(folder), "model"))
    assert answer == {
        "protocol": 1,
        "version": "0.1.0",
        "backend": "hf",
        "model": served.name,
        "models": {"base": {"weights": digest}},
        "tokens": tokens_digest(tokenizer.get_vocab()),
        "num_tokens": 38,
        "rows": 45,
        "head": served.head_id,
        "eos_ids": [2],
        "max_context": 512,
        "dtype": "float32",
        "cached_streams": True,
        "scores": {"hidden": True, "temperature": True, "ids": "exact", "max_k": None},
        "limits": {
            "body_bytes": 64 * 2**20,
            "batch_tokens": 16384,
            "queue_tokens": 2**20,
            "stream_bytes": 2 * 2**30,
        },
    }


def test_health_and_unknown_routes(live):
    server = live()
    assert (server.call("GET", "/health").status, server.call("GET", "/health").body) == (200, b'{"status": "ok"}')
    assert server.call("GET", "/v1/nothing").error == "Not Found"
    assert server.call("GET", "/v1/nothing").status == 404
    wrong = server.call("GET", "/v1/score")
    assert (wrong.status, wrong.error, wrong.headers["Allow"]) == (405, "Method Not Allowed", "POST")


def test_the_tokenizer_travels(live, folder, tmp_path):
    for name, text in json.loads(live().call("GET", "/v1/tokenizer").body).items():
        (tmp_path / name).write_text(text)
    ours, theirs = AutoTokenizer.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(folder)
    assert ours.get_vocab() == theirs.get_vocab()
    messages = [{"role": "user", "content": "abc"}]
    rendered = (tokenizer.apply_chat_template(messages, add_generation_prompt=True) for tokenizer in (ours, theirs))
    assert len({str(one) for one in rendered}) == 1


def test_the_head_travels(live, served, folder):
    server = live()
    answer = server.call("GET", f"/v1/heads/{served.head_id}")
    assert (answer.status, answer.headers["Content-Type"]) == (200, MEDIA_TYPE)
    head, name = decode_head(answer.body)
    own = output_head(load_causal_lm(str(folder), "model"))
    assert (name, head.scale) == (served.head_id, own.scale)
    assert torch.equal(head.weight, own.weight)  # type: ignore
    only = server.call("HEAD", f"/v1/heads/{served.head_id}")
    assert (only.status, only.body, int(only.headers["Content-Length"])) == (200, b"", len(answer.body))
    assert server.call("GET", "/v1/heads/0123").status == 404
    assert served.head_id in server.call("GET", "/v1/heads/0123").error


KINDS = {
    "sampled": {},
    "topk": {"k": 5},
    "all": {"k": 38},
    "temperature": {"k": 3, "temperature": 0.7},
    "hidden": {"hidden": True},
}


@pytest.mark.parametrize("wanted", KINDS.values(), ids=KINDS)
def test_score(live, served, ask, in_process, wanted):
    asked = ask(1, 7, 12, **wanted)
    answer = live().call("POST", "/v1/score", encode_score_request(asked))
    assert (answer.status, answer.headers["Content-Type"]) == (200, MEDIA_TYPE)
    assert "Content-Encoding" not in answer.headers
    scores, weights = decode_scores(answer.body)
    assert weights == served.weights["base"]
    assert scores.head == (served.head_id if asked.request.hidden else None)
    compare(scores, *in_process.score_batch([(asked.request, View(38))]))


def test_given_ids_floor_and_nothing_to_score(live, ask, in_process):
    server = live()
    ids = np.arange(12, dtype=np.int32).reshape(4, 3)
    asked = replace(ask(2, 3, 4, k=2, ids=ids), logp_floor=-2.0)
    scores, _ = decode_scores(server.call("POST", "/v1/score", encode_score_request(asked)).body)
    expected = in_process.score_batch([(asked.request, View(38, -2.0))])[0]
    compare(scores, expected)
    assert scores.num_floored > 0
    assert server.value("opd_floored_logps_total") >= scores.num_floored
    nothing = ask(2, 3, 0)
    scores, _ = decode_scores(server.call("POST", "/v1/score", encode_score_request(nothing)).body)
    compare(scores, *in_process.score_batch([(nothing.request, View(38))]))


def test_streams(live, ask, in_process):
    """Appended, rewound, closed and lost."""
    server = live()
    before = server.value("opd_streams")  # other tests share the model
    whole = ask(3, 6, 10).request
    ids = np.concatenate([whole.context_ids, whole.token_ids])

    def append(keep, start, end):
        part = replace(whole, context_ids=ids[keep:start], token_ids=ids[start:end], stream="s-1", keep_tokens=keep)
        return server.call("POST", "/v1/score", encode_score_request(replace(ask(3, 1, 1), request=part)))

    expected = in_process.score_batch([(whole, View(38))])[0]
    for keep, start, end in ((0, 6, 9), (9, 9, 13), (11, 11, 16), (8, 10, 16)):
        scores, _ = decode_scores(append(keep, start, end).body)
        compare(scores, replace(expected, logps=expected.logps[start - 6 : end - 6]))
    assert server.value("opd_streams") == before + 1
    assert server.value("opd_stream_cache_bytes") > 0
    assert server.value("opd_stream_hits_total") >= 3
    assert server.call("DELETE", "/v1/streams/s-1").status == 204
    assert server.call("DELETE", "/v1/streams/s-1").status == 204
    assert server.value("opd_streams") == before
    lost = append(9, 9, 13)
    assert lost.status == 409
    assert "s-1" in lost.error
    assert append(0, 6, 9).status == 200
    assert server.call("DELETE", "/v1/streams/a%20b").status == 400
    server.call("DELETE", "/v1/streams/s-1")


def test_generate(live, served, folder, vocab):
    server = live()
    asked = SampleRequest(np.array([1, 5, 9], np.int32), seed=7, max_new_tokens=12, sampling=Sampling(num_topk=2))
    answer = server.call("POST", "/v1/generate", encode_sample_request(asked, "base"))
    assert answer.status == 200
    turn, weights = decode_turn(answer.body, asked.context_ids)
    assert weights == served.weights["base"]

    async def expected():
        sampler = HFSampler(load_causal_lm(str(folder), "model"), vocab, [2])
        return Turn.of(asked.context_ids, [chunk async for chunk in sampler.generate(asked)])

    own = asyncio.run(expected())
    np.testing.assert_array_equal(turn.sampled_ids, own.sampled_ids)
    np.testing.assert_allclose(turn.sampler_logps, own.sampler_logps, atol=1e-5)
    np.testing.assert_array_equal(turn.topk_ids, own.topk_ids)
    assert turn.finish == own.finish
    assert server.value("opd_sampled_tokens_total") >= len(turn.sampled_ids)


def test_a_model_that_only_scores(live, load_served, micro_model, micro_tokenizer, frame, tmp_path):
    """Windowed attention: neither the sampler's cache nor that of streams would be right."""
    plain = micro_model(0).config.to_dict() | {"sliding_window": 4}
    config = MistralConfig(**{name: value for name, value in plain.items() if name not in {"model_type", "architectures"}})
    MistralForCausalLM(config).save_pretrained(tmp_path)
    micro_tokenizer.save_pretrained(tmp_path)
    server = live(load_served(tmp_path))
    assert json.loads(server.call("GET", "/v1/info").body)["cached_streams"] is False
    asked = SampleRequest(np.array([1], np.int32), 0, 4, Sampling())
    for _ in range(2):
        refused = server.call("POST", "/v1/generate", encode_sample_request(asked, "base"))
        assert refused.status == 400
        assert "full attention" in refused.error
    assert server.call("POST", "/v1/score", frame(0, 2, 30)).status == 200


def test_metrics_count_and_hold_no_content(live, frame):
    server = live()
    before = server.value("opd_scored_tokens_total")
    for path, body in (("/v1/score", frame(0, 2, 9)), ("/v1/score", b"secret"), ("/v1/secret", b"")):
        server.call("POST", path, body)
    assert server.value('opd_requests_total{route="/v1/score",status="200"}') == 1
    assert server.value('opd_requests_total{route="/v1/score",status="400"}') == 1
    assert server.value('opd_requests_total{route="other",status="404"}') == 1
    assert server.value('opd_request_seconds_count{route="/v1/score"}') == 2
    assert server.value("opd_scored_tokens_total") == before + 9
    assert server.value("opd_outstanding_tokens") == server.value("opd_outstanding_bytes") == 0
    answer = server.call("GET", "/metrics")
    assert answer.headers["Content-Type"].startswith("text/plain")
    assert b"secret" not in answer.body


def mixed(ask, count):
    """Questions of every kind and of many lengths; every fifth belongs to a stream."""
    kinds = itertools.cycle([{}, {"k": 4}, {"hidden": True}, {"k": 2, "temperature": 0.7}, {"stream": True}, {"ids": True}])
    rng = np.random.default_rng(0)
    for seed, wanted in zip(range(count), kinds):
        context, sampled = int(rng.integers(1, 40)), int(rng.integers(1, 40))
        kind: dict[str, Any] = dict(wanted)
        if "stream" in kind:
            kind["stream"] = f"mixed-{seed}"
        if "ids" in kind:
            kind["ids"] = rng.integers(0, 38, (sampled, 3)).astype(np.int32)
        yield ask(seed, context, sampled, **kind)


def test_32_clients_get_the_answers_of_the_model_in_process(live, ask, in_process):
    server = live()
    questions = list(mixed(ask, 320))

    async def client(session, own):
        answers = []
        for asked in own:
            async with session.post(f"{server.url}/v1/score", data=encode_score_request(asked)) as response:
                assert response.status == 200
                answers.append(decode_scores(await response.read())[0])
        return answers

    async def clients():
        async with aiohttp.ClientSession() as session:
            return await asyncio.gather(*(client(session, questions[i::32]) for i in range(32)))

    answers = asyncio.run(clients())
    expected = in_process.score_batch([(asked.request, View(38)) for asked in questions])
    for i, asked in enumerate(questions):
        compare(answers[i % 32][i // 32], expected[i])
        if asked.request.stream:
            server.call("DELETE", f"/v1/streams/{asked.request.stream}")
    server.wait_until_idle()


def test_health_answers_and_requests_gather_while_a_pass_runs(live, load_served, model_folder, frame):
    model = load_served(model_folder(0))
    server, own = live(model), model.model._pass
    entered, go = threading.Event(), threading.Event()
    sizes = []

    def slow(asked):
        sizes.append(len(asked))
        entered.set()
        assert go.wait(30)
        return own(asked)

    model.model._pass = slow
    threads = [threading.Thread(target=server.call, args=("POST", "/v1/score", frame(i, 3, 4))) for i in range(9)]
    threads[0].start()
    assert entered.wait(30)
    for thread in threads[1:]:
        thread.start()
    while server.server.admission.num_accepted < 9:
        assert server.call("GET", "/health").status == 200
        time.sleep(0.01)
    go.set()
    for thread in threads:
        thread.join()
    assert sizes == [1, 8]


AUTHORIZATIONS = {
    "missing": {},
    "wrong": {"Authorization": "Bearer wrong"},
    "scheme": {"Authorization": "Basic s3cret-token"},
    "prefix": {"Authorization": "Bearer s3cret-toke"},
    "longer": {"Authorization": "Bearer s3cret-token0"},
    "empty": {"Authorization": "Bearer "},
    "bare": {"Authorization": "s3cret-token"},
    "bytes": {"Authorization": b"Bearer \xff\xfe"},
}
ROUTES = [
    ("GET", "/v1/info"),
    ("GET", "/v1/tokenizer"),
    ("GET", "/v1/heads/x"),
    ("POST", "/v1/score"),
    ("POST", "/v1/generate"),
    ("DELETE", "/v1/streams/x"),
    ("GET", "/metrics"),
    ("GET", "/nowhere"),
    ("PUT", "/v1/score"),
    ("GET", "/health/"),
    ("GET", "//health"),
]


@pytest.mark.parametrize("headers", AUTHORIZATIONS.values(), ids=AUTHORIZATIONS)
def test_every_route_but_health_wants_the_token(live, headers):
    server = live(token="s3cret-token")
    for method, path in ROUTES:
        answer = server.call(method, path, **headers)
        assert answer.status == 401, path
        assert answer.headers["WWW-Authenticate"] == "Bearer"
        assert "s3cret" not in answer.error
    assert server.call("GET", "/health", **headers).status == 200


def test_the_right_token(live, frame):
    server = live(token="s3cret-token")
    for scheme in ("Bearer", "bearer"):
        headers = {"Authorization": f"{scheme} s3cret-token"}
        assert server.call("GET", "/v1/info", **headers).status == 200
        assert server.call("POST", "/v1/score", frame(0, 2, 3), **headers).status == 200
        assert server.call("GET", "/v1/nothing", **headers).status == 404
