"""A model behind the engine's pipe, served over real HTTP: the same frames as of a model in process, and what it refuses."""

import asyncio
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest

from opd.errors import UserError
from opd.records import SampleRequest, Sampling, ScoreRequest
from opd.teachers.client.served import ServedTeacher
from opd.teachers.config import TeacherConfig
from opd.teachers.stream import ScoreStream
from opd.teachers.vllm.model import VLLMModel
from opd.teachers.wire import decode_turn, encode_sample_request

IDS = np.array([3, 9, 7, 12, 4, 4, 30, 8, 21], np.int32)


@pytest.fixture
def teacher(load, live):
    """`teacher(...)`: (a client of a server of `load(...)`, the server)."""

    def connect(**options):
        server = live(load(**options))
        return ServedTeacher.connect("t", TeacherConfig(url=server.url, deadline_s=5.0)), server

    return connect


def ask(teacher, *requests):
    async def run():
        answers = await asyncio.gather(*(teacher.score(request) for request in requests))
        await teacher.close()
        return answers

    return asyncio.run(run())


def test_log_probs(teacher, vocab, table):
    client, server = teacher()
    plain, top = ask(client, ScoreRequest(IDS[:2], IDS[2:]), ScoreRequest(IDS[:2], IDS[2:], k=5))
    expected = table[IDS[1:-1]]
    np.testing.assert_allclose(plain.logps, np.maximum(expected[np.arange(7), IDS[2:]], -30.0), atol=1e-6)
    assert plain.topk_ids is None
    # after token 7 a padded row is the most likely: it is none of the ids, and its mass is outside
    np.testing.assert_array_equal(top.topk_ids, np.argsort(-expected[:, :vocab], axis=1)[:, :5])
    assert top.tail[1] > 0.99
    assert server.value("opd_scored_tokens_total") == 14
    assert client.abilities.ids == "overlap"


@pytest.mark.parametrize("exact", [True, False])
def test_chosen_ids(teacher, vocab, monkeypatch, table, exact):
    monkeypatch.setenv("OPD_FAKE", "exact" if exact else "")
    client, _ = teacher(max_logprobs=6)
    chosen = np.tile(np.arange(3, 9, dtype=np.int32), (7, 1))
    (scores,) = ask(client, ScoreRequest(IDS[:2], IDS[2:], ids=chosen, k=2))
    found = scores.topk_ids[:, :6] >= 0
    assert found.all() == exact
    expected = np.take_along_axis(table[IDS[1:-1]], chosen, axis=1)
    np.testing.assert_allclose(scores.topk_logps[:, :6][found], expected[found], atol=1e-6)


def test_a_stream_is_scored_as_the_whole(teacher, table):
    client, server = teacher()

    async def chunked():
        stream = ScoreStream(client, IDS[:2])
        parts = [await stream.append(at, IDS[at : at + 3]) for at in (2, 5)]
        parts.append(await stream.append(4, IDS[:2]))  # a rewind
        held = await asyncio.to_thread(server.value, "opd_streams")
        await client.close()
        return [np.asarray(part.logps) for part in parts], held, stream.name

    parts, held, name = asyncio.run(chunked())
    whole = np.take_along_axis(table[IDS[1:7]], IDS[2:8, None], axis=1)[:, 0]
    np.testing.assert_allclose(np.concatenate(parts[:2]), whole, atol=1e-6)
    again = np.concatenate([IDS[3:4], IDS[:2]])
    np.testing.assert_allclose(parts[2], table[again[:-1], again[1:]], atol=1e-6)
    assert held == 1
    assert server.call("DELETE", f"/v1/streams/{name}").status == 204
    assert server.value("opd_streams") == 0
    assert server.value("opd_stream_hits_total") == 2


def test_streams_are_bounded(teacher):
    client, server = teacher(stream_cache_gib=64 / 2**30)  # sixteen tokens

    async def run():
        one, two = ScoreStream(client, IDS[:2]), ScoreStream(client, IDS[:3])
        await one.append(2, IDS[2:9])
        await two.append(3, IDS[:7])
        await one.append(9, IDS[:2])  # it is sent again, whole
        await client.close()

    asyncio.run(run())
    assert server.value("opd_stream_evictions_total") == 2


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"hidden": True}, "hidden: this server's backend gives no hidden states"),
        ({"temperature": 0.7}, "temperature: 0.7, but this server's backend scores at 1 alone"),
        ({"k": 21}, "k: 21 of each token, but the server gives 20: start it with more --max-logprobs"),
        ({"ids": np.zeros((2, 21), np.int32)}, "ids: 21 of each token, but the server gives 20"),
    ],
)
def test_what_it_does_not_give(live, load, frame, wanted, message):
    answer = live(load()).call("POST", "/v1/score", frame(0, 3, 2, **wanted))
    assert answer.status == 400
    assert answer.error.startswith(message)


def test_other_refusals(live, load, frame):
    server = live(load())
    answer = server.call("GET", "/v1/heads/none")
    assert (answer.status, answer.error[:32]) == (404, "this server's backend gives no o")
    assert server.call("POST", "/v1/score", frame(1, 40, 24)).status == 400  # 64, and vLLM needs one more
    assert server.call("POST", "/v1/score", frame(1, 40, 23)).status == 200
    request = SampleRequest(IDS, 7, 4, Sampling(top_p=0.5, num_topk=2))
    answer = server.call("POST", "/v1/generate", encode_sample_request(request))
    assert (answer.status, answer.error[:8]) == (400, "num_topk")
    request = replace(request, sampling=Sampling(num_topk=21))
    assert "--max-logprobs" in server.call("POST", "/v1/generate", encode_sample_request(request)).error


