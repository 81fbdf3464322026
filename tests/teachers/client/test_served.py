"""The served teacher against the same model in process, on real servers: parity, streams, and servers that come and go."""

import asyncio
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch

from opd.errors import UserError
from opd.records import SampleRequest, Sampling, ScoreRequest, Scores
from opd.teachers.client.served import ServedTeacher
from opd.teachers.config import TeacherConfig
from opd.teachers.hf import HFModel, HFTeacher, View
from opd.teachers.pool import TeacherPool
from opd.teachers.server.app import TeacherServer
from opd.teachers.server.options import bind
from opd.teachers.stream import ScoreStream

FLOOR = -6.0


class Real:
    """A real server on a port that it keeps, in a loop and a thread of its own."""

    def __init__(self, model) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.model = model
        self.server: TeacherServer
        self.thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self, model=None, token=None) -> "Real":
        server = self.server = TeacherServer(model or self.model, token=token)
        ready, self.told = threading.Event(), asyncio.Event()

        async def live() -> None:
            await server.start(bind("127.0.0.1", self.port, has_token=False))
            self.loop = asyncio.get_running_loop()
            ready.set()
            await self.told.wait()
            await server.stop(grace_s=0.0)

        self.loop: asyncio.AbstractEventLoop
        self.thread = threading.Thread(target=lambda: asyncio.run(live()), daemon=True)
        self.thread.start()
        assert ready.wait(30)
        return self

    def stop(self) -> None:
        if self.thread is not None:
            self.loop.call_soon_threadsafe(self.told.set)
            self.thread.join()
            self.thread = None


@pytest.fixture(scope="module")
def copies(served, load_served, model_folder):
    """A model belongs to one server's thread, so that two servers of the same weights need two."""
    return [served, load_served(model_folder(0))]


@pytest.fixture
def serve(copies):
    """`serve(model=None)`: a running server of `served`, or of another model, with `stop` and `start`."""
    started: list[Real] = []

    def start(model=None, **options) -> Real:
        started.append(Real(model or copies[len(started)]).start(**options))
        return started[-1]

    yield start
    for one in started:
        one.stop()


def connect(*servers, **settings) -> ServedTeacher:
    config = TeacherConfig(
        url=", ".join(one.url for one in servers), **{"logp_floor": FLOOR, "deadline_s": 20.0, **settings}
    )
    return ServedTeacher.connect("t", config)


def use(teacher, work):
    """What the coroutine `work()` gives; the teacher is closed afterwards."""

    async def run():
        try:
            return await work()
        finally:
            await teacher.close()

    return asyncio.run(run())


def ask(teacher, *requests):
    async def work():
        return await asyncio.gather(*(teacher.score(one) for one in requests))

    return use(teacher, work)


@pytest.fixture(scope="module")
def in_process(model_folder, vocab):
    """The same model as that of `served`."""
    model = HFModel("teachers.t.model", str(model_folder(0)), device=torch.device("cpu"), chunk_bytes=2**20)
    return HFTeacher("t", model, View(vocab, FLOOR))


@pytest.fixture(scope="module")
def requests(vocab):
    rng = np.random.default_rng(0)
    lengths = [(3, 4), (9, 0), (20, 7), (3, 1), (1, 12), (30, 60)]
    ids = [rng.integers(0, vocab, c + n).astype(np.int32) for c, n in lengths]
    return [ScoreRequest(one[:c], one[c:]) for one, (c, n) in zip(ids, lengths)]


@pytest.fixture(scope="module")
def sequence(vocab):
    return np.random.default_rng(5).integers(0, vocab, 60).astype(np.int32)


@pytest.fixture(scope="module")
def many(vocab):
    rng = np.random.default_rng(3)
    ids = rng.integers(0, vocab, (120, 13)).astype(np.int32)
    return [ScoreRequest(one[:4], one[4:]) for one in ids]


def wanted(vocab: int) -> dict[str, dict]:
    return {
        "sampled": {},
        "topk": {"k": 5},
        "all": {"k": vocab},
        "more than all": {"k": 10**6},
        "ids": {"ids": 4},
        "ids and topk": {"ids": 4, "k": 7},
        "hidden": {"hidden": True},
    }


