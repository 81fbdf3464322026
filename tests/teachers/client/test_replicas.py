"""Several replicas behind one question: faults of every kind, exactly one answer, and an end within the deadline."""

import asyncio
import time
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from opd.errors import UserError
from opd.records import ScoreRequest
from opd.teachers.client.answers import check_scores
from opd.teachers.client.handshake import Identity
from opd.teachers.client.replicas import Job, Patience, Replicas
from opd.teachers.stream import StreamLost
from opd.teachers.wire import Asked, decode_scores, encode_score_request

WEIGHTS = "ab" * 16
IDENTITY = Identity(WEIGHTS, "cd" * 16, "ef" * 16, 38, 45)


def request(number: int, stream: str | None = None, keep_tokens: int = 0) -> ScoreRequest:
    """No two numbers give the same answer."""
    rng = np.random.default_rng(number)
    context, tokens = np.array([number % 37, number // 37], np.int32), rng.integers(0, 38, 3 + number % 5).astype(np.int32)
    return ScoreRequest(context, tokens, stream=stream, keep_tokens=keep_tokens)


def job(asked: ScoreRequest) -> Job:
    def read(body: bytearray):
        scores, weights = decode_scores(body)
        if weights != WEIGHTS:
            raise UserError("other weights")
        check_scores(scores, asked, vocab=38, logp_floor=-30.0, head=IDENTITY.head)
        return scores

    body = encode_score_request(Asked(asked, 38, -30.0))
    return Job("/v1/score", body, asked.num_tokens, 10**5, read, asked.stream, asked.keep_tokens)


@pytest.fixture
def use(by_rule):
    """`use(servers, work, **patience)`: what `work(replicas, ask)` gives; `ask(request)` checks the answer."""

    def run(servers, work, timeout_s=5.0, deadline_s=20.0, max_in_flight=8):
        patience = Patience(timeout_s, deadline_s, max_in_flight)

        async def body():
            urls = tuple(server.url for server in servers)
            replicas = Replicas(urls, "t", None, patience, "base", IDENTITY)

            async def ask(asked: ScoreRequest):
                scores = await replicas.ask(job(asked))
                np.testing.assert_array_equal(scores.logps, by_rule(asked).logps)
                return scores

            try:
                return await work(replicas, ask)
            finally:
                await replicas.close()
                assert len(asyncio.all_tasks()) == 1
                assert all(one.num_requests == one.num_tokens == 0 for one in replicas.replicas)

        return asyncio.run(body())

    return run


def key(asked: ScoreRequest) -> bytes:
    return asked.context_ids.tobytes() + asked.token_ids.tobytes()


def test_many_requests_at_two_replicas(faulty, use):
    a, b = servers = faulty(), faulty()
    requests = [request(number) for number in range(300)]

    async def work(replicas, ask):
        await asyncio.gather(*(ask(one) for one in requests))
        assert replicas.num_failed == 0

    use(servers, work)
    assert Counter(key(one.request) for one in a.asked + b.asked) == Counter(map(key, requests))
    assert min(len(a.asked), len(b.asked)) > 50
    assert max(a.most_under_way, b.most_under_way) <= 8


FAULTS = [
    "hang",
    "garbage",
    "short",
    "nan",
    "busy:0.2",
    "busy:",
    "status:500",
    "reset",
    "truncated",
    "nohttp",
    "long",
    "slow:0.2",
]


@pytest.mark.parametrize("fault", FAULTS)
def test_one_replica_fails_for_a_while(faulty, use, fault):
    """Every request gets its own answer once; the replica is used again afterwards."""
    a, _ = servers = faulty(faults=[fault] * 6), faulty(always="slow:0.02")
    requests = [request(number) for number in range(60)]

    async def work(replicas, ask):
        await asyncio.gather(*(ask(one) for one in requests))
        while not replicas.replicas[0].up or replicas.replicas[0].resting:
            await asyncio.sleep(0.05)
        before = len(a.answered)
        await asyncio.gather(*(ask(request(1000 + number)) for number in range(20)))
        assert len(a.answered) > before
        assert (replicas.num_failed > 0) == (fault.partition(":")[0] not in ("busy", "slow"))

    use(servers, work, timeout_s=0.6 if fault == "hang" else 5.0, max_in_flight=4)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_single_replica_recovers(faulty, use, fault):
    only = faulty(faults=[fault] * 3)

    async def work(replicas, ask):
        await asyncio.gather(*(ask(request(number)) for number in range(10)))

    use([only], work, timeout_s=0.5)
    assert len(only.answered) >= 10


@pytest.mark.parametrize("fault", ["hang", "garbage", "reset", "busy:0", "status:500"])
def test_faults_that_do_not_end(faulty, use, fault):
    """The run ends within the deadline and says what it saw at each address."""
    a, b = servers = faulty(fault), faulty(fault)
    seen = {
        "hang": "no answer within 0.3 s",
        "garbage": "a malformed answer",
        "reset": "closed",
        "busy:0": "503",
        "status:500": "500",
    }

    async def work(replicas, ask):
        results = await asyncio.gather(*(ask(request(number)) for number in range(10)), return_exceptions=True)
        assert all(isinstance(one, UserError) for one in results)
        return str(results[0])

    start = time.monotonic()
    message = use(servers, work, timeout_s=0.3, deadline_s=1.2)
    assert 1.1 < time.monotonic() - start < 3.0
    assert message.startswith("teachers.t.url: no answer within 1.2 s (")
    assert message.endswith("start it again and resume with --resume")
    assert a.url in message
    assert b.url in message
    assert seen[fault] in message
    assert "\n" not in message


def test_a_request_that_no_replica_can_answer_does_not_go_round_for_ever(faulty, use, monkeypatch):
    """Others get answers all the time, so that no deadline ends it."""
    monkeypatch.setattr("opd.teachers.client.replicas.pause_s", lambda count: 0.01)
    server, poison = faulty(), request(5)
    server.poison = job(poison).body

    async def work(replicas, ask):
        async def others():
            for number in range(10, 10**6):
                await ask(request(number))

        going = asyncio.create_task(others())
        with pytest.raises(
            UserError, match=r"16 attempts at one request failed, the last because a malformed answer: logps"
        ):
            await ask(poison)
        assert not going.done()
        going.cancel()
        await asyncio.gather(going, return_exceptions=True)

    use([server], work, deadline_s=2.0, timeout_s=1.0, max_in_flight=1)


def test_killed_and_back(faulty, use):
    a, _ = servers = faulty(always="slow:0.01"), faulty(always="slow:0.01")
    requests = [request(number) for number in range(200)]

    async def work(replicas, ask):
        going = asyncio.gather(*(ask(one) for one in requests))
        await asyncio.sleep(0.05)
        await asyncio.to_thread(a.stop)
        await going
        assert not replicas.replicas[0].up
        before = len(a.answered)
        await asyncio.to_thread(a.start)
        while not replicas.replicas[0].up:
            await asyncio.sleep(0.02)
        await asyncio.gather(*(ask(request(1000 + number)) for number in range(40)))
        assert len(a.answered) > before

    use(servers, work)


def test_back_with_other_weights(faulty, use):
    a, _ = servers = faulty(), faulty()

    async def work(replicas, ask):
        await ask(request(0))
        await asyncio.to_thread(a.stop)
        await asyncio.gather(*(ask(request(number)) for number in range(8)))
        a.weights = "99" * 16
        await asyncio.to_thread(a.start)
        while "serves another model" not in replicas.replicas[0].last_error:
            await asyncio.sleep(0.02)
        before = len(a.asked)
        await asyncio.gather(*(ask(request(number)) for number in range(40)))
        assert len(a.asked) == before
        assert "their weights" in replicas.replicas[0].last_error

    use(servers, work)


def test_a_probe_wants_a_healthy_server(faulty, use):
    only = faulty(faults=["reset"], healthy=False)

    async def work(replicas, ask):
        going = asyncio.create_task(ask(request(0)))
        while only.num_probes < 3:
            await asyncio.sleep(0.02)
        assert not going.done()
        assert "503" in replicas.replicas[0].last_error
        only.healthy = True
        await going
        probes = only.num_probes
        await asyncio.sleep(0.3)
        assert only.num_probes == probes  # none while all is well

    use([only], work)


@pytest.mark.parametrize("status", [400, 401, 404, 413])
def test_what_cannot_be_mended_by_asking_again(faulty, use, status):
    a, b = servers = faulty(f"status:{status}"), faulty(f"status:{status}")

    async def work(replicas, ask):
        with pytest.raises(UserError, match=f"{status}: as it was told"):
            await ask(request(0))
        assert all(one.up for one in replicas.replicas)

    use(servers, work)
    assert len(a.asked) + len(b.asked) == 1


def test_other_weights_in_an_answer(faulty, use):
    async def work(replicas, ask):
        with pytest.raises(UserError, match="other weights"):
            await ask(request(0))

    use([faulty("weights")], work)


def test_a_long_line_outlasts_the_deadline_while_answers_come(faulty, use):
    only = faulty("slow:0.1")

    async def work(replicas, ask):
        start = time.monotonic()
        await asyncio.gather(*(ask(request(number)) for number in range(12)))
        assert time.monotonic() - start > 1.0

    use([only], work, timeout_s=0.4, deadline_s=0.5, max_in_flight=1)


def test_the_deadline_counts_from_the_last_answer(faulty, use):
    only = faulty(faults=["slow:0.2"] * 3, always="hang")

    async def work(replicas, ask):
        start = time.monotonic()
        results = await asyncio.gather(*(ask(request(number)) for number in range(6)), return_exceptions=True)
        assert [isinstance(one, UserError) for one in results] == [False] * 3 + [True] * 3
        assert 1.5 < time.monotonic() - start < 3.0

    use([only], work, timeout_s=0.9, deadline_s=1.0, max_in_flight=1)


def test_a_cancelled_caller_frees_the_place_and_ends_its_request(faulty, use):
    only = faulty("hang")

    async def work(replicas, ask):
        tasks = [asyncio.create_task(ask(request(number))) for number in range(4)]
        while only.under_way < 2:
            await asyncio.sleep(0.01)
        tasks[0].cancel()
        tasks[2].cancel()
        await asyncio.wait(tasks, timeout=0.3)
        assert [task.cancelled() for task in tasks] == [True, False, True, False]
        while len(only.asked) < 3:
            await asyncio.sleep(0.01)
        assert key(only.asked[2].request) == key(request(3))
        while only.under_way > 2:  # the connection of the first was closed
            await asyncio.sleep(0.01)
        only.release()
        await asyncio.gather(tasks[1], tasks[3])

    use([only], work, max_in_flight=2)


def test_a_blocked_loop_is_no_timeout(faulty, use):
    """Longer than the timeout and the deadline, before and after the request has left."""
    only = faulty("slow:0.3")

    async def work(replicas, ask):
        for pause in (0.0, 0.05, 0.1):
            going = [asyncio.create_task(ask(request(number))) for number in range(4)]
            await asyncio.sleep(pause)
            time.sleep(1.2)
            await asyncio.gather(*going)
        assert replicas.num_failed == 0
        assert len(only.asked) == 12

    use([only], work, timeout_s=0.8, deadline_s=1.0)


def test_a_large_answer_that_arrived_while_the_loop_was_blocked(faulty, use, monkeypatch):
    only = faulty()
    asked = ScoreRequest(np.zeros(2, np.int32), np.zeros(250_000, np.int32))

    async def work(replicas, ask):
        large = replace(job(asked), max_bytes=10**7)
        going = asyncio.create_task(replicas.ask(large))
        while not only.answered:
            await asyncio.sleep(0.005)
        time.sleep(1.5)
        assert len((await going).logps) == 250_000
        assert replicas.num_failed == 0

    use([only], work, timeout_s=0.6, deadline_s=0.8)


def test_connections_that_were_closed_while_the_loop_was_blocked(faulty, use):
    only = faulty("slow:0.02")

    async def work(replicas, ask):
        await asyncio.gather(*(ask(request(number)) for number in range(8)))
        only.stop()  # blocks this loop
        only.start()
        await asyncio.gather(*(ask(request(number)) for number in range(8)))
        assert replicas.num_failed == 0

    use([only], work)


class TestStreams:
    def test_a_stream_stays_where_it_is_held(self, faulty, use):
        servers = faulty(), faulty()

        async def work(replicas, ask):
            await asyncio.gather(*(ask(request(number, f"s{number}")) for number in range(20)))
            await asyncio.gather(*(ask(request(number, f"s{number}", 4)) for number in range(20)))

        use(servers, work)
        for server in servers:
            first = {one.request.stream for one in server.asked if one.request.keep_tokens == 0}
            assert first == {one.request.stream for one in server.asked if one.request.keep_tokens}
            assert len(first) > 3

    def test_an_unknown_stream_is_lost_at_once(self, faulty, use):
        only = faulty()

        async def work(replicas, ask):
            with pytest.raises(StreamLost):
                await ask(request(0, "s", 3))

        use([only], work)
        assert not only.asked

    @pytest.mark.parametrize("fault", ["reset", "status:500", "garbage", "hang", "status:409"])
    def test_a_stream_whose_holder_fails_is_lost(self, faulty, use, fault):
        a, b = servers = faulty(), faulty()

        async def work(replicas, ask):
            await ask(request(0, "s"))
            holder = a if a.asked else b
            holder.faults = [fault, fault]  # twice: the first reset could be the end of an idle connection
            with pytest.raises(StreamLost):
                await ask(request(1, "s", 4))
            with pytest.raises(StreamLost):
                await ask(request(1, "s", 4))  # until it is sent whole
            holder.faults = []
            await ask(request(2, "s"))
            await ask(request(3, "s", 4))
            assert all(one.up for one in replicas.replicas) == (fault == "status:409")

        use(servers, work, timeout_s=0.4)

    def test_a_busy_holder_keeps_its_stream(self, faulty, use):
        a, b = servers = faulty(), faulty()

        async def work(replicas, ask):
            await ask(request(0, "s"))
            holder, other = (a, b) if a.asked else (b, a)
            holder.faults = ["busy:0", "busy:0"]
            await ask(request(1, "s", 4))
            assert (len(holder.answered), len(other.asked)) == (2, 0)

        use(servers, work)

    def test_one_that_waits_for_a_holder_that_goes_down_is_lost(self, faulty, use):
        only = faulty()

        async def work(replicas, ask):
            await ask(request(0, "s"))
            only.faults = ["status:500"]
            holding, waiting = asyncio.create_task(ask(request(1))), asyncio.create_task(ask(request(2, "s", 4)))
            with pytest.raises(StreamLost, match="is down"):
                await waiting
            await holding

        use([only], work, max_in_flight=1)

    def test_a_stream_begun_anew_may_go_anywhere(self, faulty, use):
        a, b = servers = faulty(), faulty()

        async def work(replicas, ask):
            await ask(request(0, "s"))
            holder, other = (a, b) if a.asked else (b, a)
            await asyncio.to_thread(holder.stop)
            await ask(request(1, "s"))
            await ask(request(2, "s", 4))
            assert len(other.answered) == 2
            await asyncio.to_thread(holder.start)

        use(servers, work)

    def test_the_deadline_of_a_lost_stream_goes_on(self, faulty, use):
        only = faulty()

        async def work(replicas, ask):
            await ask(request(0, "s"))
            only.always = "hang"
            start = time.monotonic()
            with pytest.raises(StreamLost):
                await ask(request(1, "s", 4))
            with pytest.raises(UserError, match="no answer within 1 s"):
                await ask(request(1, "s"))
            assert 0.9 < time.monotonic() - start < 1.4

        use([only], work, timeout_s=0.8, deadline_s=1.0)

    def test_a_whole_sequence_is_never_lost(self, faulty, use):
        only = faulty(faults=["status:409"])

        async def work(replicas, ask):
            await ask(request(0, "s"))
            assert replicas.num_failed == 1

        use([only], work)
        assert [one.request.keep_tokens for one in only.asked] == [0, 0]  # asked again as it was, not given up

    def test_a_forgotten_stream_is_closed_at_its_holder(self, faulty, use):
        a, b = servers = faulty(), faulty()

        async def work(replicas, ask):
            await asyncio.gather(*(ask(request(number, f"s{number}")) for number in range(20)))
            for number in range(20):
                replicas.forget(f"s{number}")
            replicas.forget("unknown")
            while len(a.closed) + len(b.closed) < 20:
                await asyncio.sleep(0.01)
            with pytest.raises(StreamLost):
                await ask(request(1, "s1", 4))

        use(servers, work)
        for server in servers:
            assert set(server.closed) == {one.request.stream for one in server.asked}

    def test_the_number_of_remembered_streams_is_bounded(self, faulty, use, monkeypatch):
        monkeypatch.setattr("opd.teachers.client.replicas.MAX_STREAMS", 5)

        async def work(replicas, ask):
            for number in range(9):
                await ask(request(number, f"s{number}"))
            assert list(replicas._streams) == [f"s{number}" for number in range(4, 9)]

        use([faulty()], work)
