"""The rollout server over HTTP: weights come, turns go; what is wrong gets one line and changes nothing."""

import http.client
import json
import time

import numpy as np
import pytest

from opd.students.hf_sampler import HFSampler
from opd.students.noise import slot_seed
from opd.teachers.wire import decode_chunk, encode_sample_request
from tests.students.server.conftest import CONTEXT, request


def put(live, path, digest, **headers):
    return live.call("PUT", f"/v1/weights/{digest}", path.read_bytes(), **headers)


def frames(body):
    found, at = [], 0
    while at < len(body):
        length = int.from_bytes(body[at : at + 4], "little")
        if length:
            found.append(decode_chunk(body[at + 4 : at + 4 + length], 3))
        at += 4 + length
    return found


def sample(live, digest, asked):
    answer = live.call("POST", "/v1/sample", encode_sample_request(asked, digest))
    assert answer.status == 200, answer.body
    return frames(answer.body)


def test_turns_of_the_weights_that_were_sent(serve, weights, student, micro_tokenizer):
    path, digest = weights
    live = serve(chunk_tokens=3)
    assert put(live, path, digest).status == 204
    chunks = sample(live, digest, request(8))
    assert all(found == digest and chunk.version == 3 for chunk, found in chunks)
    ids = np.concatenate([chunk.sampled_ids for chunk, _ in chunks])
    assert len(chunks) == -(-len(ids) // 3)

    import asyncio

    async def here():
        sampler = HFSampler(student, 41, json.loads(live.call("GET", "/v1/info").body)["eos_ids"], chunk_tokens=3)
        return [chunk async for chunk in sampler.generate(request(8))]

    own = asyncio.run(here())
    np.testing.assert_array_equal(ids, np.concatenate([chunk.sampled_ids for chunk in own]))
    logps = np.concatenate([chunk.sampler_logps for chunk, _ in chunks])
    np.testing.assert_allclose(logps, np.concatenate([chunk.sampler_logps for chunk in own]), atol=1e-5)
    assert chunks[-1][0].finish == own[-1].finish
    assert live.value("opd_weight_syncs_total") == 1
    assert live.value("opd_sampled_tokens_total") == len(ids)


def test_a_turn_goes_on_with_the_same_noise(serve, weights):
    path, digest = weights
    live = serve()
    put(live, path, digest)
    seed = next(s for s in range(50) if len(sample(live, digest, request(8, seed=slot_seed(s)))[0][0].sampled_ids) == 8)
    whole = sample(live, digest, request(8, seed=slot_seed(seed)))[0][0]
    begun = np.concatenate([CONTEXT, whole.sampled_ids[:3]])
    rest = sample(live, digest, request(5, seed=slot_seed(seed), context_ids=begun, first=3))[0][0]
    np.testing.assert_array_equal(rest.sampled_ids, whole.sampled_ids[3:])


@pytest.mark.parametrize(
    ("spoil", "status", "message"),
    [
        (lambda body: body[:-1], 400, "do not have the digest by which they are named"),
        (lambda body: body + b"x", 400, "do not have the digest"),
        (lambda body: b"", 400, "do not have the digest"),
        (lambda body: b"x" * (40 * 2**20), 413, "more than"),
    ],
)
def test_weights_that_did_not_come_whole(serve, weights, spoil, status, message):
    path, digest = weights
    live = serve()
    answer = live.call("PUT", f"/v1/weights/{digest}", spoil(path.read_bytes()))
    assert answer.status == status
    assert message in answer.error
    assert json.loads(live.call("GET", "/v1/info").body)["weights"] is None


def test_weights_of_another_model_leave_the_old_ones(serve, weights, tmp_path):
    import hashlib

    from safetensors.torch import load_file, save_file

    path, digest = weights
    live = serve()
    put(live, path, digest)
    state = load_file(path)
    state.pop("model.norm.weight")
    save_file(state, tmp_path / "other", {"kind": "weights", "vocab": "41"})
    other = hashlib.sha256((tmp_path / "other").read_bytes()).hexdigest()[:32]
    answer = put(live, tmp_path / "other", other)
    assert answer.status == 400
    assert "is not in both the file and the model" in answer.error
    assert sample(live, digest, request())


@pytest.mark.parametrize("name", ["../../etc/passwd", "x" * 70, "ABCDEF0123456789", ""])
def test_no_name_of_weights_is_a_path(serve, weights, name):
    live = serve()
    answer = live.call("PUT", f"/v1/weights/{name.replace('/', '%2F')}", weights[0].read_bytes())
    assert answer.status in (400, 404)


def test_other_weights_than_are_wanted(serve, weights):
    live = serve()
    answer = live.call("POST", "/v1/sample", encode_sample_request(request(), weights[1]))
    assert answer.status == 409
    assert "of nobody yet" in answer.error


@pytest.mark.parametrize(
    ("changes", "status", "message"),
    [
        ({"context_ids": np.array([3, 44], np.int32)}, 400, "id 44, but the model knows those below 41"),
        ({"max_new_tokens": 10**6}, 400, "context and max_new_tokens"),
        ({"first": 4}, 400, "none but those of the turn itself"),
    ],
)
def test_impossible_turns(serve, weights, changes, status, message):
    path, digest = weights
    live = serve()
    put(live, path, digest)
    answer = live.call("POST", "/v1/sample", encode_sample_request(request(**changes), digest))
    assert answer.status == status
    assert message in answer.error


def test_whoever_leaves_stops_the_turn(serve, weights):
    path, digest = weights
    live = serve(chunk_tokens=1)
    put(live, path, digest)
    for seed in range(30):  # until one is long
        connection: http.client.HTTPConnection = live.connect()
        connection.request("POST", "/v1/sample", encode_sample_request(request(400, seed=seed), digest))
        connection.getresponse().read(4)
        connection.close()
    deadline = time.monotonic() + 20
    while live.server.model.busy or live.server.admission.num_accepted:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert put(live, path, digest).status == 204


def test_a_token_guards_the_weights(serve, weights):
    path, digest = weights
    live = serve(token="word")
    assert put(live, path, digest).status == 401
    assert put(live, path, digest, Authorization="Bearer word").status == 204


def test_a_server_that_ends(serve, weights):
    path, digest = weights
    live = serve()
    live.server.admission.draining = True
    assert put(live, path, digest).status == 503
