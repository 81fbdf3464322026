"""What is read before a run: infos, tokenizer and head of real servers, and what is said where one is not usable."""

import asyncio
import time
from dataclasses import replace

import pytest
import torch
from aiohttp import web

from opd.errors import UserError
from opd.kernels.head import OutputHead
from opd.models import load_causal_lm, output_head
from opd.teachers.client.handshake import identity
from opd.teachers.client.servers import Servers
from opd.teachers.digest import head_digest
from opd.teachers.wire import encode_head


def at(*urls: str, token: str | None = None, timeout_s: float = 10.0, deadline_s: float = 30.0) -> Servers:
    return Servers("t", urls, token, timeout_s, deadline_s)


def test_infos_in_the_order_of_the_addresses(faulty):
    a, b = faulty(), faulty(weights="12" * 16)
    infos = at(b.url, a.url).infos()
    assert [url for url, _ in infos] == [b.url, a.url]
    assert [info["models"]["base"]["weights"] for _, info in infos] == ["12" * 16, "ab" * 16]


def test_one_that_is_late(faulty):
    """Asked again until it answers, while the other waits."""
    a, b = faulty(), faulty()
    b.stop()
    start = time.monotonic()

    async def later():
        await asyncio.sleep(0.5)
        await b._start()

    asyncio.run_coroutine_threadsafe(later(), b._loop)
    assert len(at(a.url, b.url).infos()) == 2
    assert 0.4 < time.monotonic() - start < 5


def test_one_that_never_answers(faulty):
    a, b = faulty(), faulty()
    b.stop()
    start = time.monotonic()
    with pytest.raises(UserError) as info:
        at(a.url, b.url, timeout_s=0.5, deadline_s=0.8).infos()
    assert 0.7 < time.monotonic() - start < 3
    assert str(info.value) == (
        f"teachers.t.url: no answer within 0.8 s ({b.url}: connection refused); "
        "start the server (opd serve teacher), or correct the address"
    )
    b.start()


@pytest.mark.parametrize(
    ("changes", "text"),
    [("<html>", "is not JSON"), ({"protocol": 2}, "speaks protocol 2"), ({"tokens": None}, "no usable 'tokens'")],
)
def test_mistakes_show_at_once(faulty, changes, text):
    """Also when another address would have to be waited for."""
    wrong, absent = faulty(info_changes=changes), faulty()
    absent.stop()
    start = time.monotonic()
    with pytest.raises(UserError, match=text):
        at(absent.url, wrong.url).infos()
    assert time.monotonic() - start < 5
    absent.start()


def test_a_token_is_wanted(faulty):
    server = faulty(token="s3cret")
    assert at(server.url, token="s3cret").infos()
    with pytest.raises(
        UserError, match=f"^teachers.t.url: {server.url} answers 401: give the server's token; set token_file"
    ):
        at(server.url).infos()


def test_not_in_a_running_loop(faulty):
    server = faulty()

    async def call():
        with pytest.raises(AssertionError, match="would block the running event loop"):
            at(server.url).infos()

    asyncio.run(call())


class TestReal:
    @pytest.fixture
    def servers(self, live):
        return at(live().url)

    @pytest.fixture
    def known(self, servers):
        return identity(servers.infos()[0][1], "base")

    def test_tokenizer(self, servers, known, micro_tokenizer):
        tokenizer = servers.tokenizer(known)
        assert tokenizer.get_vocab() == micro_tokenizer.get_vocab()
        messages = [{"role": "user", "content": "abc"}]
        ids = [
            one.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
            for one in (tokenizer, micro_tokenizer)
        ]
        assert ids[0] == ids[1]
        assert tokenizer.eos_token_id == micro_tokenizer.eos_token_id

    def test_head(self, servers, known, served, model_folder):
        head = servers.head(known)
        expected = output_head(load_causal_lm(str(model_folder(0)), "model"))
        assert torch.equal(head.weight, expected.weight)  # type: ignore
        assert head.scale == expected.scale
        assert head.weight.dtype == expected.weight.dtype  # type: ignore

    def test_another_tokenizer(self, servers, known):
        with pytest.raises(UserError, match=r"^teachers\.t\.url: the server's tokenizer has other tokens here"):
            servers.tokenizer(replace(known, tokens="0" * 32))

    def test_no_such_head(self, servers, known):
        with pytest.raises(UserError, match="answers 404: this server's only head is"):
            servers.head(replace(known, head="0" * 32))


