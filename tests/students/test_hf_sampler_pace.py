"""When the in-process sampler decodes: a chunk at a time, and only while everybody listens. Order of events, never time."""

import asyncio
from contextlib import aclosing

import numpy as np
import pytest

from opd.plugins import RolloutController
from opd.records import Prompt, SampleRequest, Sampling, Scores, Turn
from opd.rollouts import InPlay, Player
from opd.students.hf_sampler import HFSampler
from opd.teachers.growing import OwnScoring
from opd.watch import Watch

CHUNK = 3
LENGTHS = (9, 3, 14, 1, 6, 5)
SOON_S = 20.0  # what waits longer is stuck


@pytest.fixture(scope="module")
def student(micro_model):
    return micro_model(0)


@pytest.fixture
def make(student, vocab):
    """`make(**options)`: a sampler in chunks of three tokens, without EOS, so that lengths are those asked for."""

    def build(eos=(), **options) -> HFSampler:
        return HFSampler(student, vocab, eos, **{"chunk_tokens": CHUNK, **options})

    return build


@pytest.fixture(scope="module")
def requests(vocab):
    """`requests(lengths, episode)`: a turn of each length, their contexts of several sizes."""
    rng = np.random.default_rng(0)
    contexts = [rng.integers(3, vocab, length).astype(np.int32) for length in LENGTHS]

    def build(lengths, episode=False):
        return [SampleRequest(contexts[i], 100 + i, length, Sampling(), episode=episode) for i, length in enumerate(lengths)]

    return build


@pytest.fixture
def events(monkeypatch):
    """`events(sampler)`: a list that gets "decode" at each forward pass that draws a token."""

    def watch(sampler):
        seen: list = []
        append = sampler._append
        monkeypatch.setattr(sampler, "_append", lambda rows, logits: (seen.append("decode"), append(rows, logits)))
        return seen

    return watch


def soon(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, SOON_S))


async def take(sampler, request, got=None, each=None):
    """All chunks of a turn; `got` gets each at once, and `each` is awaited before the next is asked for."""
    got = [] if got is None else got
    async with aclosing(sampler.generate(request)) as stream:  # type: ignore[type-var]
        async for chunk in stream:
            got.append(chunk)
            if each is not None:
                await each()
    return got


def sizes(chunks):
    return [len(chunk.sampled_ids) for chunk in chunks]


async def idle(turns=40):
    """Lets everybody else do what they can."""
    for _ in range(turns):
        await asyncio.sleep(0)


# --- Chunks ---


def test_turns_that_start_together_report_whole_chunks(make, requests):
    sampler, asked = make(), requests([12, 12, 7, 2, 3, 4])

    async def run():
        return await asyncio.gather(*(take(sampler, request) for request in asked))

    found = [sizes(chunks) for chunks in soon(run())]
    assert found == [[3, 3, 3, 3], [3, 3, 3, 3], [3, 3, 1], [2], [3], [3, 1]]


@pytest.mark.parametrize("chunk", [1, 2, 5, 16])
def test_whatever_a_chunk_is(make, requests, chunk):
    sampler = make(chunk_tokens=chunk)

    async def run():
        return await asyncio.gather(*(take(sampler, request) for request in requests([11, 10])))

    for chunks in soon(run()):
        assert set(sizes(chunks)[:-1]) <= {chunk}


def test_turns_that_join_others_do_not_change_their_chunks(make, requests):
    """Those that join have drawn their first token besides."""
    sampler, asked = make(max_rows=4), requests([20, 20, 20, 4, 9, 9])

    async def run():
        return await asyncio.gather(*(take(sampler, request) for request in asked))

    found = soon(run())
    for request, chunks in zip(asked, found):
        assert sum(sizes(chunks)) == request.max_new_tokens
        assert sizes(chunks)[0] <= CHUNK + 1
        assert set(sizes(chunks)[1:-1]) <= {CHUNK}
    for chunks in found[:4]:  # these began together
        assert set(sizes(chunks)[:-1]) == {CHUNK}


def test_between_rounds_only_finished_turns_are_reported(make, requests):
    """A prefill in the middle of a round shows nobody a part of a chunk."""
    sampler, asked = make(max_rows=2), requests([4, 15, 15, 4, 15])

    async def run():
        return await asyncio.gather(*(take(sampler, request) for request in asked))

    for request, chunks in zip(asked, soon(run())):
        assert sum(sizes(chunks)) == request.max_new_tokens
        assert all(size == CHUNK for size in sizes(chunks)[1:-1])
        assert [chunk.finish for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]