def same(ours, theirs, atol=1e-5):
    assert ours.num_floored == theirs.num_floored
    for name in ("logps", "topk_ids", "topk_logps", "tail", "hidden"):
        one, other = getattr(ours, name), getattr(theirs, name)
        assert (one is None) == (other is None), name
        if one is not None:
            assert one.dtype == other.dtype
            np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=0, atol=atol, err_msg=name)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("payload", ["sampled", "topk", "all", "more than all", "ids", "ids and topk", "hidden"])
def test_the_same_answers_as_in_process(serve, in_process, requests, vocab, payload, temperature):
    rng = np.random.default_rng(1)
    asked = []
    for request in requests:
        options = dict(wanted(vocab)[payload])
        if "ids" in options:
            options["ids"] = rng.integers(-1, vocab, (len(request.token_ids), options["ids"])).astype(np.int32)
            options["ids"] = np.maximum(options["ids"], 0)
        asked.append(replace(request, temperature=temperature, **options))
    teacher = connect(serve())
    theirs = asyncio.run(score_all(in_process, asked))
    ours = ask(teacher, *asked)
    for one, other in zip(ours, theirs, strict=True):
        same(one, other)
    if payload == "hidden":
        assert {one.head for one in ours} == {teacher.head_id}
        assert torch.equal(teacher.head.weight, in_process.head.weight)  # type: ignore
    if payload == "all":
        assert sum(one.num_floored for one in ours) > 0


async def score_all(teacher, asked):
    return await asyncio.gather(*(teacher.score(one) for one in asked))


def test_a_larger_head_than_vocabulary(serve, requests, vocab):
    """As the student's vocabulary is set after connecting, log-probs are normalised over it."""
    teacher = connect(serve())
    assert teacher.vocab == vocab == teacher.info["num_tokens"]
    teacher.ask_about(vocab - 5)
    request = replace(requests[0], token_ids=np.minimum(requests[0].token_ids, vocab - 6), k=vocab)
    request = replace(request, context_ids=np.minimum(request.context_ids, vocab - 6))
    (scores,) = ask(teacher, request)
    assert scores.topk_ids.shape[1] == vocab - 5
    np.testing.assert_allclose(scores.tail, 0.0, atol=1e-5)


def test_generation(serve, served):
    teacher = connect(serve())
    requests = [SampleRequest(np.array([1, 5, 9], np.int32), seed, 6, Sampling(0.8, num_topk=3)) for seed in range(4)]
    turns = use(teacher, lambda: gather(*(teacher.generate(one) for one in requests)))
    again = use(teacher, lambda: gather(*(teacher.generate(one) for one in requests)))  # opened anew after `close`
    for request, turn, other in zip(requests, turns, again):
        np.testing.assert_array_equal(turn.context_ids, request.context_ids)
        np.testing.assert_array_equal(turn.sampled_ids, other.sampled_ids)
        assert turn.topk_ids.shape == (len(turn.sampled_ids), 3)
        assert turn.finish in ("eos", "length")
    assert len({tuple(turn.sampled_ids) for turn in turns}) > 1


async def gather(*work):
    return await asyncio.gather(*work)


class TestConnect:
    def test_what_is_known(self, serve, served, micro_tokenizer):
        server = serve()
        teacher = connect(server, digest=served.weights["base"])
        assert teacher.digest == served.weights["base"]
        assert teacher.head_id == teacher.info["head"] == served.head_id
        assert (teacher.info["rows"], teacher.info["max_context"]) == (45, 512)
        assert teacher.tokenizer() is teacher.tokenizer()
        assert teacher.tokenizer().get_vocab() == micro_tokenizer.get_vocab()
        assert teacher.load_head() is teacher.head
        assert TeacherPool({"t": teacher}).heads(torch.device("cpu")) == {teacher.head_id: teacher.head}

    @pytest.mark.parametrize(
        ("settings", "text"),
        [
            ({"url": "localhost:80"}, r"teachers\.t\.url: 'localhost:80' must begin with http://"),
            ({"token_file": "/absent"}, r"teachers\.t\.token_file: /absent cannot be read"),
            ({"served_as": "maths"}, r"teachers\.t\.served_as: .* serves no 'maths', only base"),
            ({"adapter": "folder"}, r"teachers\.t\.served_as: .* serves no 't', only base"),
            ({"digest": "0" * 32}, r"teachers\.t\.url: .* serves weights"),
        ],
    )
    def test_refusals(self, serve, settings, text):
        with pytest.raises(UserError, match=text):
            ServedTeacher.connect("t", TeacherConfig(**{"url": serve().url, **settings}))

    def test_more_ids_than_rows(self, serve):
        with pytest.raises(UserError, match=r"teachers\.t\.url: its output head has 45 rows for the 46 ids"):
            ServedTeacher.connect("t", TeacherConfig(url=serve().url), vocab=46)

    def test_replicas_of_different_models(self, serve, load_served, model_folder):
        a, b = serve(), serve(load_served(model_folder(1)))
        with pytest.raises(UserError, match=f"{b.url} and {a.url} differ in their weights"):
            connect(a, b)

    def test_token(self, serve, tmp_path, requests):
        (tmp_path / "token").write_text("s3cret\n")
        server = serve(token="s3cret")
        with pytest.raises(UserError, match=r"answers 401: .*token_file"):
            connect(server)
        teacher = connect(server, token_file=str(tmp_path / "token"))
        assert len(ask(teacher, requests[0])[0].logps) == 4
        assert teacher.tokenizer() is not None
        server.stop()
        server.start(token="another")
        with pytest.raises(UserError, match=f"{server.url} answers 401") as info:
            ask(teacher, requests[0])
        assert "s3cret" not in str(info.value)

    def test_not_in_a_running_loop(self, serve):
        server = serve()

        async def call():
            with pytest.raises(AssertionError):
                connect(server)

        asyncio.run(call())


