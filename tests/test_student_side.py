"""The student's side: contexts, the bytes of its tokens, and what it writes when asked."""

import asyncio

import numpy as np
import pytest

from opd.contexts import Contexts
from opd.errors import UserError
from opd.records import Prompt, SampleRequest, Sampling, Turn
from opd.student_side import StudentSide
from opd.students.hf_sampler import HFSampler

PROMPT = Prompt("p", ({"role": "user", "content": "abc"},))  # six tokens: BOS, user, three letters, assistant
EOS = (2, *range(5, 12))  # letters end a turn as well, so that a model with random weights comes to its end


@pytest.fixture(scope="module")
def samplers(micro_model, vocab):
    return {"student": HFSampler(micro_model(0), vocab, EOS), "start": HFSampler(micro_model(1), vocab, EOS)}


@pytest.fixture
def side(micro_tokenizer, samplers):
    """`side(max_context)`."""
    return lambda max_context=64: StudentSide(Contexts(micro_tokenizer, max_context, 32, EOS), samplers)


def written(
    side: StudentSide, seed: int = 0, longest: int = 12, temperature: float = 1.0, model: str = "student"
) -> tuple[str, int]:
    found = asyncio.run(side.write(model, PROMPT, seed, longest, temperature))
    assert found is not None
    return found


def sampled(sampler: HFSampler, context, seed: int, longest: int, temperature: float) -> Turn:
    async def run() -> Turn:
        request = SampleRequest(context, seed, longest, Sampling(temperature))
        return Turn.of(context, [chunk async for chunk in sampler.generate(request)])

    return asyncio.run(run())


def test_a_context_is_the_prompt_where_so_much_more_fits(side):
    ids = side().context(PROMPT, 0)
    assert len(ids) == 6
    assert side(16).context(PROMPT, 10).tolist() == ids.tolist()
    assert side(16).context(PROMPT, 11) is None
    assert side(6).context(PROMPT, 0) is None  # no room for a completion


def test_tokens_are_spelt_by_what_they_add(side, micro_tokenizer):
    ids = np.array([*micro_tokenizer("ab0").input_ids, 2, 0], np.int32)  # EOS and padding are special tokens
    assert side().spell(ids) == [b"a", b"b", b"0", b"", b""]
    assert side().spell(ids[:0]) == []


def test_a_tokenizer_that_is_not_a_fast_one_cannot_be_spelt(samplers):
    slow = object()
    with pytest.raises(UserError, match=r"student\.model: its tokenizer is not a fast one"):
        StudentSide(Contexts(slow, 64, 32, EOS), samplers).spell(np.array([1]))  # type: ignore[arg-type]


@pytest.mark.parametrize("model", ["student", "start"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_it_writes_what_the_model_samples_without_special_tokens(side, samplers, micro_tokenizer, model, temperature):
    for seed in range(4):
        turn = sampled(samplers[model], side().context(PROMPT, 0), seed, 12, temperature)
        text, num_tokens = written(side(), seed, 12, temperature, model)
        assert text == "".join(piece.decode() for piece in side().spell(turn.sampled_ids))
        assert num_tokens == len(turn.sampled_ids)
        assert "<" not in text


def test_a_draw_follows_from_its_seed_and_greedily_from_nothing(side):
    draws = {written(side(), seed) for seed in range(6)}
    assert len(draws) > 2
    assert {written(side(), 3) for _ in range(2)} < draws
    assert len({written(side(), seed, temperature=0.0) for seed in range(6)}) == 1


def test_it_writes_as_much_as_it_may_and_as_has_room(side):
    longest = max(written(side(), seed, 12)[1] for seed in range(20))
    assert 3 < longest <= 12
    assert max(written(side(9), seed, 12)[1] for seed in range(20)) == 3
    assert max(written(side(), seed, 2)[1] for seed in range(20)) == 2
    assert asyncio.run(side(6).write("student", PROMPT, 0, 12, 1.0)) is None


def test_it_is_busy_while_one_of_the_models_decodes(side, samplers):
    async def run() -> list[bool]:
        one = side()
        seen = [one.busy]
        task = asyncio.create_task(one.write("start", PROMPT, 0, 12, 1.0))
        while not task.done():
            await asyncio.sleep(0)
            seen.append(one.busy)
        await task
        await asyncio.sleep(0)
        return [*seen, one.busy]

    before, *during, after = asyncio.run(run())
    assert (before, after) == (False, False)
    assert any(during)
