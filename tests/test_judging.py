"""A rollout of several turns judged as it was sampled: by the student's own tokens in one piece, or by another tokenizer."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from opd.alignment.aligner import Aligner
from opd.episodes import Reply
from opd.judging import Judged, judge, read_hidden
from opd.records import Array, Prompt, Rollout, ScoreRequest, Turn
from opd.teachers.hf import HFModel, HFTeacher, View
from opd.teachers.pool import Tally, TeacherPool

FLOOR = -5.6  # some of the log-probs lie below
SIZES = [(3, 2), (2, 4), (4, 3), (5, 0)]
EPISODES = [{}, {"reused": 2}, {"rerender": True}, {"rerender": True, "reused": 1}]
CPU = torch.device("cpu")


class Asked(Tally):
    """Notes what is asked."""

    def __init__(self, pool: TeacherPool) -> None:
        super().__init__(pool)
        self.requests: list[ScoreRequest] = []

    async def score(self, model, request):
        self.requests.append(request)
        return await super().score(model, request)


def turn_by_turn(rollout: Rollout) -> list[Rollout]:
    """Each turn that is not reused, as a rollout of its own."""
    return [replace(rollout, turns=(turn,)) for turn in rollout.turns if turn.trainable.any()]


@pytest.fixture(scope="module")
def pool(model_folder, vocab):
    model = HFModel("teachers.t.model", str(model_folder(1)), dtype="float64", device=CPU, chunk_bytes=2**20)
    return TeacherPool({"t": HFTeacher("t", model, View(vocab))})


@pytest.mark.parametrize("settings", EPISODES, ids=str)
def test_an_episode_is_judged_as_its_turns(pool, random_episode, settings):
    rollout = random_episode(0, 6, *SIZES, **settings)
    models = Asked(pool)
    judged = asyncio.run(judge(models, "t", rollout, temperature=0.7, floor=FLOOR))
    alone = [asyncio.run(judge(pool, "t", one, temperature=0.7, floor=FLOOR)) for one in turn_by_turn(rollout)]
    assert judged.split is judged.mean
    assert judged.unit_starts is None
    assert judged.mask.tolist() == rollout.trainable.tolist()
    assert not judged.split[~rollout.trainable].any()
    new = rollout.trainable
    np.testing.assert_allclose(judged.split[new], np.concatenate([one.split for one in alone]), atol=1e-6)
    assert judged.floored[new].tolist() == np.concatenate([one.floored for one in alone]).tolist()
    assert 0 < judged.floored.sum() < new.sum()
    assert len(models.requests) == (len(alone) if settings.get("rerender") else 1)


@pytest.mark.parametrize("settings", EPISODES, ids=str)
def test_hidden_states_of_an_episode_are_those_of_its_turns(pool, random_episode, settings):
    rollout = random_episode(0, 6, *SIZES, **settings)
    hidden = asyncio.run(read_hidden(pool, "t", rollout))
    alone = [asyncio.run(read_hidden(pool, "t", one)) for one in turn_by_turn(rollout)]
    assert hidden.head == "t"
    assert len(hidden.states) == (len(alone) if settings.get("rerender") else 1)
    exact = torch.cat([state for one in alone for state in one.states])
    assert exact.dtype == torch.float64
    torch.testing.assert_close(torch.cat(hidden.states), exact, rtol=0, atol=1e-12)
    assert len(exact) == rollout.trainable.sum()


def test_the_students_share_of_a_unit_is_its_mean():
    none = np.zeros(4, np.float32)
    judged = Judged(none, none, none == 0, none > 0, np.array([1, 0, 0, 1], bool))
    assert judged.own(np.array([-1.0, -2.0, -6.0, -0.5])).tolist() == [-3.0, -3.0, -3.0, -0.5]
    assert replace(judged, unit_starts=None).own(np.array([-1.0, -2.0])).tolist() == [-1.0, -2.0]


@pytest.fixture(scope="module")
def student(byte_tokenizer):
    return byte_tokenizer("ab 0a bc")


@pytest.fixture(scope="module")
def other(byte_model, student):
    """A teacher that reads with another tokenizer."""
    folder = byte_model(1, "ab cd abcd bc 0a")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = HFModel("teachers.t.model", folder, dtype="float64", device=CPU, chunk_bytes=2**20)
    eos = (student.eos_token_id,)
    aligner = Aligner(student, tokenizer, student_eos=eos, teacher_eos=(tokenizer.eos_token_id,))
    teacher = HFTeacher("t", model, View(len(tokenizer)))
    return TeacherPool(
        {"t": teacher}, aligners={"t": aligner}, read=lambda ids: Reply(student.decode(ids, skip_special_tokens=True))
    )


def sampled(student, text: str) -> Array:
    return np.array([*student.encode(text, add_special_tokens=False), student.eos_token_id], np.int32)


def episode_of(student, *texts: str, reused: int = 0) -> Rollout:
    """Replies, each followed by the observation "dd"."""
    turns = []
    for number, text in enumerate(texts):
        ids = sampled(student, text)
        num_reused = len(ids) if number < reused else 0
        observed = ({"role": "user", "content": "dd"},)
        context = np.array([1], np.int32)  # the student's: a teacher of another tokenizer does not see it
        turns.append(Turn(context, ids, np.zeros(len(ids), np.float32), "eos", num_reused=num_reused, observations=observed))
    return Rollout(Prompt(id="p", messages=({"role": "user", "content": "abcd"},)), 0, tuple(turns))


def judged_by(models, rollout: Rollout) -> Judged:
    return asyncio.run(judge(models, "t", rollout, temperature=1.0))


def test_another_tokenizer_reads_each_turn_after_those_before_it(other, student):
    rollout = episode_of(student, "abcd0", "bcab", "0abc", reused=1)
    first, *turns = rollout.turns
    models = Asked(other)
    judged = judged_by(models, rollout)
    assert len(models.requests) == 2  # the reused turn is part of the context alone
    size = len(first.sampled_ids)
    assert not judged.split[:size].any()
    assert judged.mask.tolist() == rollout.trainable.tolist()
    assert judged.unit_starts is not None
    assert judged.unit_starts[:size].all()
    messages, start = list(rollout.prompt.messages), size
    for before, turn in zip((first, *turns), turns):
        reply = {"role": "assistant", "content": student.decode(before.sampled_ids, skip_special_tokens=True)}
        messages += [reply, *before.observations]
        alone = judged_by(other, Rollout(Prompt(id="p", messages=tuple(messages)), 0, (turn,)))
        stop = start + len(turn.sampled_ids)
        np.testing.assert_allclose(judged.split[start:stop], alone.split, atol=1e-6)
        np.testing.assert_allclose(judged.mean[start:stop], alone.mean, atol=1e-6)
        assert alone.unit_starts is not None
        assert judged.unit_starts[start:stop].tolist() == alone.unit_starts.tolist()
        start = stop


def test_a_unit_that_begins_in_the_reused_part_is_not_judged(other, student):
    rollout = episode_of(student, "cdabcd0ab")
    (turn,) = rollout.turns
    whole = judged_by(other, rollout)
    assert whole.unit_starts is not None
    assert not whole.unit_starts[1:].all()  # so that some beginnings end inside of a unit
    for num_reused in range(1, len(turn.sampled_ids)):
        part = judged_by(other, replace(rollout, turns=(replace(turn, num_reused=num_reused),)))
        first = next(i for i in range(num_reused, len(turn.sampled_ids) + 1) if [*whole.unit_starts, True][i])
        assert part.mask.tolist() == [whole.mask[i] and i >= first for i in range(len(turn.sampled_ids))]
        np.testing.assert_array_equal(part.split[part.mask], whole.split[part.mask])