class TestRefused:
    """What the server or the client refuses is the user's to mend; others go on."""

    @pytest.mark.parametrize(
        ("change", "text"),
        [
            ({"context_ids": np.zeros(600, np.int32)}, "answers 400: the sequence has 604 tokens"),
            ({"context_ids": np.full(3, 44, np.int32)}, "answers 400: context_ids: has ids"),
            ({"context_ids": np.zeros(0, np.int32)}, "answers 400: context_ids: empty"),
            ({"context_ids": np.zeros(2**24 + 1, np.int32)}, "larger --max-body-mib"),
        ],
    )
    def test_requests(self, serve, requests, change, text):
        teacher = connect(serve())

        async def work():
            bad, good = await asyncio.gather(
                teacher.score(replace(requests[0], **change)), teacher.score(requests[1]), return_exceptions=True
            )
            assert isinstance(bad, UserError)
            assert text in str(bad)
            assert isinstance(good, Scores)

        use(teacher, work)
        assert teacher.num_failed == 0

    def test_a_body_that_the_server_stops_reading(self, serve, requests):
        teacher = connect(serve())
        teacher.max_body_bytes = 2**30
        with pytest.raises(UserError, match="answers 413"):
            ask(teacher, replace(requests[0], context_ids=np.zeros(2**25, np.int32)))


