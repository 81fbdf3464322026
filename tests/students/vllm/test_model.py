"""A student behind the engine's pipe, where a fixed table plays vLLM: chunks, draws outside the vocabulary, syncs."""

import asyncio
from contextlib import aclosing

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from opd.records import Turn
from opd.students.server.options import StudentOptions
from opd.students.vllm.model import VLLMStudent
from opd.students.weights import BadWeights, write_weights
from opd.teachers.server.options import VLLMOptions
from tests.students.server.conftest import request
from tests.teachers.vllm.conftest import FAKE, engine_log, fake_python

__all__ = ["engine_log", "fake_python"]
HANGING = 34


@pytest.fixture
def load(model_folder, fake_python):
    loaded = []

    def run(**options) -> VLLMStudent:
        own = VLLMOptions(fake_python, max_model_len=64)
        loaded.append(VLLMStudent.load(StudentOptions(str(model_folder(0)), backend="vllm", vllm=own, **options)))
        return loaded[-1]

    assert FAKE.exists()
    yield run
    for model in loaded:
        model.close()


@pytest.fixture
def weights(model_folder, tmp_path):
    def write(number=0, vocab=41):
        student = AutoModelForCausalLM.from_pretrained(model_folder(number), dtype=torch.float32)
        return tmp_path / "w", write_weights(student, tmp_path / "w", torch.float32, vocab)

    return write


def turn(model, asked):
    async def run():
        return [chunk async for chunk in model.generate(asked)]

    chunks = asyncio.run(run())
    return chunks, Turn.of(asked.context_ids, chunks)


def test_turns_come_in_chunks(load, weights):
    model = load(chunk_tokens=2)
    asyncio.run(model.take(*weights()))
    chunks, whole = turn(model, request(9))
    assert [len(chunk.sampled_ids) for chunk in chunks] == [2, 2, 1]
    assert [chunk.finish for chunk in chunks] == [None, None, "eos"]
    assert (whole.sampler_logps <= 0).all()
    assert not model.busy
    assert model.num_sampled == 5


def test_what_is_no_token_is_drawn_again(load, weights, monkeypatch):
    """The engine's first two turns have a padded row as their second token."""
    path, digest = weights()
    content = path.read_bytes()
    plain = load(chunk_tokens=2)
    asyncio.run(plain.take(path, digest))
    monkeypatch.setenv("OPD_FAKE", "outside")
    other = load(chunk_tokens=2)
    path.write_bytes(content)
    asyncio.run(other.take(path, digest))
    asked, drawn = [], VLLMStudent._drawn

    def watched(self, one):
        asked.append(one)
        return drawn(self, one)

    monkeypatch.setattr(VLLMStudent, "_drawn", watched)
    _, expected = turn(plain, request(4))
    asked.clear()
    _, found = turn(other, request(4))
    np.testing.assert_array_equal(found.sampled_ids, expected.sampled_ids)
    assert [one.first for one in asked] == [0, 1, 2]
    assert len({one.seed for one in asked}) == 3
    assert found.finish == "length"


def test_other_weights_are_refused(load, weights, tmp_path):
    model = load()
    path, digest = weights()
    asyncio.run(model.take(path, digest))
    (tmp_path / "bad").write_bytes(b"nonsense")
    with pytest.raises(BadWeights):
        asyncio.run(model.take(tmp_path / "bad", "0" * 32))
    assert model.weights == digest
    assert model.info()["weights"] == digest


def test_closing_a_turn_aborts_it(load, weights, engine_log):
    model = load()
    asyncio.run(model.take(*weights()))

    async def run():
        asked = request(9, context_ids=np.array([HANGING, 3], np.int32))
        async with aclosing(model.generate(asked)) as chunks:
            waiting = asyncio.ensure_future(anext(chunks))
            await asyncio.to_thread(engine_log, "hangs")
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)

    asyncio.run(run())
    engine_log("aborted")
    assert not model.busy
