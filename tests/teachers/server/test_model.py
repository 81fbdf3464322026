"""A served base with adapters: names, digests, and each answering as itself."""

import asyncio
import json
import warnings
from typing import Any

import numpy as np
import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from opd.records import SampleRequest, Sampling
from opd.teachers.digest import adapter_digest
from opd.teachers.hf import View
from opd.teachers.wire import decode_scores, decode_turn, encode_sample_request, encode_score_request


@pytest.fixture(scope="module")
def folder(model_folder):
    return model_folder(0)


@pytest.fixture(scope="module")
def adapter(folder, tmp_path_factory):
    """`adapter(seed)`: a folder with a random adapter over the base."""

    def save(seed: int) -> str:
        path = tmp_path_factory.mktemp("adapter")
        torch.manual_seed(seed)
        with warnings.catch_warnings():  # peft asks transformers for a property that it renamed
            warnings.simplefilter("ignore")
            config = peft.LoraConfig(r=3, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
            model: Any = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(folder), config)
            model.save_pretrained(str(path), save_embedding_layers=False)
        return str(path)

    return save


@pytest.fixture(scope="module")
def with_adapters(folder, adapter, load_served):
    return load_served(folder, adapters={"math": adapter(1), "code.v2": adapter(2), "math-again": adapter(1)})


def test_digests(with_adapters, served, folder, adapter, load_served):
    weights = with_adapters.weights
    assert list(weights) == ["base", "math", "code.v2", "math-again"]
    assert weights["base"] == served.weights["base"]  # the same with and without adapters
    assert len({weights["base"], weights["math"], weights["code.v2"]}) == 3
    assert weights["math"] == weights["math-again"]
    assert with_adapters.head_id == served.head_id
    assert load_served(folder, adapters={"m": adapter(1)}).weights["m"] == weights["math"]


def test_an_adapter_over_another_base_is_other_weights():
    state = {"a": torch.ones(2)}
    assert adapter_digest("0" * 32, state) != adapter_digest("1" * 32, state)
    assert adapter_digest("0" * 32, state) != adapter_digest("0" * 32, {"b": torch.ones(2)})


def test_each_answers_as_itself(live, with_adapters, ask):
    server = live(with_adapters)
    models = json.loads(server.call("GET", "/v1/info").body)["models"]
    assert models == {name: {"weights": digest} for name, digest in with_adapters.weights.items()}
    answers = {}
    for name in (*models, "base"):
        asked = ask(0, 4, 6, model=name, k=3)
        scores, weights = decode_scores(server.call("POST", "/v1/score", encode_score_request(asked)).body)
        assert weights == with_adapters.weights[name]
        answers[name] = scores.logps
    server.stop()
    for name in models:
        view = View(38, adapter=None if name == "base" else name)
        expected = with_adapters.model.score_batch([(ask(0, 4, 6, k=3).request, view)])[0].logps
        np.testing.assert_allclose(answers[name], expected, atol=1e-5)
    assert abs(answers["math"] - answers["base"]).max() > 0.01


def test_the_base_samples_while_adapters_score(live, with_adapters, served, ask):
    """Sampling goes on between scoring passes, of which each may turn an adapter on."""
    server = live(with_adapters)
    sampled = SampleRequest(np.array([1, 5, 9], np.int32), 3, 60, Sampling())

    async def alone() -> bytes:
        return await served.generate(sampled)

    expected, _ = decode_turn(asyncio.run(alone()), sampled.context_ids)

    async def together() -> list[bytes]:
        work = [with_adapters.generate(sampled)]
        work += [with_adapters.score(ask(i, 4, 40, model=name)) for i in range(8) for name in ("math", "code.v2")]
        return await asyncio.gather(*work)

    turn, _ = decode_turn(asyncio.run(together())[0], sampled.context_ids)
    np.testing.assert_array_equal(turn.sampled_ids, expected.sampled_ids)
    np.testing.assert_allclose(turn.sampler_logps, expected.sampler_logps, atol=1e-5)
    refused = server.call("POST", "/v1/generate", encode_sample_request(sampled, "math"))
    assert refused.status == 400
    assert "'math' is not the base" in refused.error


def test_bfloat16(live, load_served, folder, ask):
    model = load_served(folder, dtype="bfloat16")
    server = live(model, body_bytes=4096)
    assert json.loads(server.call("GET", "/v1/info").body)["dtype"] == "bfloat16"
    asked = encode_score_request(ask(0, 4, 64, hidden=True))  # 64 * 32 * 2 bytes of answer
    scores, _ = decode_scores(server.call("POST", "/v1/score", asked).body)
    assert scores.hidden.dtype == torch.bfloat16
    assert server.call("POST", "/v1/score", encode_score_request(ask(0, 4, 65, hidden=True))).status == 413
    head = server.call("GET", f"/v1/heads/{model.head_id}").body
    assert len(head) > 45 * 32 * 2
