"""The loss from hidden states and its gradient against float64 autograd through whole models of several architectures."""

import copy
import math
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, CohereConfig, Gemma2Config, GPTJConfig, LlamaConfig, RobertaConfig

from opd.models import decoder, last_states, load_causal_lm, output_head
from opd.objective.batching import MicroBatch, PackedTerm
from opd.objective.head_loss import LossSpec, head_loss
from opd.objective.learner import StudentLoss
from opd.records import Hidden, TopK

VOCAB, ROWS = 31, 37
SMALL: dict[str, Any] = {
    "vocab_size": ROWS,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
SMALL |= {"num_key_value_heads": 1, "initializer_range": 0.3, "pad_token_id": 0}
CONFIGS: dict[str, Any] = {
    "untied": LlamaConfig(**SMALL, tie_word_embeddings=False),
    "tied": LlamaConfig(**SMALL, tie_word_embeddings=True),
    "soft cap": Gemma2Config(**SMALL, head_dim=8, final_logit_softcapping=3.0),
    "bias": GPTJConfig(vocab_size=ROWS, n_embd=16, n_layer=2, n_head=2, rotary_dim=4, initializer_range=0.3),
    "scale": CohereConfig(**SMALL, logit_scale=0.25),
    "own logits": RobertaConfig(**SMALL, is_decoder=True),  # a layer and a norm more before the head
}


@pytest.fixture(params=CONFIGS)
def models(request, tmp_path):
    """(student, teacher) as `load_causal_lm` gives them, the second with other weights."""
    attention = "eager" if request.param == "soft cap" else "sdpa"
    loaded = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(CONFIGS[request.param]).eval()
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                nn.init.normal_(parameter)
        model.save_pretrained(tmp_path / str(seed))
        known = request.param != "own logits"
        expected = nullcontext() if known else pytest.warns(UserWarning, match="no known map of its last hidden states")
        with expected:
            loaded.append(load_causal_lm(str(tmp_path / str(seed)), "model", attention=attention))
        assert (output_head(loaded[-1]).weight is not None) == known
    return loaded


def batch_of(teacher: nn.Module, seed: int, temperature: float) -> MicroBatch:
    """Two sequences with four rows each; a full divergence, one over three ids, and a policy gradient."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, VOCAB, (2, 7), generator=generator)
    rows = torch.tensor([2, 3, 4, 5, 9, 10, 11, 12])
    with torch.no_grad():
        states = last_states(decoder(teacher)(input_ids=ids, use_cache=False)).flatten(0, 1)[rows]
        logp = (teacher(input_ids=ids).logits.flatten(0, 1)[rows, :VOCAB] / temperature).log_softmax(-1)
    top = logp.topk(3)
    target = TopK(top.indices, top.values, 1 - top.values.exp().sum(-1))  # type: ignore[arg-type]
    scale, reward = torch.rand(3, 8, generator=generator), torch.randn(8, generator=generator)
    plain = {"self_coef": 1.0, "advantage_clip": None, "ratio_clip": None, "importance_cap": None}
    terms = (
        PackedTerm("divergence", scale[0], {"divergence": "reverse_kl", "beta": 0.5, "target": Hidden((states,), "t")}),  # type: ignore[arg-type]
        PackedTerm("divergence", scale[1], {"divergence": "reverse_kl", "beta": 0.5, "tail": "tail", "target": target}),
        PackedTerm("policy_gradient", scale[2], {"reward": reward, **plain}),
    )
    return MicroBatch(ids, rows, ids.flatten()[rows + 1], torch.zeros(8), terms)


def exact_loss(student: nn.Module, teacher: nn.Module, batch: MicroBatch, temperature: float) -> Tensor:
    """The same from the models' own logits."""
    log_q = (student(input_ids=batch.input_ids).logits.flatten(0, 1)[batch.rows, :VOCAB] / temperature).log_softmax(-1)
    log_p = (teacher(input_ids=batch.input_ids).logits.flatten(0, 1)[batch.rows, :VOCAB] / temperature).log_softmax(-1)
    full, top, sampled = (term.scale.double() for term in batch.terms)
    loss = (full * (log_q.exp() * (log_q - log_p.detach())).sum(-1)).sum()
    ids = batch.terms[1].inputs["target"].ids
    inside_q, inside_p = log_q.gather(-1, ids), log_p.detach().gather(-1, ids)
    tail_q, tail_p = (1 - inside.exp().sum(-1) for inside in (inside_q, inside_p))
    loss = loss + (top * ((inside_q.exp() * (inside_q - inside_p)).sum(-1) + tail_q * (tail_q / tail_p).log())).sum()
    logp = log_q.gather(-1, batch.token_ids[:, None])[:, 0]
    advantage = batch.terms[2].inputs["reward"].double() - logp.detach()
    return loss - (sampled * (logp - logp.detach()).exp() * advantage).sum()


def double(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model).double()


def close(student: nn.Module, exact: nn.Module, tolerance: float) -> None:
    """Every parameter's gradient, by the largest of all."""
    found = {name: p.grad for name, p in student.named_parameters() if p.requires_grad}
    wanted = {name: p.grad for name, p in exact.named_parameters() if p.requires_grad}
    largest = max(float(grad.abs().max()) for grad in wanted.values() if grad is not None)
    for name, grad in wanted.items():
        ours = found[name]
        if grad is None:
            assert ours is None or not ours.any()
        else:
            assert ours is not None, name
            torch.testing.assert_close(
                ours.double(), grad, rtol=0, atol=tolerance * largest, msg=lambda text, name=name: f"{name}: {text}"
            )


@pytest.mark.parametrize("rows", [3, 1000])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_gradients_of_all_weights_with_accumulation(models, temperature, rows):
    student, teacher = models
    spec = LossSpec({"t": output_head(teacher)}, VOCAB, temperature, chunk_bytes=rows * VOCAB * 4)
    exact, exact_teacher = double(student), double(teacher)
    for seed in (0, 1):
        batch = batch_of(teacher, seed, temperature)
        loss, _ = StudentLoss(student, torch.float32)(batch, spec)
        loss.backward()
        expected = exact_loss(exact, exact_teacher, batch, temperature)
        expected.backward()
        assert loss.item() == pytest.approx(expected.item(), rel=1e-5, abs=1e-5)
    close(student, exact, 1e-5)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_gradients_of_adapters(models):
    student, teacher = models
    torch.manual_seed(2)
    settings = peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    adapted = peft.get_peft_model(student, settings).eval()
    spec = LossSpec({"t": output_head(teacher)}, VOCAB, 1.0, chunk_bytes=3 * VOCAB * 4)
    exact = double(adapted)
    for seed in (0, 1):
        batch = batch_of(teacher, seed, 1.0)
        StudentLoss(adapted, torch.float32)(batch, spec)[0].backward()
        exact_loss(exact, double(teacher), batch, 1.0).backward()
    close(adapted, exact, 1e-5)
    assert any(p.requires_grad for p in adapted.parameters())


def test_log_probs_alone(models):
    student, teacher = models
    spec, batch = LossSpec({}, VOCAB, 0.7, chunk_bytes=3 * VOCAB * 4), batch_of(teacher, 0, 0.7)
    logps = StudentLoss(student, torch.float32)(batch, spec, logps_only=True)
    logits = double(student)(input_ids=batch.input_ids).logits.flatten(0, 1)[batch.rows, :VOCAB]
    exact = (logits / 0.7).log_softmax(-1).gather(-1, batch.token_ids[:, None])[:, 0]
    torch.testing.assert_close(logps.double(), exact, rtol=0, atol=1e-5)


def test_a_student_that_is_its_teacher_has_no_loss(models):
    student, _ = models
    for temperature in (1.0, 0.7):
        batch = batch_of(student, 0, temperature)
        batch = replace(batch, terms=batch.terms[:1])
        spec = LossSpec({"t": output_head(student)}, VOCAB, temperature, chunk_bytes=1000)
        hidden = last_states(decoder(student)(input_ids=batch.input_ids, use_cache=False)).flatten(0, 1)[batch.rows]
        loss, _ = head_loss(hidden, output_head(student), batch, spec)
        assert loss.item() == 0
        assert math.isfinite(loss.item())
