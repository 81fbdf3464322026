"""The in-process sampler: the same rollouts however they are batched, and the right log-probs."""

import asyncio
import copy
from collections.abc import Sequence
from contextlib import aclosing

import numpy as np
import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM

from opd.errors import UserError
from opd.models import decoder
from opd.records import Chunk, SampleRequest, Sampling, Turn
from opd.students import hf_sampler
from opd.students.drawing import draw
from opd.students.hf_sampler import HFSampler
from opd.students.noise import uniform

EOS = (2, 11)
PLAIN = Sampling()
LENGTHS = [1, 3, 9, 20, 2, 40, 5, 5, 13, 1, 7, 30]


@pytest.fixture(scope="module")
def student(micro_model):
    return micro_model(0)


@pytest.fixture
def make(student, vocab):
    """`make(**options)`: a sampler of the micro student, or of another."""

    def build(model=student, eos: Sequence[int] = EOS, **options) -> HFSampler:
        return HFSampler(model, vocab, eos, **options)

    return build


@pytest.fixture(scope="module")
def requests(vocab):
    """`requests(sampling, max_new_tokens)`: contexts of all LENGTHS, each with a seed of its own."""
    rng = np.random.default_rng(0)
    contexts = [rng.integers(3, vocab, length).astype(np.int32) for length in LENGTHS]

    def build(sampling: Sampling = PLAIN, max_new_tokens: int = 25) -> list[SampleRequest]:
        return [SampleRequest(context, 100 + i, max_new_tokens, sampling) for i, context in enumerate(contexts)]

    return build


async def chunks_of(sampler: HFSampler, request: SampleRequest) -> list[Chunk]:
    return [chunk async for chunk in sampler.generate(request)]


def all_chunks(sampler: HFSampler, requests: Sequence[SampleRequest]) -> list[list[Chunk]]:
    async def run() -> list[list[Chunk]]:
        return await asyncio.gather(*(chunks_of(sampler, request) for request in requests))

    return asyncio.run(run())


def sample(sampler: HFSampler, requests: Sequence[SampleRequest]) -> list[Turn]:
    return [Turn.of(r.context_ids, chunks) for r, chunks in zip(requests, all_chunks(sampler, requests), strict=True)]


def logits_of(model, turn: Turn, vocab: int) -> torch.Tensor:
    """[n, V] before each sampled token, by a plain forward over this turn alone."""
    ids = torch.from_numpy(np.concatenate([turn.context_ids, turn.sampled_ids])).long()[None]
    with torch.no_grad():
        return model(ids).logits[0, len(turn.context_ids) - 1 : -1, :vocab].double()


def check_logps(model, turns: Sequence[Turn], vocab: int, temperature: float = 1.0, atol: float = 1e-5):
    for turn in turns:
        logp = (logits_of(model, turn, vocab) / temperature).log_softmax(-1)
        exact = logp.gather(-1, torch.from_numpy(turn.sampled_ids).long()[:, None])[:, 0]
        np.testing.assert_allclose(turn.sampler_logps, exact, rtol=0, atol=atol)


@pytest.fixture
def decoded(monkeypatch):
    """`decoded(sampler)`: a list that gets the number of rows of each decoding forward pass."""

    def watch(sampler: HFSampler) -> list[int]:
        rows: list[int] = []
        append = sampler._decode
        monkeypatch.setattr(sampler, "_decode", lambda: (rows.append(len(sampler._rows)), append()))
        return rows

    return watch


@pytest.fixture(scope="module")
def one_at_a_time(student, vocab, requests):
    return sample(HFSampler(student, vocab, EOS, max_rows=1, chunk_tokens=16), requests())


@pytest.mark.parametrize("chunk_tokens", [1, 4, 16])
@pytest.mark.parametrize("max_rows", [1, 3, 8, 64])
def test_rollouts_do_not_depend_on_their_neighbours(make, requests, one_at_a_time, max_rows, chunk_tokens):
    turns = sample(make(max_rows=max_rows, chunk_tokens=chunk_tokens), requests())
    for ours, alone in zip(turns, one_at_a_time, strict=True):
        assert ours.sampled_ids.tolist() == alone.sampled_ids.tolist()
        assert ours.finish == alone.finish
        np.testing.assert_allclose(ours.sampler_logps, alone.sampler_logps, rtol=0, atol=1e-5)


@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.0])
def test_log_probs_are_those_of_a_plain_forward(make, requests, student, vocab, temperature):
    turns = sample(make(max_rows=8), requests(Sampling(temperature=temperature)))
    check_logps(student, turns, vocab, temperature)
    assert all(turn.sampled_ids.max() < vocab for turn in turns)  # never a row of padding
    assert turns[0].sampled_ids.dtype == np.int32
    assert turns[0].sampler_logps.dtype == np.float32