class TestTold:
    """Answers of no real server, given by a replica that says what it is told."""

    @pytest.fixture
    def tell(self, monkeypatch):
        def set_answer(*answers):
            left = list(answers)

            async def get(self, path, max_bytes, progress=lambda: None):
                progress()
                return left.pop(0) if len(left) > 1 else left[0]

            async def get_json(self, path, max_bytes):
                return left.pop(0) if len(left) > 1 else left[0]

            monkeypatch.setattr("opd.teachers.client.replica.Replica.get", get)
            monkeypatch.setattr("opd.teachers.client.replica.Replica.get_json", get_json)
            return left

        return set_answer

    @pytest.mark.parametrize(
        "files",
        [
            None,
            [],
            {"../x.json": "{}"},
            {"/etc/x": "{}"},
            {"a/b/c": "{}"},
            {"a/../b": ""},
            {"tokenizer.json": 3},
            {".x": ""},
            {"": ""},
        ],
    )
    def test_names_that_lead_elsewhere(self, tell, faulty, files):
        known = identity(at(faulty().url).infos()[0][1], "base")
        tell(files)
        with pytest.raises(UserError, match="is no files by name"):
            at("http://x").tokenizer(known)

    @pytest.mark.parametrize("files", [{}, {"tokenizer.json": "{"}, {"tokenizer.json": "{}", "tokenizer_config.json": "[]"}])
    def test_files_that_are_no_tokenizer(self, tell, faulty, files):
        known = identity(at(faulty().url).infos()[0][1], "base")
        tell(files)
        with pytest.raises(UserError, match=r"^teachers\.t\.url: the server's tokenizer cannot be read here: .+") as info:
            at("http://x").tokenizer(known)
        assert "\n" not in str(info.value)

    def test_a_head_that_comes_broken_is_asked_for_again(self, tell, faulty):
        head = OutputHead(torch.randn(45, 8))
        name = head_digest(head)
        known = replace(identity(at(faulty().url).infos()[0][1], "base"), head=name)
        right = bytearray(bytes(encode_head(head, name)))
        changed = bytearray(right)
        changed[-1] ^= 1
        left = tell(bytearray(b"garbage"), right[:-5], changed, bytearray(bytes(encode_head(head, "other"))), right)
        assert torch.equal(at("http://x", "http://y").head(known).weight, head.weight)  # type: ignore
        assert len(left) == 1
        tell(changed)
        with pytest.raises(UserError, match="another head than the one it was asked for"):
            at("http://x", deadline_s=0.5).head(known)


def test_a_slow_download_goes_on_as_long_as_bytes_come(faulty):
    head = OutputHead(torch.randn(45, 8))
    name = head_digest(head)
    server = faulty()
    known = replace(identity(at(server.url).infos()[0][1], "base"), head=name)
    body = bytes(encode_head(head, name))

    async def slow(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for start in range(0, len(body), 200):
            await response.write(body[start : start + 200])
            await asyncio.sleep(0.1)
        return response

    server.stop()
    server._info = slow  # the route does not matter
    server.start()
    start = time.monotonic()

    def renamed(self, path, max_bytes, progress=lambda: None):
        return self._exchange("GET", "/v1/info", max_bytes, progress=progress)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("opd.teachers.client.replica.Replica.get", renamed)
        assert torch.equal(at(server.url, timeout_s=0.4, deadline_s=0.6).head(known).weight, head.weight)  # type: ignore
    assert time.monotonic() - start > 0.7
