"""Turns that follow on others read only what is new, and are what they would have been."""

import asyncio

import numpy as np
import pytest
import torch

from opd.models import decoder
from opd.records import SampleRequest, Sampling, Turn
from opd.students.hf_sampler import HFSampler
from opd.students.kept_turns import KeptTurns

EOS = (2, *range(5, 18))  # about a third of the tokens: turns are short
LENGTHS = (9, 3, 30, 14, 1, 22)
OBSERVED = np.array([20, 3, 21, 4], np.int32)


@pytest.fixture(scope="module")
def student(micro_model):
    return micro_model(0)


async def turn_of(sampler, context_ids, seed):
    request = SampleRequest(context_ids, seed, 30, Sampling(), episode=True)
    return Turn.of(context_ids, [chunk async for chunk in sampler.generate(request)])


async def episode(sampler, context_ids, seed, turns=4):
    """Each turn with four more tokens behind it."""
    found = []
    for number in range(turns):
        found.append(await turn_of(sampler, context_ids, 100 * seed + number))
        if found[-1].finish != "eos":
            break
        context_ids = np.concatenate([context_ids, found[-1].sampled_ids, OBSERVED])
    return found


def play(sampler, vocab):
    rng = np.random.default_rng(0)
    contexts = [rng.integers(3, vocab, length).astype(np.int32) for length in LENGTHS]

    async def run():
        return await asyncio.gather(*(episode(sampler, context, seed) for seed, context in enumerate(contexts)))

    return asyncio.run(run())


@pytest.fixture
def fed():
    """`fed(sampler)`: a list that gets the number of tokens, padding included, that each forward pass reads."""

    def watch(sampler):
        read = []
        decoder(sampler.model).register_forward_pre_hook(
            lambda module, args, kwargs: read.append(kwargs["input_ids"].numel()), with_kwargs=True
        )
        return read

    return watch


@pytest.mark.parametrize("options", [{}, {"max_rows": 2}, {"chunk_tokens": 3}, {"max_rows": 3, "chunk_tokens": 1}])
def test_turns_are_those_of_whole_contexts(student, vocab, options):
    kept = play(HFSampler(student, vocab, EOS, **options), vocab)
    whole = play(HFSampler(student, vocab, EOS, max_kept_bytes=0), vocab)
    assert sum(len(turns) for turns in whole) > 15
    for mine, other in zip(kept, whole, strict=True):
        for turn, same in zip(mine, other, strict=True):
            assert turn.sampled_ids.tolist() == same.sampled_ids.tolist()
            np.testing.assert_allclose(turn.sampler_logps, same.sampler_logps, atol=1e-5)
            assert turn.finish == same.finish


def test_only_what_is_new_is_read(micro_model, vocab, fed):
    samplers = [HFSampler(micro_model(0), vocab, EOS, max_kept_bytes=most) for most in (2**20, 0)]
    read = [fed(sampler) for sampler in samplers]
    for sampler in samplers:
        play(sampler, vocab)
    assert sum(read[0]) < 0.6 * sum(read[1])


def test_new_weights_read_everything_again(micro_model, vocab):
    student = micro_model(0)
    sampler = HFSampler(student, vocab, EOS)
    first = play(sampler, vocab)
    assert sampler._kept.num_bytes > 0  # of turns that nothing followed
    student.load_state_dict(micro_model(1).state_dict())
    sampler.sync(student, version=1)
    assert sampler._kept.num_bytes == 0

    async def second():
        context = np.concatenate([first[0][0].context_ids, first[0][0].sampled_ids, OBSERVED])
        return await turn_of(sampler, context, 7)

    turn = asyncio.run(second())
    ids = torch.from_numpy(np.concatenate([turn.context_ids, turn.sampled_ids])).long()
    with torch.no_grad():
        logps = student(ids[None]).logits[0, len(turn.context_ids) - 1 : -1, :vocab].log_softmax(-1)
    exact = logps.gather(-1, ids[len(turn.context_ids) :, None])[:, 0]
    np.testing.assert_allclose(turn.sampler_logps, exact.numpy(), atol=1e-5)


def layers(length, value=0.0):
    return [(torch.full((2, length, 4), value), torch.full((2, length, 4), value))]


def test_the_longest_beginning_is_taken_once():
    kept, ids = KeptTurns(2**20), np.arange(9, dtype=np.int32)
    kept.put(ids[:3], layers(3))
    kept.put(ids[:5], layers(5))
    kept.put(ids[::-1].copy(), layers(9))
    taken = [kept.take(ids) for _ in range(3)]
    assert [None if found is None else len(found.ids) for found in taken] == [5, 3, None]
    assert kept.take(ids[::-1].copy()) is None  # something must be new
    kept.clear()
    assert kept.num_bytes == 0


def test_it_stays_in_its_bound():
    one = KeptTurns(2**20)
    one.put(np.arange(3, dtype=np.int32), layers(3))
    size = one.num_bytes
    kept = KeptTurns(2 * size)
    for start in range(4):
        kept.put(np.arange(start, start + 3, dtype=np.int32), layers(3))
    assert kept.num_bytes == 2 * size
    found = [kept.take(np.arange(start, start + 4, dtype=np.int32)) for start in range(4)]
    assert [one is not None for one in found] == [False, False, True, True]
    assert kept.num_bytes == 0