def test_the_noise_of_a_token_is_that_of_its_seed_and_position(make, requests, student, vocab):
    asked = requests()
    for request, turn in zip(asked, sample(make(max_rows=5), asked)):
        n = len(turn.sampled_ids)
        noise = uniform(np.full(n, request.seed), np.arange(n))
        ids, _ = draw(logits_of(student, turn, vocab).float(), torch.from_numpy(noise), PLAIN)
        assert turn.sampled_ids.tolist() == ids.tolist()


def test_a_turn_ends_at_any_eos_or_at_its_own_length(make, requests):
    asked = [
        SampleRequest(request.context_ids, request.seed, 1 + i * 5, request.sampling)
        for i, request in enumerate(requests() * 3)
    ]
    turns = sample(make(max_rows=8), asked)
    for request, turn in zip(asked, turns):
        assert not np.isin(turn.sampled_ids[:-1], EOS).any()
        ended = turn.sampled_ids[-1] in EOS
        assert turn.finish == ("eos" if ended else "length")
        assert ended or len(turn.sampled_ids) == request.max_new_tokens
    assert {turn.sampled_ids[-1] for turn in turns if turn.finish == "eos"} == set(EOS)
    assert any(turn.finish == "length" for turn in turns)


def test_greedy_equals_generate(student, requests):
    asked = requests(Sampling(temperature=0.0), max_new_tokens=20)
    rows = student.config.vocab_size
    for request, turn in zip(asked, sample(HFSampler(student, rows, EOS, max_rows=5), asked)):
        context = torch.from_numpy(request.context_ids).long()[None]
        mask = torch.ones_like(context)
        theirs = student.generate(context, attention_mask=mask, do_sample=False, max_new_tokens=20, eos_token_id=list(EOS))
        assert turn.sampled_ids.tolist() == theirs[0, context.shape[1] :].tolist()
        assert not turn.sampler_logps.any()


