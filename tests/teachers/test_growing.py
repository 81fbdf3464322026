"""A rollout judged while it grows says early what the whole says at the end, also where tokens change under way."""

import asyncio
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from opd.alignment.aligner import Aligner
from opd.episodes import Reply
from opd.judging import judge
from opd.records import Array, Prompt, Rollout, Turn
from opd.teachers.growing import AlignedScoring, Scoring
from opd.teachers.hf import HFModel, HFTeacher, View
from opd.teachers.pool import Tally, TeacherPool
from opd.teachers.stream import StreamLost

NONE = np.zeros(0, np.int32)
PROMPT = Prompt(id="p", messages=({"role": "user", "content": "abcd"},))


class Counting:
    """A teacher that notes how many tokens it is sent and asked about."""

    def __init__(self, teacher: HFTeacher) -> None:
        self.teacher, self.num_requests, self.num_sent, self.num_asked, self.rewinds = teacher, 0, 0, 0, 0
        self._held = 0

    async def score(self, request):
        self.num_requests += 1
        self.num_sent += request.num_tokens
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
    rows = model.head.num_rows
    assert len(tokenizer) < rows
    return TeacherPool(
        {"t": Counting(HFTeacher("t", model, View(len(tokenizer))))},  # type: ignore[dict-item]
        aligners={"t": aligner},
        read=lambda ids: Reply(student.decode(ids, skip_special_tokens=True)),
    )


def sampled(student, text: str, eos: bool = True) -> Array:
    return np.array([*student.encode(text, add_special_tokens=False), *[student.eos_token_id] * eos], np.int32)


def whole(pool: TeacherPool, ids: Array):
    turn = Turn(np.array([1], np.int32), ids, np.zeros(len(ids), np.float32), "eos")
    return asyncio.run(judge(Tally(pool), "t", Rollout(PROMPT, 0, (turn,)), temperature=1.0))


async def grown(pool: TeacherPool, ids: Array, sizes) -> list[Array]:
    scoring = pool.growing("t", PROMPT, 1.0)
    scoring.begin((), np.array([1], np.int32), NONE)
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
    scoring = pool.growing("t", PROMPT, 1.0)
    scoring.begin((), np.array([1], np.int32), NONE)
    assert isinstance(scoring, AlignedScoring)
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


# --- Several turns ---

SIZES = [(7, 2), (5, 4), (6, 3), (4, 0)]
EPISODES = [{}, {"reused": 2}, {"rerender": True}, {"rerender": True, "reused": 2}]


@pytest.fixture(scope="module")
def own(model_folder, vocab):
    """A teacher that reads the student's own tokens."""
    model = HFModel("teachers.t.model", str(model_folder(1)), dtype="float64", device=torch.device("cpu"), chunk_bytes=2**20)
    return TeacherPool({"t": Counting(HFTeacher("t", model, View(vocab)))})  # type: ignore[dict-item]


async def followed(scoring: Scoring, rollout: Rollout, chunk: int) -> list[Array]:
    """What is said at the end of each turn that is not reused as a whole; asked after every so many tokens."""
    found = []
    for number, turn in enumerate(rollout.turns):
        if not turn.trainable.any():
            continue
        reused, size = turn.num_reused, len(turn.sampled_ids)
        scoring.begin(rollout.turns[:number], turn.context_ids, turn.sampled_ids[:reused])
        for end in (*range(reused + chunk, size, chunk), size):
            logps = await scoring.logps(turn.sampled_ids[:end])
            assert len(logps) <= end
        found.append(logps)
    scoring.close()
    return found


def judged_at_once(pool: TeacherPool, rollout: Rollout) -> Array:
    """[n], NaN where nothing is judged."""
    judged = asyncio.run(judge(Tally(pool), "t", rollout, temperature=0.7))
    return np.where(judged.mask, judged.split, np.nan)


def check_followed(pool: TeacherPool, rollout: Rollout, chunks: Iterable[int] = (1, 3, 100)) -> None:
    expected, sizes = judged_at_once(pool, rollout), [len(turn.sampled_ids) for turn in rollout.turns]
    of_turns = np.split(expected, np.cumsum(sizes)[:-1])
    exact = [logps for turn, logps in zip(rollout.turns, of_turns) if turn.trainable.any()]
    for chunk in chunks:
        found = asyncio.run(followed(pool.growing("t", PROMPT, 0.7), rollout, chunk))
        assert [len(logps) for logps in found] == [len(logps) for logps in exact]
        for logps, whole in zip(found, exact):
            np.testing.assert_allclose(logps, whole, atol=1e-5)


def tokens_sent(pool, rollout: Rollout, chunk: int = 100) -> tuple[int, int]:
    """(requests, tokens) that it takes to follow an episode."""
    teacher = pool.teachers["t"]
    before = teacher.num_requests, teacher.num_sent
    asyncio.run(followed(pool.growing("t", PROMPT, 0.7), rollout, chunk))
    return teacher.num_requests - before[0], teacher.num_sent - before[1]


@pytest.mark.parametrize("settings", EPISODES, ids=str)
def test_several_turns_are_scored_as_the_whole(own, random_episode, settings):
    check_followed(own, random_episode(0, 6, *SIZES, **settings))


