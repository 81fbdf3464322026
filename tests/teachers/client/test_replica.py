"""One address: what each result of HTTP means, on real connections to a server that fails on demand."""

import asyncio
import socket

import aiohttp
import pytest

from opd.errors import UserError
from opd.teachers.client.replica import Busy, Failed, Replica, open_session, pause_s
from opd.teachers.stream import StreamLost

FIELD = "teachers.t.url"


def use(url: str, work, token: str | None = None):
    """What `work(replica)` gives."""

    async def run():
        async with open_session(token) as session:
            return await work(Replica(session, url, FIELD))

    return asyncio.run(run())


@pytest.fixture
def body(frame):
    return frame(0, 3, 4)


def post(body: bytes, max_bytes: int = 10**5):
    return lambda replica: replica.post("/v1/score", body, max_bytes)


def test_an_answer(faulty, body):
    server = faulty()
    assert len(use(server.url, post(body))) > 100
    info = use(server.url, lambda replica: replica.get_json("/v1/info", 10**5))
    assert info["protocol"] == 1
    use(server.url, lambda replica: replica.delete("/v1/streams/abc"))
    assert server.closed == ["abc"]


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("status:500", "it answers 500: as it was told"),
        ("status:502", "it answers 502: as it was told"),
        ("status:408", "it answers 408: as it was told"),
        ("reset", "it closed the connection"),
        ("truncated", "its answer was cut short"),
        ("nohttp", "its answer is no HTTP"),
        ("long", "longer than the 100000 bytes"),
        ("endless", "longer than the 100000 bytes"),
    ],
)
def test_failures(faulty, body, fault, text):
    server = faulty(fault)
    with pytest.raises(Failed, match=text) as info:
        use(server.url, post(body))
    assert "\n" not in str(info.value)
    assert len(server.asked) == 1


def test_nobody_listens(body):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        with pytest.raises(Failed, match=r"^connection refused$"):
            use(f"http://127.0.0.1:{taken.getsockname()[1]}", post(body))


def test_no_such_host(body, monkeypatch):
    async def fail(*_args, **_options):
        raise OSError(-2, "Name or service not known")

    monkeypatch.setattr(aiohttp.resolver.ThreadedResolver, "resolve", fail)
    with pytest.raises(Failed, match="host name is not known"):
        use("http://nowhere.invalid", post(body))


def test_no_tls_there(faulty, body):
    with pytest.raises(Failed, match="no TLS with it"):
        use(faulty().url.replace("http://", "https://"), post(body))


@pytest.mark.parametrize("status", [400, 401, 403, 404, 405, 413, 418])
def test_what_only_the_user_can_mend(faulty, body, status):
    server = faulty(f"status:{status}")
    with pytest.raises(UserError, match=rf"^teachers\.t\.url: {server.url} answers {status}: as it was told") as info:
        use(server.url, post(body))
    assert ("token_file" in str(info.value)) == (status == 401)
    assert ("is this the opd server" in str(info.value)) == (status in (403, 404, 405, 418))


def test_redirects_are_not_followed(faulty, body):
    server = faulty("redirect")
    with pytest.raises(UserError, match=r"answers 307: .*leads to"):
        use(server.url, post(body))
    assert len(server.asked) == 1


def test_a_lost_stream(faulty, body):
    with pytest.raises(StreamLost, match="as it was told"):
        use(faulty("status:409").url, post(body))


@pytest.mark.parametrize(
    ("header", "pause"), [("2", 2.0), ("0", 0.05), ("86400", 5.0), ("", None), ("-1", None), ("Mon", None)]
)
def test_busy(faulty, body, header, pause):
    with pytest.raises(Busy, match="503: busy") as info:
        use(faulty(f"busy:{header}").url, post(body))
    if pause is not None:
        assert info.value.pause_s == pause
    else:
        assert 0.4 < info.value.pause_s <= 1.0


def test_too_many_requests_is_busy(faulty, body):
    with pytest.raises(Busy):
        use(faulty("status:429").url, post(body))


def test_no_json(faulty):
    server = faulty(info_changes="<html>")
    with pytest.raises(UserError, match=f"^{FIELD}: {server.url} is no teacher server of opd: its /v1/info is not JSON"):
        use(server.url, lambda replica: replica.get_json("/v1/info", 100))


def test_the_token_goes_along_and_appears_nowhere(faulty):
    server = faulty(token="s3cret")
    assert use(server.url, lambda replica: replica.get_json("/v1/info", 10**5), "s3cret")["protocol"] == 1
    for wrong in (None, "hush"):
        with pytest.raises(UserError, match="answers 401: give the server's token; set token_file") as info:
            use(server.url, lambda replica: replica.get_json("/v1/info", 10**5), wrong)
        assert "hush" not in str(info.value)


def test_proxies_of_the_environment_are_ignored(faulty, body, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert use(faulty().url, post(body))


def test_a_large_body_goes_without_a_warning(faulty, ask):
    from opd.teachers.wire import encode_score_request

    server = faulty()
    body = encode_score_request(ask(0, 500_000, 4))
    assert len(body) > 2**20
    assert use(server.url, post(body))


def test_a_connection_that_the_server_closed_meanwhile_is_no_failure(faulty, body):
    """The server drops the kept connection as the next request arrives on it: asked again at once, on another."""
    server = faulty()

    async def twice(replica):
        await replica.post("/v1/score", body, 10**5)
        server.faults = ["reset"]
        await replica.post("/v1/score", body, 10**5)
        server.faults = ["reset", "reset"]  # a second one is the server's failure
        with pytest.raises(Failed, match="closed the connection"):
            await replica.post("/v1/score", body, 10**5)

    use(server.url, twice)
    assert (len(server.asked), len(server.answered)) == (5, 2)


def test_a_restarted_server_is_a_closed_connection(faulty, body):
    server = faulty()

    async def across(replica):
        await replica.post("/v1/score", body, 10**5)
        await asyncio.to_thread(server.stop)
        await asyncio.to_thread(server.start)
        await replica.post("/v1/score", body, 10**5)

    use(server.url, across)
    assert len(server.answered) == 2


def test_pauses_grow_to_five_seconds_and_differ():
    for count in (1, 2, 5, 60):
        longest = min(5.0, 0.1 * 2 ** (count - 1))
        pauses = {pause_s(count) for _ in range(50)}
        assert len(pauses) > 10
        assert all(longest / 2 <= pause <= longest for pause in pauses)