@pytest.mark.parametrize("sampling", [Sampling(0.7, top_p=0.6), Sampling(top_k=3), Sampling(1.5, top_p=0.9, top_k=8)])
def test_log_probs_are_those_of_the_truncated_distribution(make, requests, student, vocab, sampling):
    for turn in sample(make(max_rows=8), requests(sampling)):
        values, order = (logits_of(student, turn, vocab) / sampling.temperature).log_softmax(-1).sort(descending=True)
        probs = values.exp()
        if sampling.top_k:
            probs[:, sampling.top_k :] = 0
            probs /= probs.sum(-1, keepdim=True)
        probs[probs.cumsum(-1) - probs >= sampling.top_p] = 0
        probs /= probs.sum(-1, keepdim=True)
        place = (order == torch.from_numpy(turn.sampled_ids).long()[:, None]).int().argmax(-1, keepdim=True)
        np.testing.assert_allclose(turn.sampler_logps, probs.gather(-1, place)[:, 0].log(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("chunk_tokens", [1, 4])
def test_chunks_come_as_they_are_decoded(make, requests, chunk_tokens):
    sampler = make(max_rows=4, chunk_tokens=chunk_tokens)
    sampler.version = 5
    for chunks in all_chunks(sampler, requests()):
        assert all(1 <= len(chunk.sampled_ids) <= chunk_tokens + 1 for chunk in chunks)
        assert [chunk.finish is None for chunk in chunks] == [True] * (len(chunks) - 1) + [False]
        assert {chunk.version for chunk in chunks} == {5}


def test_the_students_own_most_likely_tokens(make, requests, student, vocab):
    for turn in sample(make(max_rows=5, chunk_tokens=3), requests(Sampling(0.7, top_k=2, num_topk=6))):
        top = (logits_of(student, turn, vocab) / 0.7).log_softmax(-1).topk(6)
        assert turn.topk_ids is not None
        assert turn.topk_logps is not None
        assert turn.topk_ids.tolist() == top.indices.tolist()
        np.testing.assert_allclose(turn.topk_logps, top.values, rtol=0, atol=1e-5)


def test_turns_of_different_samplings_are_all_served(make, requests, student, vocab):
    warm, cold = requests(Sampling(temperature=2.0)), requests(Sampling(temperature=0.5))
    mixed = [request for pair in zip(warm, cold) for request in pair]
    turns = sample(make(max_rows=8), mixed)
    check_logps(student, turns[::2], vocab, 2.0)
    check_logps(student, turns[1::2], vocab, 0.5)


def test_cost_follows_live_tokens(make, requests, decoded):
    asked = [
        SampleRequest(request.context_ids, request.seed, 3 if i % 4 else 120, request.sampling)
        for i, request in enumerate(requests())
    ]
    sampler = make(eos=[], max_rows=12)
    rows = decoded(sampler)
    sample(sampler, asked)
    assert rows[0] == 12
    assert rows[-1] == 3
    live = sum(request.max_new_tokens - 1 for request in asked)
    assert sum(rows) <= 1.2 * live


def test_waiting_turns_take_the_place_of_finished_ones(make, requests, decoded):
    sampler = make(eos=[], max_rows=4)
    rows = decoded(sampler)
    sample(sampler, requests(max_new_tokens=10))
    assert len(rows) <= 3 * 10
    assert max(rows) == 4


def test_long_prompts_fill_all_rows(make, requests, decoded, monkeypatch):
    """Though a single prefill takes only a few of them."""
    monkeypatch.setattr(hf_sampler, "PREFILL_TOKENS", 80)
    sampler = make(eos=[], max_rows=16)
    rows = decoded(sampler)
    context = requests()[5].context_ids
    turns = sample(sampler, [SampleRequest(context, seed, 40, Sampling()) for seed in range(16)])
    assert max(rows) == 16
    assert len({tuple(turn.sampled_ids) for turn in turns}) == 16


def test_closing_early_frees_the_row(make, requests, decoded):
    sampler = make(eos=[], max_rows=2, chunk_tokens=2)
    rows = decoded(sampler)
    asked = requests(max_new_tokens=60)

    async def first_chunk(request: SampleRequest) -> Chunk:
        async with aclosing(sampler.generate(request)) as chunks:  # type: ignore[type-var]
            async for chunk in chunks:
                return chunk
        raise AssertionError

    async def run():
        return await asyncio.gather(first_chunk(asked[0]), first_chunk(asked[1]), chunks_of(sampler, asked[2]))

    first, _, complete = asyncio.run(run())
    assert first.finish is None
    assert sum(len(chunk.sampled_ids) for chunk in complete) == 60
    assert sum(rows) < 60 + 3 * 4
    assert not sampler.busy


def test_a_turn_closed_before_it_began_is_never_decoded(make, requests, decoded):
    sampler = make(max_rows=1)
    asked = requests()

    async def run():
        tasks = [asyncio.create_task(chunks_of(sampler, request)) for request in asked[:3]]
        await asyncio.sleep(0)
        tasks[1].cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    results = asyncio.run(run())
    assert [isinstance(result, BaseException) for result in results] == [False, True, False]
    assert not sampler.busy


@pytest.mark.parametrize("prompts", [False, True])
@pytest.mark.parametrize("number", [1, 2, 3])
def test_an_error_of_the_model_reaches_every_caller(make, requests, number, prompts):
    """In a forward pass over prompts as well as in one that decodes."""
    sampler = make(max_rows=3)
    calls = 0

    def fail(module, args, kwargs):
        nonlocal calls
        calls += (kwargs["input_ids"].shape[1] > 1) == prompts
        if calls == number:
            raise RuntimeError("out of memory")

    handle = decoder(sampler.model).register_forward_pre_hook(fail, with_kwargs=True)

    async def run():
        everyone = asyncio.gather(*(chunks_of(sampler, r) for r in requests()), return_exceptions=True)
        return await asyncio.wait_for(everyone, 30)

    results = asyncio.run(run())
    handle.remove()
    assert any(isinstance(result, RuntimeError) for result in results)
    assert all(isinstance(result, RuntimeError) or result[-1].finish for result in results)  # type: ignore[index]
    assert not sampler.busy
    assert len(sample(sampler, requests())) == len(LENGTHS)


def test_new_weights_of_a_shared_model_are_sampled_at_once(micro_model, make, requests, vocab):
    student = micro_model(0)
    sampler = make(student, max_rows=8)
    assert sampler.model is student
    sample(sampler, requests())
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    sampler.sync(student, version=1)
    check_logps(student, sample(sampler, requests()), vocab)


def test_a_copy_in_another_type_follows_at_the_sync(micro_model, make, requests, vocab):
    student = micro_model(0)
    sampler = make(student, max_rows=8, dtype=torch.bfloat16)
    assert {p.dtype for p in sampler.model.parameters()} == {torch.bfloat16}
    assert {p.dtype for p in student.parameters()} == {torch.float32}
    assert all(p.requires_grad for p in student.parameters())
    before = sample(sampler, requests())
    old = copy.deepcopy(student)
    with torch.no_grad():
        student.lm_head.weight.neg_()
    check_logps(old, sample(sampler, requests()), vocab, atol=0.3)
    sampler.sync(student, version=7)
    after = sample(sampler, requests())
    check_logps(student, after, vocab, atol=0.3)
    assert after[0].versions == ((0, 7),)
    assert [turn.sampled_ids.tolist() for turn in after] != [turn.sampled_ids.tolist() for turn in before]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_copy_is_gone_from_release_to_sync(micro_model, make, requests, dtype):
    student = micro_model(0)
    sampler = make(student, max_rows=8, dtype=dtype, copy_weights=True)
    before = sample(sampler, requests())
    sampler.release()
    assert not any(p.untyped_storage().nbytes() for p in sampler.model.parameters())
    assert all(p.untyped_storage().nbytes() for p in student.parameters())
    with pytest.raises(AssertionError, match="between release and sync"):
        sample(sampler, requests())
    sampler.sync(student, version=1)
    after = sample(sampler, requests())
    assert [turn.sampled_ids.tolist() for turn in after] == [turn.sampled_ids.tolist() for turn in before]


def test_a_model_that_is_shared_keeps_its_weights(micro_model, make):
    student = micro_model(0)
    make(student).release()
    assert all(p.untyped_storage().nbytes() == p.nbytes for p in student.parameters())


def test_a_copy_in_another_type_keeps_exact_positions(make, student):
    rotary = decoder(make(dtype=torch.bfloat16).model).rotary_emb
    assert torch.equal(rotary.inv_freq, decoder(student).rotary_emb.inv_freq)  # type: ignore[arg-type]


def test_no_sync_while_turns_are_decoded(make, requests, student):
    sampler = make(chunk_tokens=1)

    async def run():
        async with aclosing(sampler.generate(requests()[3])) as chunks:  # type: ignore[type-var]
            await anext(chunks)
            sampler.sync(student, version=1)

    with pytest.raises(AssertionError, match="while turns are being decoded"):
        asyncio.run(run())


def test_dropout_is_off_while_sampling_and_back_afterwards(micro_model, make, requests, vocab):
    student = micro_model(0, attention_dropout=0.5)
    student.train()
    turns = sample(make(student), requests())
    assert student.training
    check_logps(student.eval(), turns, vocab)


def test_eager_attention(micro_model, make, requests, one_at_a_time):
    turns = sample(make(micro_model(0, attn_implementation="eager"), max_rows=8), requests())
    assert [t.sampled_ids.tolist() for t in turns] == [t.sampled_ids.tolist() for t in one_at_a_time]


def test_attention_it_cannot_decode_is_refused(micro_model, make, vocab):
    config = MistralConfig(hidden_size=32, intermediate_size=32, num_hidden_layers=1, vocab_size=45, sliding_window=8)
    with pytest.raises(UserError, match=r"student\.model: .* full attention in every layer; .* a sliding window"):
        make(MistralForCausalLM(config))
    mixed = micro_model(0)
    mixed.config.layer_types = ["full_attention", "sliding_attention"]
    with pytest.raises(UserError, match="this model has sliding_attention"):
        make(mixed)
    flash = micro_model(0)
    flash.config._attn_implementation = "flash_attention_2"
    with pytest.raises(UserError, match=r"student\.attention: .* not flash_attention_2"):
        make(flash)


def test_an_empty_context_is_refused(make):
    with pytest.raises(AssertionError, match="empty context"):
        sample(make(), [SampleRequest(np.zeros(0, np.int32), 0, 5, Sampling())])


@pytest.mark.parametrize("max_rows", [1, 3, 64])
def test_the_presence_penalty_counts_sampled_tokens_alone(make, requests, student, vocab, max_rows):
    """Log-probs are those of the logits less the penalty of what the turn holds; the prompt's tokens are free."""
    penalty, temperature = 2.0, 0.7
    sampling = Sampling(temperature, presence_penalty=penalty)
    for turn in sample(make(max_rows=max_rows), requests(sampling)):
        logits = logits_of(student, turn, vocab)
        for i, token in enumerate(turn.sampled_ids):
            held = sorted(set(turn.sampled_ids[:i].tolist()))
            row = logits[i].clone()
            row[held] -= penalty
            exact = (row / temperature).log_softmax(-1)[token]
            assert turn.sampler_logps[i] == pytest.approx(float(exact), abs=1e-5)


def test_two_samplers_of_one_model_that_learns_never_decode_in_training_mode(make, requests, micro_model):
    """As the student's and that of what is beneath its adapters: one ends while the other goes on."""
    model = micro_model(0).train()
    modes: list[bool] = []
    hook = decoder(model).register_forward_pre_hook(lambda module, args: modes.append(module.training))
    first, second = (make(model, eos=[10**6], chunk_tokens=4) for _ in range(2))

    async def run() -> None:
        async def later() -> None:
            while not modes:
                await asyncio.sleep(0)
            await chunks_of(second, requests(max_new_tokens=25)[1])

        await asyncio.gather(chunks_of(first, requests(max_new_tokens=12)[0]), later())

    asyncio.run(run())
    hook.remove()
    assert len(modes) >= 12 + 25
    assert not any(modes)
    assert model.training