def test_a_reused_beginning_of_an_answer_is_not_a_number(own, random_rollout):
    rollout = random_rollout(0, (6, 9), num_reused=4)
    check_followed(own, rollout)
    (logps,) = asyncio.run(followed(own.growing("t", PROMPT, 0.7), rollout, 2))
    assert np.isnan(logps).tolist() == [True] * 4 + [False] * 5


def test_each_turn_is_one_request_with_what_came_since_the_one_before(own, random_episode):
    rollout = random_episode(0, 6, *SIZES)
    num_tokens = len(rollout.turns[-1].context_ids) + len(rollout.turns[-1].sampled_ids)
    assert tokens_sent(own, rollout) == (4, num_tokens)
    assert tokens_sent(own, random_episode(0, 6, *SIZES, reused=3)) == (1, num_tokens)
    anew = random_episode(0, 6, *SIZES, rerender=True)
    whole = [len(turn.context_ids) + len(turn.sampled_ids) for turn in anew.turns]
    assert tokens_sent(own, anew) == (4, sum(whole) - 3 * 6)  # the opening is kept


def test_what_was_not_asked_about_is_sent_with_the_next_turn(own, random_episode):
    """A turn's last few tokens are scored by nobody where units are chunks."""
    rollout = random_episode(0, 6, *SIZES)
    first, second = rollout.turns[:2]
    expected = judged_at_once(own, rollout)[7:12]

    async def run(start: int) -> Array:
        scoring = own.growing("t", PROMPT, 0.7)
        scoring.begin((), first.context_ids, NONE)
        if start:
            await scoring.logps(first.sampled_ids[:start])
        scoring.begin((first,), second.context_ids, NONE)
        return await scoring.logps(second.sampled_ids)

    for start in (0, 3, 7):
        np.testing.assert_allclose(asyncio.run(run(start)), expected, atol=1e-5)


def test_a_context_without_a_common_beginning_is_another_stream(own, random_episode):
    one, other = random_episode(0, 6, *SIZES), random_episode(1, 6, *SIZES)
    assert one.turns[0].context_ids[0] != other.turns[0].context_ids[0]
    check_followed(own, replace(one, turns=(one.turns[0], other.turns[1])))


def test_a_stream_that_was_lost_between_turns_is_sent_again(own, random_episode):
    rollout = random_episode(0, 6, *SIZES)
    teacher = own.teachers["t"]

    class Forgetful(Counting):
        async def score(self, request):
            if request.keep_tokens and not self.num_requests % 2:
                self.num_requests += 1
                raise StreamLost("evicted")
            return await super().score(request)

    check_followed(TeacherPool({"t": Forgetful(teacher.teacher)}), rollout, [2])  # type: ignore[dict-item]


def test_a_request_that_fails_can_be_made_again(own, random_episode):
    rollout = random_episode(0, 6, *SIZES)

    class Failing(Counting):
        async def score(self, request):
            if self.num_requests == 1:
                self.num_requests += 1
                raise RuntimeError("gone for a moment")
            return await super().score(request)

    async def run() -> Array:
        first, second = rollout.turns[:2]
        scoring = failing.growing("t", PROMPT, 0.7)
        scoring.begin((), first.context_ids, NONE)
        await scoring.logps(first.sampled_ids)
        scoring.begin((first,), second.context_ids, NONE)
        with pytest.raises(RuntimeError, match="for a moment"):
            await scoring.logps(second.sampled_ids)
        return await scoring.logps(second.sampled_ids)

    failing = TeacherPool({"t": Failing(own.teachers["t"].teacher)})  # type: ignore[dict-item]
    np.testing.assert_allclose(asyncio.run(run()), judged_at_once(own, rollout)[7:12], atol=1e-5)


def episode_of(student, texts: Sequence[str], reused: int = 0, num_reused: int = 0) -> Rollout:
    """Replies, each followed by an observation; the first ones reused, or the first tokens of the others."""
    turns = []
    for number, text in enumerate(texts):
        ids = sampled(student, text)
        observed = ({"role": "user", "content": "d" * (number + 1)},)
        old = len(ids) if number < reused else num_reused
        zeros = np.zeros(len(ids), np.float32)
        turns.append(Turn(np.array([1], np.int32), ids, zeros, "eos", num_reused=old, observations=observed))
    return Rollout(PROMPT, 0, tuple(turns))


@pytest.mark.parametrize("reused", [0, 1, 2])
@pytest.mark.parametrize("num_reused", [0, 1, 2, 3])
def test_another_tokenizer_follows_several_turns(pool, student, reused, num_reused):
    rollout = episode_of(student, ["abcd0ab", "cdabcd0", "0abcbcab"], reused, num_reused)
    check_followed(pool, rollout)


def test_another_tokenizer_is_sent_the_conversation_once(pool, student):
    aligner = pool.aligners["t"]
    rollout = episode_of(student, ["abcd0ab", "cdabcd0", "0abcbcab"])
    spans = pool.align("t", rollout, rollout.turns[-1])
    assert spans is not None
    assert len(spans.context_ids) > 2 * len(aligner.context(PROMPT))
    num_requests, num_sent = tokens_sent(pool, rollout)
    assert num_requests == 3
    # each reply is in the next context as the teacher's template renders it, tokenised with the conversation around it
    assert num_sent <= len(spans.context_ids) + len(spans.token_ids) + 4
