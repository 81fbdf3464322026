"""The handle of one unfinished rollout: what it sends, and that its answers are those of the whole."""

import asyncio

import numpy as np
import pytest
import torch

from opd.records import ScoreRequest, Scores
from opd.teachers.hf import HFModel, HFTeacher, View
from opd.teachers.stream import ScoreStream, StreamLost


class Recorder:
    """A teacher that keeps what it was asked, and loses the requests listed."""

    def __init__(self, lose: tuple[int, ...] = ()) -> None:
        self.asked: list[ScoreRequest] = []
        self.lose = lose
        self.closed: list[str] = []

    def close_stream(self, name: str) -> None:
        self.closed.append(name)

    async def score(self, request: ScoreRequest) -> Scores:
        self.asked.append(request)
        if len(self.asked) - 1 in self.lose:
            raise StreamLost("gone")
        return Scores(logps=np.zeros(len(request.token_ids), np.float32))

    @property
    def sent(self) -> list[tuple[int, list[int], list[int]]]:
        return [(r.keep_tokens, r.context_ids.tolist(), r.token_ids.tolist()) for r in self.asked]


def run(teacher, *appends: tuple[int, list[int]], context=(1, 2, 3), **wanted) -> ScoreStream:
    stream = ScoreStream(teacher, np.array(context, np.int32), **wanted)

    async def ask():
        for keep, ids in appends:
            await stream.append(keep, np.array(ids))

    asyncio.run(ask())
    return stream


def test_the_context_goes_out_once():
    teacher = Recorder()
    stream = run(teacher, (3, [4, 5]), (5, [6]), (6, []))
    assert teacher.sent == [(0, [1, 2, 3], [4, 5]), (5, [], [6]), (6, [], [])]
    assert {request.stream for request in teacher.asked} == {stream.name}
    assert stream.sequence.tolist() == [1, 2, 3, 4, 5, 6]
    assert teacher.asked[0].token_ids.dtype == stream.sequence.dtype == np.int32


def test_a_rewind_keeps_fewer():
    teacher = Recorder()
    stream = run(teacher, (3, [4, 5, 6]), (4, [7]), (2, [8]))
    assert teacher.sent == [(0, [1, 2, 3], [4, 5, 6]), (4, [], [7]), (2, [], [8])]
    assert stream.sequence.tolist() == [1, 2, 8]


def test_a_first_append_may_drop_part_of_the_context():
    teacher = Recorder()
    run(teacher, (2, [9]))
    assert teacher.sent == [(0, [1, 2], [9])]


def test_what_was_lost_is_sent_as_a_whole():
    teacher = Recorder(lose=(1,))
    stream = run(teacher, (3, [4, 5]), (4, [6]), (5, [7]))
    assert teacher.sent == [(0, [1, 2, 3], [4, 5]), (4, [], [6]), (0, [1, 2, 3, 4], [6]), (5, [], [7])]
    assert stream.sequence.tolist() == [1, 2, 3, 4, 6, 7]


def test_an_append_that_failed_is_not_part_of_the_stream():
    teacher = Recorder(lose=(1, 2))  # the second time it is no answer to the loss
    stream = ScoreStream(teacher, np.array([1, 2, 3], np.int32))

    async def ask():
        await stream.append(3, np.array([4]))
        with pytest.raises(StreamLost):
            await stream.append(4, np.array([5]))
        assert stream.sequence.tolist() == [1, 2, 3, 4]
        await stream.append(4, np.array([6]))

    asyncio.run(ask())
    assert teacher.sent[-1] == (4, [], [6])


def test_what_is_wanted_goes_along():
    teacher = Recorder()
    stream = ScoreStream(teacher, np.array([1]), k=4, hidden=True, temperature=0.5)
    given = np.array([[3, 4]], np.int32)
    asyncio.run(stream.append(1, np.array([7]), asked=given))
    (request,) = teacher.asked
    assert (request.k, request.hidden, request.temperature, request.ids) == (4, True, 0.5, given)


def test_after_a_failed_rewind_only_what_was_kept_is_trusted():
    """Nobody knows whether the teacher took the tokens of an append that was cancelled."""
    teacher = Recorder(lose=(1, 2))
    stream = ScoreStream(teacher, np.array([1, 2, 3], np.int32))

    async def ask():
        await stream.append(3, np.array([4, 5, 6]))
        with pytest.raises(StreamLost):
            await stream.append(3, np.array([9]))  # it may hold 1 2 3 9 now
        await stream.append(4, np.array([7]))

    asyncio.run(ask())
    assert teacher.sent[-1] == (3, [4], [7])


def test_closing_names_the_stream():
    teacher = Recorder()
    stream = run(teacher, (3, [4]))
    stream.close()
    assert teacher.closed == [stream.name]


def test_names_differ():
    assert len({ScoreStream(Recorder(), np.array([1])).name for _ in range(100)}) == 100


@pytest.fixture(scope="module")
def folder(model_folder):
    return str(model_folder(3))


@pytest.mark.parametrize("max_stream_bytes", [2**30, 5000, 0])
@pytest.mark.parametrize("wanted", [{}, {"k": 5, "temperature": 0.7}, {"hidden": True}])
def test_answers_are_those_of_the_whole(folder, vocab, max_stream_bytes, wanted):
    """Eight rollouts grow side by side, with rewinds, while memory is ample, scarce, or none at all."""
    model = HFModel("m", folder, device=torch.device("cpu"), chunk_bytes=2**20, max_stream_bytes=max_stream_bytes)
    teacher = HFTeacher("t", model, View(vocab))

    async def grow(seed: int) -> None:
        rng = np.random.default_rng(seed)
        stream = ScoreStream(teacher, rng.integers(0, vocab, 1 + 3 * seed), **wanted)
        for step in range(8):
            length = len(stream.sequence)
            keep = length if step % 3 else max(1, length - int(rng.integers(0, 4)))
            new = rng.integers(0, vocab, int(rng.integers(0, 6))).astype(np.int32)
            asked = None if step % 2 or "hidden" in wanted else rng.integers(0, vocab, (len(new), 2)).astype(np.int32)
            ours = await stream.append(keep, new, asked)
            theirs = await teacher.score(ScoreRequest(stream.sequence[:keep], new, ids=asked, **wanted))
            for name in ("logps", "topk_logps", "tail", "hidden"):
                a, b = getattr(ours, name), getattr(theirs, name)
                assert (a is None) == (b is None)
                if a is not None:
                    np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)
            np.testing.assert_equal(ours.topk_ids, theirs.topk_ids)
            assert ours.head == theirs.head == ("t" if wanted.get("hidden") else None)
        stream.close()

    async def run_all():
        await asyncio.gather(*(grow(seed) for seed in range(8)))

    asyncio.run(run_all())
    assert (model.streams.num_streams, model.streams.num_bytes) == (0, 0)
    hits, evicted = model.streams.num_hits, model.streams.num_evicted
    assert (hits == 0) == (max_stream_bytes == 0)
    assert (evicted == 0) == (max_stream_bytes == 2**30)
    assert hits + (evicted > 0) >= 1