# --- Whoever is shown a chunk ---


@pytest.mark.parametrize("episode", [False, True])
def test_a_slow_taker_holds_the_batch(make, requests, events, episode):
    sampler, decoded = make(), []
    first, second = requests([12, 12], episode)

    async def run():
        seen, may_go, quick, slow = events(sampler), asyncio.Event(), [], []
        tasks = [
            asyncio.create_task(take(sampler, first, quick)),
            asyncio.create_task(take(sampler, second, slow, may_go.wait)),
        ]
        while not slow:
            await asyncio.sleep(0)
        await idle()
        decoded.append(len(seen))
        assert (sizes(quick), sizes(slow)) == ([3], [3])
        assert sampler.busy
        may_go.set()
        await asyncio.gather(*tasks)
        decoded.append(len(seen))
        assert sizes(quick) == sizes(slow) == [3] * 4

    soon(run())
    assert decoded == [CHUNK, 12]  # not a token beyond what it was shown


def test_a_taker_that_was_shown_the_end_holds_nobody(make, requests):
    sampler = make()
    short, long = requests([2, 12])

    async def run():
        never, got = asyncio.Event(), []
        held = asyncio.create_task(take(sampler, short, got, never.wait))
        assert sizes(await take(sampler, long)) == [3] * 4
        assert [chunk.finish for chunk in got] == ["length"]
        held.cancel()
        await asyncio.gather(held, return_exceptions=True)

    soon(run())
    assert not sampler.busy


async def _raise():
    raise RuntimeError("it had enough")


@pytest.mark.parametrize("fails", ["raises", "cancelled while it looks", "cancelled while it waits", "leaves"])
def test_a_taker_that_goes_away_blocks_nobody(make, requests, fails):
    asked = requests([12, 12, 12])

    async def alone():
        sampler = make()
        return [Turn.of(r.context_ids, await take(sampler, r)).sampled_ids.tolist() for r in asked]

    async def leave(sampler):
        async with aclosing(sampler.generate(asked[1])) as stream:  # type: ignore[type-var]
            async for _ in stream:
                return

    async def run():
        sampler, got, held = make(), [], asyncio.Event()
        if fails == "leaves":
            gone = asyncio.create_task(leave(sampler))
        elif fails == "raises":
            gone = asyncio.create_task(take(sampler, asked[1], got, _raise))
        elif fails == "cancelled while it looks":
            gone = asyncio.create_task(take(sampler, asked[1], got, held.wait))
        else:
            gone = asyncio.create_task(take(sampler, asked[1], got))
        others = [asyncio.create_task(take(sampler, request)) for request in (asked[0], asked[2])]
        if fails.startswith("cancelled"):
            while not got:
                await asyncio.sleep(0)
            gone.cancel()
        results = await asyncio.gather(gone, *others, return_exceptions=True)
        assert not sampler.busy
        return results

    result, *others = soon(run())
    expected = {"raises": RuntimeError, "leaves": type(None)}.get(fails, asyncio.CancelledError)
    assert isinstance(result, expected)
    exact = soon(alone())
    for request, chunks, place in zip((asked[0], asked[2]), others, (0, 2)):
        assert isinstance(chunks, list)
        assert Turn.of(request.context_ids, chunks).sampled_ids.tolist() == exact[place]


def test_everybody_may_go_away(make, requests, events):
    sampler = make()

    async def run():
        seen = events(sampler)
        results = await asyncio.gather(
            *(take(sampler, request, each=_raise) for request in requests([30] * 3)), return_exceptions=True
        )
        await idle()
        assert all(isinstance(result, RuntimeError) for result in results)
        assert not sampler.busy
        return len(seen), sizes(await take(sampler, requests([4])[0]))

    assert soon(run()) == (CHUNK, [3, 1])


# --- Scores ---


class StopAt(RolloutController):
    """Stops each slot after so many tokens, once the teacher has spoken."""

    needs_scores = True

    def __init__(self, places):
        self.places = places

    def stops(self, progress):
        assert progress.logps is not None
        assert len(progress.logps) == len(progress.sampled_ids)
        return len(progress.sampled_ids) >= self.places[progress.slot]


