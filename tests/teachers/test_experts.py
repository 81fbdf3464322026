"""Fewer active experts in one loaded model: as a model built with fewer, and strong and weak beside each other."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    GptOssConfig,
    MixtralConfig,
    OlmoeConfig,
    PreTrainedConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

from opd.errors import UserError
from opd.models import decoder
from opd.records import ScoreRequest, Scores
from opd.teachers.experts import Experts, check_configured
from opd.teachers.hf import HFModel, HFTeacher, View
from opd.teachers.stream import StreamLost

ROWS = 45
SHAPE: dict[str, Any] = {
    "vocab_size": ROWS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "num_experts_per_tok": 3,
}
MOE: dict[str, Any] = SHAPE | {"moe_intermediate_size": 24, "num_experts": 6}
DEEPSEEK: dict[str, Any] = SHAPE | {
    "num_key_value_heads": 4,
    "moe_intermediate_size": 24,
    "n_routed_experts": 6,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
WITH_HEADS: dict[str, Any] = MOE | {"head_dim": 8}
KINDS: dict[str, PreTrainedConfig] = {
    "qwen2": Qwen2MoeConfig(**MOE, shared_expert_intermediate_size=24),
    "qwen2-normalised": Qwen2MoeConfig(**MOE, shared_expert_intermediate_size=24, norm_topk_prob=True),
    "qwen3": Qwen3MoeConfig(**WITH_HEADS),
    "qwen3-normalised": Qwen3MoeConfig(**WITH_HEADS, norm_topk_prob=True),
    "mixtral": MixtralConfig(**SHAPE, num_local_experts=6),
    "olmoe": OlmoeConfig(**SHAPE, num_experts=6),
    "gpt-oss": GptOssConfig(**SHAPE, head_dim=8, num_local_experts=6),
    "deepseek": DeepseekV3Config(**DEEPSEEK),
}
CPU = torch.device("cpu")


def build(config: PreTrainedConfig, **changes: Any) -> Any:
    """Random weights, the same whatever number of experts is at work."""
    config = type(config)(**(config.to_dict() | changes))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(torch.arange(3, 23).view(2, 10)).logits


@pytest.mark.parametrize("kind", KINDS)
def test_fewer_are_what_a_model_built_with_fewer_has(kind):
    model = build(KINDS[kind])
    experts = Experts(decoder(model))
    assert experts.num_active == 3
    strong = logits(model)
    for number in (1, 2, 3):
        if number < 3:
            experts.check(number, "x")
        with experts.on(number):
            weak = logits(model)
        torch.testing.assert_close(weak, logits(build(KINDS[kind], num_experts_per_tok=number)), rtol=0, atol=1e-6)
        assert (weak - strong).abs().max() > 1e-2 or number == 3
        assert torch.equal(logits(model), strong)
    with experts.on(None):
        assert torch.equal(logits(model), strong)


def test_after_an_error_it_is_the_whole_model_again():
    model = build(KINDS["qwen2"])
    strong = logits(model)
    with pytest.raises(ZeroDivisionError), Experts(decoder(model)).on(1):
        raise ZeroDivisionError
    assert torch.equal(logits(model), strong)


def test_changing_the_configuration_has_no_effect():
    """Why it is not done like that."""
    model = build(KINDS["qwen2"])
    strong = logits(model)
    model.config.num_experts_per_tok = 1
    assert torch.equal(logits(model), strong)


@pytest.mark.parametrize("number", [0, -1, 3, 6])
def test_a_number_that_the_model_cannot_have(number):
    with pytest.raises(UserError, match=rf"^t\.active_experts: {number} is not between 1 and 2: the model's own"):
        Experts(decoder(build(KINDS["mixtral"]))).check(number, "t.active_experts")
    with pytest.raises(UserError, match=rf"^t\.active_experts: {number} is not between 1 and 2"):
        check_configured(KINDS["mixtral"], number, "t.active_experts")


def test_a_dense_model(micro_model):
    experts = Experts(decoder(micro_model(0)))
    assert experts.num_active is None
    with pytest.raises(UserError, match=r"^t\.active_experts: the model has no experts .*: leave active_experts out"):
        experts.check(1, "t.active_experts")


def test_a_model_that_ignores_the_number():
    model = build(KINDS["olmoe"])
    for layer in model.model.layers:
        layer.mlp.gate.forward = type(layer.mlp.gate)(model.config).forward  # of a router beside, which keeps its own number
    with pytest.raises(UserError, match="make no difference"):
        Experts(decoder(model)).check(1, "t.active_experts")


def load(folder: Path) -> HFModel:
    return HFModel("teachers.t.model", str(folder), device=CPU, chunk_bytes=2**20)


@pytest.fixture(scope="module")
def model(moe_folder) -> HFModel:
    return load(moe_folder)


def ask(seed: int, vocab: int) -> ScoreRequest:
    rng = np.random.default_rng(seed)
    length = int(rng.integers(5, 20))
    return ScoreRequest(rng.integers(0, vocab, 4).astype(np.int32), rng.integers(0, vocab, length).astype(np.int32), k=3)


def same(ours: Scores | StreamLost, theirs: Scores | StreamLost, rows: slice = slice(None)) -> None:
    assert isinstance(ours, Scores)
    assert isinstance(theirs, Scores)
    for a, b in ((ours.logps, theirs.logps), (ours.topk_logps, theirs.topk_logps), (ours.tail, theirs.tail)):
        assert a is not None
        assert b is not None
        np.testing.assert_allclose(a, b[rows], rtol=0, atol=1e-5)


def test_strong_and_weak_at_once_are_strong_and_weak_alone(model, moe_folder, vocab):
    """From many coroutines, in no order, over one loaded model."""
    views = {"strong": View(vocab), "weak": View(vocab, active_experts=1)}
    teachers = {name: HFTeacher(name, model, view) for name, view in views.items()}
    alone = {name: HFTeacher(name, load(moe_folder), view) for name, view in views.items()}

    async def all_at_once() -> list[Scores]:
        return await asyncio.gather(*(teachers[("strong", "weak")[i % 2]].score(ask(i // 2, vocab)) for i in range(40)))

    async def one_by_one(name: str) -> list[Scores]:
        return [await alone[name].score(ask(i, vocab)) for i in range(20)]

    mixed = asyncio.run(all_at_once())
    exact = {name: asyncio.run(one_by_one(name)) for name in views}
    for i, scores in enumerate(mixed):
        same(scores, exact[("strong", "weak")[i % 2]][i // 2])
    gaps = [np.abs(s.logps - w.logps).max() for s, w in zip(exact["strong"], exact["weak"])]  # type: ignore[operator]
    assert min(gaps) > 1e-2


def test_requests_of_one_number_share_a_pass(model, vocab):
    before = model.num_batches
    views = [View(vocab, active_experts=number) for number in (1, None, 1, 2, None)]
    model.score_batch([(ask(0, vocab), view) for view in views])
    assert model.num_batches - before == 3


@pytest.mark.parametrize("keeps_keys", [True, False])
def test_streams_of_strong_and_weak_grow_side_by_side(model, moe_folder, vocab, keeps_keys, monkeypatch):
    assert model.cached_streams
    monkeypatch.setattr(model, "cached_streams", keeps_keys)
    whole = ask(3, vocab)
    sequence = np.concatenate([whole.context_ids, whole.token_ids])
    alone = {number: load(moe_folder).score_batch([(whole, View(vocab, active_experts=number))])[0] for number in (None, 1)}
    for start, stop in ((0, 3), (3, 4), (2, len(whole.token_ids))):
        keep = 4 + start if start else 0
        asked = [
            (
                replace(
                    whole,
                    context_ids=sequence[keep : 4 + start],
                    token_ids=whole.token_ids[start:stop],
                    stream=f"s-{number}",
                    keep_tokens=keep,
                ),
                View(vocab, active_experts=number),
            )
            for number in alone
        ]
        for answer, number in zip(model.score_batch(asked), alone, strict=True):
            same(answer, alone[number], slice(start, stop))
    other = replace(asked[0][0], stream="s-1", keep_tokens=4, context_ids=whole.context_ids[:0])
    assert isinstance(model.score_batch([(other, View(vocab))])[0], StreamLost)  # the keys are the weak model's


def test_a_teacher_names_its_field(model, vocab):
    with pytest.raises(UserError, match=r"^teachers\.a\.weak_reference\.active_experts: 4 is not between 1 and 2"):
        HFTeacher("a.weak_reference", model, View(vocab, active_experts=4))