def test_a_log_prob_that_is_no_number(live, load):
    client = ServedTeacher.connect("t", TeacherConfig(url=live(load()).url, deadline_s=2.0))
    with pytest.raises(UserError, match="serve it with another --dtype"):
        ask(client, ScoreRequest(np.array([35, 4], np.int32), IDS[2:]))


@pytest.mark.parametrize(("room", "length", "finish"), [(2, 2, "length"), (5, 5, "eos"), (9, 5, "eos")])
def test_a_turn(live, load, table, room, length, finish):
    server = live(load())
    request = SampleRequest(IDS[:1], 7, room, Sampling(num_topk=3))
    answer = server.call("POST", "/v1/generate", encode_sample_request(request))
    turn, weights = decode_turn(answer.body, request.context_ids)
    assert (len(turn.sampled_ids), turn.finish) == (length, finish)
    assert weights == server.server.model.weights["base"]
    before = np.concatenate([IDS[:1], turn.sampled_ids[:-1]])
    np.testing.assert_allclose(turn.sampler_logps, table[before, turn.sampled_ids], atol=1e-6)
    np.testing.assert_array_equal(turn.topk_ids, np.argsort(-table[before][:, :38], axis=1)[:, :3])
    assert server.value("opd_sampled_tokens_total") == len(turn.sampled_ids)


def test_info(live, load, served):
    info, plain = json.loads(live(load()).call("GET", "/v1/info").body), served.info()
    for name in ("model", "tokens", "num_tokens", "rows", "eos_ids"):
        assert info[name] == plain[name] or name == "model"
    assert info["backend"] == "vllm"
    assert info["scores"] == {"hidden": False, "temperature": False, "ids": "overlap", "max_k": 20}
    assert info["max_context"] == 63
    assert info["limits"]["batch_tokens"] == 2048


def test_the_weights_digest_is_of_the_files_and_of_what_changes_numbers(options, load, tmp_path):
    first = load().weights["base"]
    assert load().weights["base"] == first
    others = {load(dtype="bfloat16").weights["base"], load(quantization="fp8").weights["base"]}
    path = options().model + "/model.safetensors"
    with open(path, "r+b") as file:
        file.seek(-1, os.SEEK_END)
        (last,) = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))
    others.add(load().weights["base"])
    assert len({first, *others}) == 4


def test_what_the_engine_is_told(load):
    facts = load(quantization="fp8").facts
    told = facts["arguments"]
    assert told["max_logprobs"] >= 20
    assert told["quantization"] == "fp8"
    assert told["dtype"] == "float32"  # the checkpoint's own
    assert told["max_num_batched_tokens"] == 2048
    assert not told["enable_prefix_caching"]
    assert not told["trust_remote_code"]
    assert told["logprobs_mode"] == "processed_logprobs"
    assert "enable_lora" not in told


def test_adapters(live, load, frame, tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 12}))
        (tmp_path / name / "adapter_model.safetensors").write_bytes(name.encode())
    model = load(adapters={name: str(tmp_path / name) for name in ("a", "b")})
    assert len(set(model.weights.values())) == 3
    assert model.facts["arguments"]["max_lora_rank"] == 16
    assert model.facts["adapters"]["a"] == str(tmp_path / "a")
    server = live(model)
    base, adapted = (server.call("POST", "/v1/score", frame(1, 3, 5, model=name)).body for name in ("base", "a"))
    assert base != adapted
    with pytest.raises(UserError, match=r"--adapter c: .* is no adapter: adapter_config\.json: FileNotFoundError"):
        load(adapters={"c": str(tmp_path)})
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "IA3", "r": 4}))
    with pytest.raises(UserError, match=r"--adapter c: .* is no LoRA adapter"):
        load(adapters={"c": str(tmp_path)})


def test_a_folder_without_safetensors(options, tmp_path):
    wanted = options()
    shutil.copytree(wanted.model, tmp_path, ignore=shutil.ignore_patterns("*.safetensors"), dirs_exist_ok=True)
    with pytest.raises(UserError, match=r"--model: .* has no \.safetensors files"):
        VLLMModel.load(dataclasses.replace(wanted, model=str(tmp_path)))


def test_the_server_ends_when_the_engine_dies(options, fake_python):
    command = [sys.executable, "-m", "opd", "serve", "teacher", "--backend", "vllm", "--vllm-python", fake_python]
    command += ["--model", options().model, "--port", "0", "--max-model-len", "64"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        url = server.stdout.readline().split(" at ")[1].split()[0]
        client = ServedTeacher.connect("t", TeacherConfig(url=url, deadline_s=3.0))
        assert len(ask(client, ScoreRequest(IDS[:2], IDS[2:]))[0].logps) == 7
        with pytest.raises(UserError, match=r"no answer|503|ended"):
            ask(client, ScoreRequest(np.array([32, 4], np.int32), IDS[2:]))
        _, err = server.communicate(timeout=20)
    assert server.returncode == 1
    last = "error: the engine's process ended with code 7: out of memory, say; start the server again"
    assert err.splitlines()[-1] == last
    assert "Traceback" not in err


def test_a_signal_ends_server_and_engine(options, fake_python, engine_log):
    command = [sys.executable, "-m", "opd", "serve", "teacher", "--backend", "vllm", "--vllm-python", fake_python]
    command += ["--model", options().model, "--port", "0", "--max-model-len", "64"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        assert server.stdout.readline().startswith("serving ")
        start = time.monotonic()
        server.send_signal(signal.SIGTERM)
        _, err = server.communicate(timeout=30)
    assert (server.returncode, time.monotonic() - start < 10) == (0, True), err
    engine_log("shut down")
