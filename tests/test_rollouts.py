"""Controllers stop a rollout while it is sampled; where it ends depends on its tokens, never on who was faster."""

import asyncio

import numpy as np
import pytest

from opd.plugins import RolloutController
from opd.records import Chunk, Limits, Progress, Prompt, Sampling, ScoreRequest, Scores, Start, Turn
from opd.rollouts import InPlay, Plan, Player
from opd.teachers.growing import OwnScoring
from opd.watch import Watch

CONTEXT = np.array([1, 5, 6], np.int32)
IDS = np.arange(10, 30, dtype=np.int32)


class Scripted:
    """Samples `IDS` in chunks of the sizes given, then ends with EOS; notes how much of it was asked for."""

    def __init__(self, sizes, pause_s=0.0):
        self.sizes, self.pause_s, self.num_sampled, self.requests = sizes, pause_s, 0, []

    async def generate(self, request):
        self.requests.append(request)
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


class StopAt(RolloutController):
    """Stops when the last token it sees is `token` or later."""

    def __init__(self, token, needs_scores=False):
        self.token, self.needs_scores, self.seen = token, needs_scores, []

    def stops(self, progress: Progress) -> bool:
        self.seen.append(progress)
        return progress.sampled_ids[-1] >= self.token


class Fixed:
    """Contexts of a prompt without text: `CONTEXT`, and room for 99 tokens."""

    def __call__(self, prompt):
        return CONTEXT

    def room(self, context_ids):
        return 99


def play(sampler, controller, teacher, unit=4, plan=Plan()):  # noqa: B008
    async def run():
        watch = Watch([controller], Prompt(id="p"), 3, unit, OwnScoring(teacher) if controller.needs_scores else None)
        player = Player(sampler, Fixed(), Sampling(), InPlay())  # type: ignore[arg-type]
        rollout = await player.play(Prompt(id="p"), 3, 0, plan, watch)
        assert rollout is not None
        assert not player.busy
        return rollout

    return asyncio.run(run())


def roll(controller, sizes, unit=4, sampler_pause_s=0.0, teacher_pause_s=0.0):
    teacher = Teacher(teacher_pause_s)
    sampler = Scripted(sizes, sampler_pause_s)
    return play(sampler, controller, teacher, unit), teacher, sampler


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


@pytest.mark.parametrize("teacher_pause_s", [0.0, 0.03])
@pytest.mark.parametrize("sizes", [[4] * 5, [3, 4, 4, 4, 4], [1] * 20, [2, 4, 4, 4]])
def test_at_most_one_chunk_is_sampled_after_the_stop(sizes, teacher_pause_s):
    rollout, _, sampler = roll(StopAt(16, needs_scores=True), sizes, 4, 0.0, teacher_pause_s)
    assert rollout.num_tokens == 8
    assert sampler.num_sampled <= 8 + 4


def test_scores_of_a_chunk_come_while_the_next_is_sampled():
    """Of aligned chunks the one before is awaited, not the newest."""
    seen = []

    class Slow(Teacher):
        async def score(self, request):
            seen.append((len(request.token_ids), sampler.num_sampled))
            return await super().score(request)

    sampler = Scripted([4] * 5, pause_s=0.01)
    play(sampler, StopAt(99, True), Slow(0.005))
    assert [sampled for _, sampled in seen] == [4, 8, 12, 16, 20]


def test_a_limit_of_tokens_is_not_sampled_beyond():
    sampler = Scripted([4] * 5)
    play(sampler, StopAt(99), Teacher(), plan=Plan(limits=Limits(tokens=7)))
    assert sampler.requests[0].max_new_tokens == 7


def reused(length):
    ids = np.arange(40, 40 + length, dtype=np.int32)
    return Turn(CONTEXT, ids, -ids / 100, "stopped", teacher_logps=-ids.astype(np.float32), versions=((0, 7),))


def test_an_answer_goes_on_after_reused_tokens():
    sampler, teacher, controller = Scripted([4, 4]), Teacher(), StopAt(99, True)
    rollout = play(sampler, controller, teacher, plan=Plan(start=Start(tokens=reused(8))))
    (turn,) = rollout.turns
    assert rollout.restart == "restored"
    assert sampler.requests[0].context_ids.tolist() == [*CONTEXT, *range(40, 48)]
    assert sampler.requests[0].max_new_tokens == 99 - 8
    assert turn.context_ids.tolist() == CONTEXT.tolist()
    assert turn.sampled_ids.tolist() == [*range(40, 48), *range(10, 18)]
    assert turn.trainable.tolist() == [False] * 8 + [True] * 8
    assert turn.policy_versions.tolist() == [7] * 8 + [0] * 8
    assert turn.teacher_logps is not None
    assert turn.teacher_logps.tolist() == [*-np.arange(40.0, 48), *-np.arange(10.0, 18)]
    assert [unit.reused for unit in controller.seen[-1].units] == [True, True, False, False]
    assert controller.seen[0].units[2].logp_sum == -sum(range(10, 14))


def test_reused_tokens_that_leave_no_room_are_dropped():
    sampler = Scripted([4])
    rollout = play(sampler, StopAt(99), Teacher(), plan=Plan(start=Start(tokens=reused(99))))
    assert rollout.restart == "too long"
    assert sampler.requests[0].context_ids.tolist() == CONTEXT.tolist()


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

    with pytest.raises(RuntimeError, match="gone"):
        play(Scripted([4] * 5), StopAt(99, True), Broken())


def test_an_error_in_the_middle_is_not_passed_over():
    class Once(Teacher):
        async def score(self, request):
            if len(self.asked) == 1:
                self.asked.append(request)
                raise RuntimeError("gone for a moment")
            return await super().score(request)

    with pytest.raises(RuntimeError, match="for a moment"):
        play(Scripted([4] * 5, pause_s=0.01), StopAt(99, True), Once())