class Teacher:
    """Answers when `ready(num)`, with the number of the tokens asked about so far, has come."""

    def __init__(self, ready):
        self.ready, self.num_asked = ready, 0

    async def score(self, request):
        self.num_asked += len(request.token_ids)
        await self.ready(self.num_asked)
        return Scores(logps=-request.token_ids.astype(np.float32))

    def close_stream(self, name):
        pass


class Fixed:
    """The contexts of prompts without text, by id."""

    def __init__(self, requests):
        self.requests = requests

    def __call__(self, prompt):
        return self.requests[int(prompt.id)].context_ids

    def room(self, context_ids):
        return next(one.max_new_tokens for one in self.requests if one.context_ids is context_ids)


async def play(sampler, requests, controller, teachers):
    player = Player(sampler, Fixed(requests), Sampling(), InPlay())  # type: ignore[arg-type]

    async def one(slot):
        prompt = Prompt(id=str(slot))
        watch = Watch([controller], prompt, slot, CHUNK, OwnScoring(teachers[slot]))
        return await player.play(prompt, slot, slot, watch=watch)

    rollouts = await asyncio.gather(*(one(slot) for slot in range(len(requests))))
    return [rollout for rollout in rollouts if rollout is not None]


@pytest.mark.parametrize("count", [1, 3])
def test_a_chunk_is_scored_while_the_next_is_decoded(make, requests, events, count):
    """The teacher says nothing before the whole next chunk is there: whoever waited for it first would wait for ever."""
    sampler, asked = make(), requests([12] * count)
    seen = events(sampler)

    async def beyond(num_asked):
        while len(seen) < min(num_asked + CHUNK, 12):
            await asyncio.sleep(0)

    teachers = [Teacher(beyond) for _ in asked]
    rollouts = soon(play(sampler, asked, StopAt([99] * count), teachers))
    assert [rollout.num_tokens for rollout in rollouts] == [12] * count
    assert [teacher.num_asked for teacher in teachers] == [12] * count


@pytest.mark.parametrize("count", [1, 3])
def test_nothing_is_decoded_beyond_the_chunk_behind_an_unscored_one(make, requests, events, count):
    """A teacher that is slower than the student holds it."""
    sampler, asked = make(), requests([15] * count)
    seen, ahead = events(sampler), []

    async def slowly(num_asked):
        await idle()
        ahead.append(len(seen) - num_asked)

    soon(play(sampler, asked, StopAt([99] * count), [Teacher(slowly) for _ in asked]))
    assert max(ahead) == CHUNK
    assert min(ahead) == 0  # behind the last there is none


@pytest.mark.parametrize("max_rows", [2, 64])
@pytest.mark.parametrize("pause", [0, 1, 40])
def test_at_most_one_chunk_is_decoded_after_a_stop(make, requests, max_rows, pause):
    places = [3, 6, 9, 12, 30, 6]
    sampler, asked = make(max_rows=max_rows), requests([24] * 6)

    async def slowly(num_asked):
        await idle(pause)

    rollouts = soon(play(sampler, asked, StopAt(places), [Teacher(slowly) for _ in asked]))
    for rollout, place in zip(rollouts, places, strict=True):
        (turn,) = rollout.turns
        assert (rollout.num_tokens, turn.finish) == ((place, "stopped") if place <= 24 else (24, "length"))
        assert turn.num_discarded <= CHUNK
        assert turn.num_discarded == 0 or place <= 24
    assert sum(rollout.turns[0].num_discarded for rollout in rollouts) > 0
    assert not sampler.busy


@pytest.mark.parametrize("max_rows", [1, 2, 64])
def test_where_it_stops_does_not_depend_on_the_teachers_pace(make, requests, max_rows):
    found = []
    for pause in (0, 7):

        async def slowly(num_asked, pause=pause):
            await idle(pause)

        sampler, asked = make(max_rows=max_rows), requests([24] * 6)
        rollouts = soon(play(sampler, asked, StopAt([3, 6, 9, 12, 30, 6]), [Teacher(slowly) for _ in asked]))
        found.append([rollout.turns[0].sampled_ids.tolist() for rollout in rollouts])
    assert found[0] == found[1]
