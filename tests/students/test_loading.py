"""Students with and without low-rank adapters."""

import asyncio
import copy

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from peft import PeftModel

from opd.errors import UserError
from opd.models import output_head
from opd.objective.config import ObjectiveConfig, OptimizerConfig
from opd.objective.learner import Learner
from opd.records import SampleRequest, Sampling, Term, Turn
from opd.students.config import LoraConfig, StudentConfig
from opd.students.hf_sampler import HFSampler
from opd.students.loading import load_student

IDS = torch.arange(3, 23)[None]
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft asks for it


@pytest.fixture(scope="module")
def folder(model_folder):
    return model_folder(0)


@pytest.fixture
def adapted(folder):
    """With adapters that are no longer the identity."""
    student = load_student(StudentConfig(str(folder), lora=LoraConfig(r=4, alpha=8)))
    assert isinstance(student, PeftModel)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in student.named_parameters():
            if "lora_B" in name:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return student.eval()


def logp(model, ids: torch.Tensor = IDS) -> torch.Tensor:
    with torch.no_grad():
        return model(ids).logits[0].log_softmax(-1)


def test_all_weights_train_without_adapters(folder):
    student = load_student(StudentConfig(str(folder)))
    assert not student.training
    assert all(p.requires_grad and p.dtype == torch.float32 for p in student.parameters())
    assert {p.dtype for p in load_student(StudentConfig(str(folder), dtype="bfloat16")).parameters()} == {torch.bfloat16}


def test_gradient_checkpointing_changes_no_gradient(folder):
    gradients = []
    for checkpointing in (False, True):
        student = load_student(StudentConfig(str(folder), gradient_checkpointing=checkpointing)).train()
        student(IDS).logits.square().sum().backward()
        gradients.append([p.grad for p in student.parameters()])
    torch.testing.assert_close(*gradients)


def test_only_adapters_train(adapted):
    trained = {name for name, p in adapted.named_parameters() if p.requires_grad}
    assert trained == {name for name, _ in adapted.named_parameters() if "lora_" in name}
    for projection in ("q_proj", "o_proj", "gate_proj", "down_proj"):
        assert any(projection in name for name in trained)
    assert not any("lm_head" in name or "embed_tokens" in name for name in trained)


def test_adapters_start_as_the_identity_and_always_the_same(folder):
    plain = load_student(StudentConfig(str(folder)))
    torch.manual_seed(1)
    one = load_student(StudentConfig(str(folder), lora=LoraConfig()))
    drawn = torch.rand(1)
    torch.manual_seed(2)
    two = load_student(StudentConfig(str(folder), lora=LoraConfig()))
    torch.testing.assert_close(logp(one.eval()), logp(plain))
    for ours, theirs in zip(one.parameters(), two.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    torch.manual_seed(1)
    assert torch.equal(drawn, torch.rand(1))  # loading draws nothing from the caller's generator


def test_with_adapters_off_it_is_the_base(folder, adapted):
    plain = logp(load_student(StudentConfig(str(folder))))
    assert (logp(adapted) - plain).abs().max() > 0.1
    with adapted.disable_adapter():
        torch.testing.assert_close(logp(adapted), plain, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_sampling_uses_the_adapters(adapted, vocab, dtype):
    sampler = HFSampler(adapted, vocab, [2], max_rows=4, dtype=dtype)
    sampler.sync(adapted, version=1)

    async def turn(seed: int) -> Turn:
        request = SampleRequest(np.arange(3, 9 + seed, dtype=np.int32), seed, 12, Sampling())
        return Turn.of(request.context_ids, [chunk async for chunk in sampler.generate(request)])

    async def run():
        return await asyncio.gather(*(turn(seed) for seed in range(6)))

    for sampled in asyncio.run(run()):
        ids = torch.from_numpy(np.concatenate([sampled.context_ids, sampled.sampled_ids])).long()
        with torch.no_grad():
            exact = adapted(ids[None]).logits[0, len(sampled.context_ids) - 1 : -1, :vocab].log_softmax(-1)
        exact = exact.gather(-1, torch.from_numpy(sampled.sampled_ids).long()[:, None])[:, 0]
        atol = 1e-5 if dtype is None else 0.3
        np.testing.assert_allclose(sampled.sampler_logps, exact, rtol=0, atol=atol)


def test_an_update_moves_the_adapters_alone(adapted, random_rollout, vocab):
    before = copy.deepcopy(dict(adapted.named_parameters()))
    learner = Learner(
        adapted,
        ObjectiveConfig(),
        OptimizerConfig(lr=1e-2),
        accelerator=Accelerator(cpu=True),
        num_steps=1,
        heads={},
        vocab=vocab,
        temperature=1.0,
    )
    rollout = random_rollout(0, (5, 8))
    inputs = {"reward": np.linspace(-5, 0, 8, dtype=np.float32), "self_coef": 1.0}
    inputs |= {"advantage_clip": None, "ratio_clip": None, "importance_cap": None}
    assert learner.update([(rollout, [Term("policy_gradient", rollout.trainable, inputs)])])["grad_norm"] > 0
    moved = {name for name, p in adapted.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {name for name, p in adapted.named_parameters() if p.requires_grad}


def test_adapters_are_resumed_from_a_checkpoint(folder, adapted, tmp_path):
    adapted.save_pretrained(tmp_path)
    resumed = load_student(StudentConfig(str(folder), lora=LoraConfig(r=4, alpha=8)), checkpoint=tmp_path)
    torch.testing.assert_close(logp(resumed.eval()), logp(adapted))
    assert {n for n, p in resumed.named_parameters() if p.requires_grad} == {
        n for n, p in adapted.named_parameters() if p.requires_grad
    }


def test_weights_are_resumed_from_a_checkpoint(folder, micro_model, tmp_path):
    micro_model(5).save_pretrained(tmp_path)
    resumed = load_student(StudentConfig(str(folder)), checkpoint=tmp_path)
    torch.testing.assert_close(logp(resumed), logp(micro_model(5)))


def test_an_adapter_on_the_output_head_is_refused(folder):
    head = output_head(load_student(StudentConfig(str(folder)))).weight
    assert head.requires_grad  # type: ignore
    with pytest.raises(UserError, match=r"student\.lora\.target_modules: the output head cannot carry an adapter"):
        load_student(StudentConfig(str(folder), lora=LoraConfig(target_modules="q_proj, lm_head")))
    chosen = load_student(StudentConfig(str(folder), lora=LoraConfig(target_modules="q_proj, v_proj")))
    assert {name.split(".")[-4] for name, p in chosen.named_parameters() if p.requires_grad} == {"q_proj", "v_proj"}


def test_modules_that_do_not_exist_are_refused(folder):
    with pytest.raises(UserError, match=r"student\.lora\.target_modules: .*wrong"):
        load_student(StudentConfig(str(folder), lora=LoraConfig(target_modules="wrong")))
