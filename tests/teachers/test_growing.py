"""A rollout judged while it grows says early what the whole says at the end, also where tokens change under way."""

import asyncio
import math

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from opd.alignment.aligner import Aligner
from opd.judging import judge
from opd.records import Array, Prompt, Rollout, Turn
from opd.teachers.hf import HFModel, HFTeacher, View
from opd.teachers.pool import TeacherPool

PROMPT = Prompt(id="p", messages=({"role": "user", "content": "abcd"},))


class Counting:
    """A teacher that notes how many tokens it is asked about."""

    def __init__(self, teacher: HFTeacher) -> None:
        self.teacher, self.num_asked, self.rewinds = teacher, 0, 0
        self._held = 0

    async def score(self, request):
        self.num_asked += len(request.token_ids)
        self.rewinds += request.stream is not None and 0 < request.keep_tokens < self._held
        self._held = request.keep_tokens + request.num_tokens
        return await self.teacher.score(request)

    def __getattr__(self, name):
        return getattr(self.teacher, name)


@pytest.fixture(scope="module")
def student(byte_tokenizer):
    return byte_tokenizer("ab 0a bc")


@pytest.fixture(scope="module")
def pool(byte_model, student):
    """A teacher whose merges reach over several of the student's tokens."""
    folder = byte_model(1, "ab cd abcd bc 0a")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = HFModel("teachers.t.model", folder, device=torch.device("cpu"), chunk_bytes=2**20)
    eos = (student.eos_token_id,)
    aligner = Aligner(student, tokenizer, student_eos=eos, teacher_eos=(tokenizer.eos_token_id,))
    rows = model.head.weight.shape[0]
    assert len(tokenizer) < rows
    return TeacherPool({"t": Counting(HFTeacher("t", model, View(len(tokenizer))))}, aligners={"t": aligner})  # type: ignore


def sampled(student, text: str, eos: bool = True) -> Array:
    return np.array([*student.encode(text, add_special_tokens=False), *[student.eos_token_id] * eos], np.int32)


def whole(pool: TeacherPool, ids: Array):
    turn = Turn(np.array([1], np.int32), ids, np.zeros(len(ids), np.float32), "eos")
    return asyncio.run(judge(pool, "t", Rollout(PROMPT, 0, (turn,)), temperature=1.0))


async def grown(pool: TeacherPool, ids: Array, sizes) -> list[Array]:
    scoring = pool.growing("t", PROMPT, np.array([1], np.int32), 1.0)
    found = [await scoring.logps(ids[:size]) for size in sizes]
    scoring.close()
    return found


@pytest.mark.parametrize("seed", range(6))
def test_what_is_said_early_is_true_at_the_end(pool, student, seed):
    rng = np.random.default_rng(seed)
    text = "".join(rng.choice(list("abcd0"), 60))
    ids = sampled(student, text)
    judged = whole(pool, ids)
    sizes = np.unique(np.append(rng.integers(1, len(ids), 12), len(ids)))
    for size, logps in zip(sizes, asyncio.run(grown(pool, ids, sizes))):
        assert len(logps) <= size
        assert np.isfinite(logps).all()
        np.testing.assert_allclose(logps, judged.split[: len(logps)], atol=1e-5)
    assert len(logps) == len(ids)  # an EOS settles everything


def test_tokens_that_change_are_dropped_and_sent_anew(pool, student):
    teacher = pool.teachers["t"]
    ids = sampled(student, "abcd" * 10)
    before = teacher.rewinds, teacher.num_asked
    found = asyncio.run(grown(pool, ids, range(1, len(ids) + 1)))
    assert teacher.rewinds > before[0]
    assert teacher.num_asked - before[1] < 4 * len(ids)  # the whole each time would be len(ids) / 2 as many
    np.testing.assert_allclose(found[-1], whole(pool, ids).split, atol=1e-5)


@pytest.mark.parametrize("room", [0, 7, 30])
def test_what_the_teachers_context_has_no_room_for_is_not_numbers(pool, student, room):
    teacher, aligner = pool.teachers["t"], pool.aligners["t"]
    num_context = len(aligner.context(PROMPT))
    eos = (student.eos_token_id,)
    short = Aligner(student, aligner._teacher, student_eos=eos, teacher_eos=eos, max_context=num_context + room)
    cut = TeacherPool({"t": teacher}, aligners={"t": short})
    ids = sampled(student, "abcd0a bc" * 8)
    judged = whole(cut, ids)
    for size, logps in zip((5, 20, 21, len(ids)), asyncio.run(grown(cut, ids, (5, 20, 21, len(ids))))):
        assert len(logps) <= size
        expected = np.where(judged.mask, judged.split, np.nan)[: len(logps)]
        np.testing.assert_allclose(logps, expected, atol=1e-5)
    assert (len(logps), judged.mask.all()) == (len(ids), False)


def test_settled_text_is_not_aligned_again(pool, student):
    aligner = pool.aligners["t"]
    ids = sampled(student, "abcd 0a bc" * 50, eos=False)
    scoring = pool.growing("t", PROMPT, np.array([1], np.int32), 1.0)
    given = []
    scoring._growing._align = lambda ids, *start, **options: given.append(len(ids)) or aligner.parts(ids, *start, **options)

    async def watch() -> None:
        for size in range(16, len(ids), 16):
            await scoring.logps(ids[:size])
        scoring.close()

    asyncio.run(watch())
    assert sum(given) < 6 * len(ids)  # the whole each time would be len(ids) / 32 as many


def test_tokens_without_a_counterpart_are_not_numbers(pool, student):
    user = student.convert_tokens_to_ids("<user>")
    assert pool.aligners["t"].special_table
    ids = np.concatenate([sampled(student, "abc", eos=False), [student.pad_token_id, user], sampled(student, "cd")])
    logps = asyncio.run(grown(pool, ids, [len(ids)]))[0]
    masked = ~whole(pool, ids).mask
    assert [math.isnan(value) for value in logps] == masked.tolist()
    assert not masked.all()