class TestStream:
    def expected(self, in_process, sequence, start, **options):
        request = ScoreRequest(sequence[:start], sequence[start:], **options)
        return asyncio.run(score_all(in_process, [request]))[0]

    @pytest.mark.parametrize("options", [{}, {"k": 4}, {"hidden": True}])
    def test_chunks_rewind_and_restart(self, serve, in_process, sequence, vocab, options):
        """Chunk by chunk is the whole at once, with a step back, and with another process in the middle."""
        server = serve()
        teacher = connect(server)
        other = (sequence + 1) % vocab

        async def work():
            stream = ScoreStream(teacher, sequence[:10], **options)
            parts = [await stream.append(10, sequence[10:25])]
            await stream.append(25, other[25:31])
            parts.append(await stream.append(25, sequence[25:40]))
            await asyncio.to_thread(server.stop)
            await asyncio.to_thread(server.start)
            parts.append(await stream.append(40, sequence[40:52]))
            parts.append(await stream.append(52, sequence[52:60]))
            assert server.server.model.model.streams.num_hits >= 1
            return parts

        before = server.server.model.model.streams.num_hits
        parts = use(teacher, work)
        assert server.server.model.model.streams.num_hits > before
        whole = self.expected(in_process, sequence, 10, **options)
        for name in ("logps", "topk_logps", "tail", "hidden"):
            if getattr(whole, name) is not None:
                ours = np.concatenate([np.asarray(getattr(part, name)) for part in parts])
                np.testing.assert_allclose(ours, np.asarray(getattr(whole, name)), rtol=0, atol=1e-5)

    def test_evicted(self, serve, in_process, sequence):
        server = serve()
        teacher = connect(server)

        async def work():
            stream = ScoreStream(teacher, sequence[:10])
            first = await stream.append(10, sequence[10:25])
            for name in list(streams_of(server)):
                server.server.model.close_stream(name)
            return [first, await stream.append(25, sequence[25:60])]

        parts = use(teacher, work)
        ours = np.concatenate([np.asarray(part.logps) for part in parts])
        np.testing.assert_allclose(ours, self.expected(in_process, sequence, 10).logps, rtol=0, atol=1e-5)
        assert teacher.num_failed == 0

    def test_two_replicas_of_which_one_goes(self, serve, in_process, sequence):
        a, b = serve(), serve()
        teacher = connect(a, b)

        async def one(start):
            stream = ScoreStream(teacher, sequence[:start])
            parts = []
            for at in range(start, 60, 5):
                parts.append(await stream.append(at, sequence[at : at + 5]))
                if start == 10 and at == 30:
                    await asyncio.to_thread(a.stop)
            return np.concatenate([np.asarray(part.logps) for part in parts])

        results = use(teacher, lambda: gather(*(one(start) for start in (5, 10, 15, 20))))
        for start, ours in zip((5, 10, 15, 20), results):
            np.testing.assert_allclose(ours, self.expected(in_process, sequence, start).logps, rtol=0, atol=1e-5)

    def test_closing(self, serve, sequence):
        server = serve()
        teacher = connect(server)
        before = server.server.model.model.streams.num_streams

        async def work():
            stream = ScoreStream(teacher, sequence[:10])
            await stream.append(10, sequence[10:25])
            assert server.server.model.model.streams.num_streams == before + 1
            teacher.close_stream(stream.name)
            while server.server.model.model.streams.num_streams > before:
                await asyncio.sleep(0.01)

        use(teacher, work)

    def test_closing_at_the_very_end(self, serve, sequence):
        """Neither waits nor fails, and leaves no task or thread behind."""
        before, teacher = set(threading.enumerate()), connect(serve())

        async def work():
            stream = ScoreStream(teacher, sequence[:10])
            scores = await stream.append(10, sequence[10:25])
            teacher.close_stream(stream.name)
            assert scores.logps is not None
            return scores.logps

        assert use(teacher, work).shape == (15,)
        assert not [thread for thread in set(threading.enumerate()) - before if thread.name == f"teacher {teacher.name}"]
        teacher.close_stream("nothing is open any more")
        assert not [thread for thread in set(threading.enumerate()) - before if thread.name == f"teacher {teacher.name}"]


def streams_of(server):
    streams = server.server.model.model.streams
    return next(value for value in vars(streams).values() if isinstance(value, dict))


