"""Controllers stop a rollout while it is sampled; where it ends depends on its tokens, never on who was faster."""

import asyncio

import numpy as np
import pytest

from opd.records import Chunk, Progress, Prompt, Sampling, ScoreRequest, Scores
from opd.rollouts import Watch, sample_rollout
from opd.teachers.growing import OwnScoring
from opd.teachers.stream import ScoreStream

CONTEXT = np.array([1, 5, 6], np.int32)
IDS = np.arange(10, 30, dtype=np.int32)


class Scripted:
    """Samples `IDS` in chunks of the sizes given, then ends with EOS; notes how much of it was asked for."""

    def __init__(self, sizes, pause_s=0.0):
        self.sizes, self.pause_s, self.num_sampled = sizes, pause_s, 0

    async def generate(self, request):
        for number, size in enumerate(self.sizes):
            await asyncio.sleep(self.pause_s)
            ids = IDS[self.num_sampled : self.num_sampled + size]
            self.num_sampled += size
            last = number == len(self.sizes) - 1
            yield Chunk(ids, -ids.astype(np.float32), "eos" if last else None, version=number // 2)


class Teacher:
    """Log-prob of a token: minus its id. Remembers what it was asked and answers after a pause."""

    def __init__(self, pause_s=0.0):
        self.pause_s, self.asked, self.closed = pause_s, [], []

    async def score(self, request: ScoreRequest) -> Scores:
        self.asked.append(request)
        await asyncio.sleep(self.pause_s)
        return Scores(logps=-request.token_ids.astype(np.float32))

    def close_stream(self, name):
        self.closed.append(name)


class StopAt:
    """Stops when the last token it sees is `token` or later."""

    def __init__(self, token, needs_scores=False):
        self.token, self.needs_scores, self.seen = token, needs_scores, []

    def stops(self, progress: Progress) -> bool:
        self.seen.append(progress)
        return progress.sampled_ids[-1] >= self.token


def roll(controller, sizes, unit=4, sampler_pause_s=0.0, teacher_pause_s=0.0):
    teacher = Teacher(teacher_pause_s)
    sampler = Scripted(sizes, sampler_pause_s)

    async def run():
        stream = OwnScoring(ScoreStream(teacher, CONTEXT)) if controller.needs_scores else None
        watch = Watch([controller], Prompt(id="p"), 3, CONTEXT, unit, stream)
        return await sample_rollout(sampler, Prompt(id="p"), 3, CONTEXT, 0, 99, Sampling(), watch)  # type: ignore[arg-type]

    return asyncio.run(run()), teacher, sampler


@pytest.mark.parametrize("pauses", [(0.0, 0.0), (0.0, 0.02), (0.02, 0.0), (0.01, 0.01)])
@pytest.mark.parametrize("sizes", [[20], [4] * 5, [3, 1, 7, 5, 4], [1] * 20])
@pytest.mark.parametrize("needs_scores", [False, True])
def test_where_it_stops_depends_on_its_tokens_alone(sizes, pauses, needs_scores):
    rollout, teacher, sampler = roll(StopAt(16, needs_scores), sizes, 4, *pauses)
    (turn,) = rollout.turns
    assert turn.sampled_ids.tolist() == list(range(10, 18))  # the first whole unit that ends at 16 or later
    assert turn.finish == "stopped"
    assert turn.num_discarded == sampler.num_sampled - 8
    assert len(turn.sampler_logps) == 8
    assert all(start < 8 for start, _ in turn.versions)
    assert len(teacher.closed) == needs_scores


def test_sampling_ends_soon_after_the_stop():
    _, _, sampler = roll(StopAt(13, needs_scores=True), [1] * 20, 4, sampler_pause_s=0.01)
    assert sampler.num_sampled <= 6


def test_a_rollout_that_nobody_stops_is_whole():
    rollout, _, _ = roll(StopAt(99), [3] * 6)
    assert rollout.turns[0].finish == "eos"
    assert rollout.num_tokens == 18
    assert rollout.turns[0].num_discarded == 0


def test_a_stop_at_its_natural_end_leaves_its_finish():
    rollout, _, _ = roll(StopAt(17), [4, 4])
    assert rollout.turns[0].finish == "eos"
    assert rollout.turns[0].num_discarded == 0


def test_each_token_is_scored_once_and_in_order():
    controller = StopAt(99, needs_scores=True)
    _, teacher, _ = roll(controller, [3, 1, 7, 5, 4], teacher_pause_s=0.01)
    assert np.concatenate([request.token_ids for request in teacher.asked]).tolist() == IDS.tolist()
    keeps = [request.keep_tokens + len(request.context_ids) for request in teacher.asked]
    assert keeps == [3, *np.cumsum([len(request.token_ids) for request in teacher.asked])[:-1] + 3]
    for progress in controller.seen:
        assert len(progress.sampled_ids) % 4 == 0
        assert progress.logps.tolist() == (-progress.sampled_ids).tolist()


def test_an_error_of_the_teacher_reaches_the_rollout():
    class Broken(Teacher):
        async def score(self, request):
            raise RuntimeError("gone")

    async def run():
        stream = OwnScoring(ScoreStream(Broken(), CONTEXT))
        watch = Watch([StopAt(99, True)], Prompt(id="p"), 0, CONTEXT, 4, stream)  # type: ignore[list-item]
        await sample_rollout(Scripted([4] * 5), Prompt(id="p"), 0, CONTEXT, 0, 99, Sampling(), watch)  # type: ignore[arg-type]

    with pytest.raises(RuntimeError, match="gone"):
        asyncio.run(run())


def test_an_error_in_the_middle_is_not_passed_over():
    class Once(Teacher):
        async def score(self, request):
            if len(self.asked) == 1:
                self.asked.append(request)
                raise RuntimeError("gone for a moment")
            return await super().score(request)

    async def run():
        stream = OwnScoring(ScoreStream(Once(), CONTEXT))
        watch = Watch([StopAt(99, True)], Prompt(id="p"), 0, CONTEXT, 4, stream)  # type: ignore[list-item]
        sampler = Scripted([4] * 5, pause_s=0.01)
        await sample_rollout(sampler, Prompt(id="p"), 0, CONTEXT, 0, 99, Sampling(), watch)  # type: ignore[arg-type]

    with pytest.raises(RuntimeError, match="for a moment"):
        asyncio.run(run())
