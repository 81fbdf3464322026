"""Whole runs of models whose logits are more than a product: a soft cap, a bias, and a head that is not known."""

import functools
from typing import Any

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaForCausalLM, PhiConfig, PhiForCausalLM

ROWS = 45
SMALL: dict[str, Any] = {
    "vocab_size": ROWS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
SMALL |= {"initializer_range": 0.2, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def gemma() -> Gemma2ForCausalLM:
    config = Gemma2Config(**SMALL, num_key_value_heads=2, head_dim=8, final_logit_softcapping=2.0, sliding_window=512)
    config.layer_types = ["full_attention", "full_attention"]
    return Gemma2ForCausalLM(config)


def phi() -> PhiForCausalLM:
    model = PhiForCausalLM(PhiConfig(**SMALL))
    torch.nn.init.normal_(model.lm_head.bias)
    return model


@pytest.fixture
def recipe(raw_recipe, micro_tokenizer, tmp_path, monkeypatch):
    """`recipe(kind, **sections)`: student and teacher of that kind."""

    def build(kind, **sections):
        folders = []
        for seed in (0, 1):
            torch.manual_seed(seed)
            if kind == "unknown":
                folders.append(None)
                continue
            folders.append(str(tmp_path / f"{kind}-{seed}"))
            {"soft cap": gemma, "bias": phi}[kind]().save_pretrained(folders[-1])
            micro_tokenizer.save_pretrained(folders[-1])
        if kind == "unknown":
            plain = LlamaForCausalLM.forward

            @functools.wraps(plain)
            def forward(self, *args, **kwargs):
                output = plain(self, *args, **kwargs)
                output.logits = output.logits + output.logits.sin()  # type: ignore
                return output

            monkeypatch.setattr(LlamaForCausalLM, "forward", forward)
            return raw_recipe(**sections)
        attention = {"attention": "eager"} if kind == "soft cap" else {}
        models = {"student": {"model": folders[0], **attention}, "teachers": {"default": {"model": folders[1], **attention}}}
        return raw_recipe(**models, **sections)

    return build


@pytest.mark.filterwarnings("ignore:.*no known map of its last hidden states:UserWarning")
@pytest.mark.parametrize("form", ["full", "topk", "sampled"])
@pytest.mark.parametrize("kind", ["soft cap", "bias", "unknown"])
def test_sampler_teacher_and_loss_see_the_same_logits(recipe, train, kind, form):
    terms = {"reverse_kl": {"form": form, **({"k": 8} if form == "topk" else {})}}
    rows = train(recipe(kind, terms=terms, steps=8))
    steps = [row for row in rows if "mismatch" in row]
    assert len(steps) == 8
    assert max(row["mismatch"] for row in steps) < 1e-5
    if form == "full":
        assert steps[-1]["reverse_kl"] < steps[0]["reverse_kl"]