class TestFailure:
    def test_one_of_two_ends_and_comes_back(self, serve, in_process, many):
        a, b = serve(), serve()
        teacher = connect(a, b, max_in_flight=4)
        expected = asyncio.run(score_all(in_process, many))

        async def work():
            going = asyncio.gather(*(teacher.score(one) for one in many))
            await asyncio.sleep(0.05)
            await asyncio.to_thread(a.stop)
            for one, other in zip(await going, expected, strict=True):
                same(one, other)
            await asyncio.to_thread(a.start)
            counted = a.server.metrics.requests
            for _ in range(200):
                await asyncio.gather(*(teacher.score(one) for one in many[:16]))
                if counted.labels("/v1/score", "200")._value.get() > 3:
                    return
            raise AssertionError("the replica that came back is not used")

        use(teacher, work)

    def test_all_end(self, serve, many):
        a, b = serve(), serve()
        teacher = connect(a, b, max_in_flight=4, timeout_s=1.0, deadline_s=1.5)

        async def work():
            await asyncio.gather(*(teacher.score(one) for one in many))
            await asyncio.to_thread(a.stop)
            await asyncio.to_thread(b.stop)
            start = time.monotonic()
            with pytest.raises(UserError) as info:
                await asyncio.gather(*(teacher.score(one) for one in many))
            assert 1.4 < time.monotonic() - start < 4.0
            return str(info.value)

        message = use(teacher, work)
        assert message.startswith("teachers.t.url: no answer within 1.5 s")
        for text in (f"{a.url}: connection refused", f"{b.url}: connection refused", "resume with --resume"):
            assert text in message

    def test_back_with_other_weights(self, serve, load_served, model_folder, many):
        a, b = serve(), serve()
        teacher = connect(a, b, max_in_flight=4)
        other = load_served(model_folder(1))

        async def work():
            await asyncio.gather(*(teacher.score(one) for one in many))
            await asyncio.to_thread(a.stop)
            await asyncio.gather(*(teacher.score(one) for one in many))
            await asyncio.to_thread(a.start, other)
            before = other.model.num_batches
            for _ in range(40):
                await asyncio.gather(*(teacher.score(one) for one in many[:8]))
                await asyncio.sleep(0.01)
            assert other.model.num_batches == before

        use(teacher, work)

    def test_replaced_by_other_weights_unnoticed(self, serve, load_served, model_folder, many):
        only = serve()
        teacher = connect(only)
        other = load_served(model_folder(1))

        async def work():
            await teacher.score(many[0])
            await asyncio.to_thread(only.stop)
            await asyncio.to_thread(only.start, other)
            with pytest.raises(UserError, match=r"teachers\.t\.url: .*serves other weights than at the start"):
                await teacher.score(many[0])

        use(teacher, work)

    def test_a_blocked_caller_is_no_timeout(self, serve, many):
        """The trainer's loop may be busy for longer than any time limit: answers arrive meanwhile."""
        teacher = connect(serve(), timeout_s=1.0, deadline_s=1.2)

        async def work():
            for pause in (0.0, 0.01):
                going = [asyncio.create_task(teacher.score(one)) for one in many[:60]]
                await asyncio.sleep(pause)
                time.sleep(1.6)
                await asyncio.gather(*going)
            assert teacher.num_failed == 0

        use(teacher, work)

    def test_the_client_thread_itself_is_blocked(self, serve, many):
        """As when the process was stopped and goes on."""
        teacher = connect(serve(), timeout_s=1.0, deadline_s=1.2)

        async def block():
            time.sleep(1.6)

        async def work():
            for pause in (0.0, 0.01):
                going = [asyncio.create_task(teacher.score(one)) for one in many[:60]]
                await asyncio.sleep(pause)
                assert teacher._thread is not None
                await teacher._thread.run(block)
                await asyncio.gather(*going)
            assert teacher.num_failed == 0

        use(teacher, work)

    def test_cancelled_callers(self, serve, in_process, many):
        server = serve()
        teacher = connect(server, max_in_flight=4)
        expected = asyncio.run(score_all(in_process, many))

        async def work():
            tasks = [asyncio.create_task(teacher.score(one)) for one in many]
            await asyncio.sleep(0.02)
            for task in tasks[::2]:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            for one, other in zip(results[1::2], expected[1::2], strict=True):
                same(one, other)
            replicas = teacher._replicas
            assert replicas is not None
            assert [(one.num_requests, one.num_tokens) for one in replicas.replicas] == [(0, 0)]

        use(teacher, work)

    def test_nothing_is_left_behind(self, serve, many):
        """Threads, tasks and connections, also of a run that was broken off."""
        server = serve()
        before = set(threading.enumerate())
        teacher = connect(server)

        async def broken():
            tasks = [asyncio.create_task(teacher.score(one)) for one in many]
            await asyncio.sleep(0.01)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        with warnings.catch_warnings():
            warnings.simplefilter("error")
            use(teacher, broken)
        assert {thread for thread in set(threading.enumerate()) - before if "teacher" in thread.name} == set()


def test_two_processes_of_which_one_is_killed(in_process, model_folder, vocab, tmp_path):
    """`kill -9` in the middle: every request has its answer, once."""
    command = [
        sys.executable,
        "-m",
        "opd",
        "serve",
        "teacher",
        "--model",
        str(model_folder(0)),
        "--port",
        "0",
        "--device",
        "cpu",
    ]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) for _ in range(2)]
    try:
        lines = [process.stdout.readline() for process in processes if process.stdout]
        urls = ",".join(line.split()[3] for line in lines)
        teacher = ServedTeacher.connect("t", TeacherConfig(url=urls, logp_floor=FLOOR, max_in_flight=4))
        rng = np.random.default_rng(3)
        many = [ScoreRequest(one[:40], one[40:]) for one in rng.integers(0, vocab, (300, 80)).astype(np.int32)]
        expected = asyncio.run(score_all(in_process, many))
        done = []

        async def one(request):
            scores = await teacher.score(request)
            done.append(request)
            if len(done) == 30:
                processes[0].send_signal(signal.SIGKILL)
            return scores

        results = use(teacher, lambda: gather(*(one(request) for request in many)))
        for ours, theirs in zip(results, expected, strict=True):
            same(ours, theirs)
        assert processes[0].wait(10) == -signal.SIGKILL
        assert len(done) == 300
    finally:
        for process in processes:
            process.kill()
            process.communicate()
