"""The model in this process against plain log-softmaxes, one request at a time; and how requests share passes."""

import asyncio
import hashlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from opd.errors import UserError
from opd.models import decoder
from opd.records import ScoreRequest
from opd.teachers.hf import HFModel, HFTeacher, View

LENGTHS = [(3, 4), (9, 0), (20, 7), (3, 1), (1, 12)]  # context, tokens


@pytest.fixture(scope="module")
def folder(model_folder):
    return model_folder(3)


@pytest.fixture
def make(folder, vocab):
    """`make(chunk_bytes, **settings)`: a teacher with a micro model of its own, or with another folder's."""

    def build(chunk_bytes: int = 2**20, logp_floor: float = -30.0, model: str = str(folder), **settings) -> HFTeacher:
        cpu = torch.device("cpu")
        loaded = HFModel("teachers.t.model", model, device=cpu, chunk_bytes=chunk_bytes, **settings)
        return HFTeacher("t", loaded, View(vocab, logp_floor))

    return build


def ask_all(teacher: HFTeacher, requests) -> list[Any]:
    """Asked of the teacher all at once."""

    async def ask():
        return await asyncio.gather(*(teacher.score(request) for request in requests))

    return asyncio.run(ask())


@pytest.fixture(scope="module")
def requests(vocab):
    rng = np.random.default_rng(0)
    ids = [(rng.integers(0, vocab, c).astype(np.int32), rng.integers(0, vocab, n).astype(np.int32)) for c, n in LENGTHS]
    return [ScoreRequest(context, tokens) for context, tokens in ids]


@pytest.fixture(scope="module")
def exact(folder, vocab):
    """`exact(request)`: log-probs [n, V] of a plain forward over this request alone."""
    usual = vocab
    model = AutoModelForCausalLM.from_pretrained(folder)

    def compute(request: ScoreRequest, vocab: int = usual) -> torch.Tensor:
        ids = torch.from_numpy(np.concatenate([request.context_ids, request.token_ids])).long()[None]
        with torch.no_grad():
            logits = model(ids).logits[0, len(request.context_ids) - 1 : -1, :vocab]
        return (logits.double() / request.temperature).log_softmax(-1)

    return compute


def digest(teacher: HFTeacher) -> str:
    sha = hashlib.sha256()
    for parameter in teacher.model.model.parameters():
        sha.update(parameter.contiguous().view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def close(ours, theirs, atol=5e-6):
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=atol)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(("max_batch_tokens", "chunk_bytes"), [(10**6, 2**20), (30, 1), (1, 1000)])
def test_log_probs_of_the_sampled_tokens(make, requests, exact, temperature, max_batch_tokens, chunk_bytes):
    teacher = make(chunk_bytes, max_batch_tokens=max_batch_tokens)
    asked = [replace(request, temperature=temperature) for request in requests]
    for request, scores in zip(asked, ask_all(teacher, asked), strict=True):
        assert scores.logps.dtype == np.float32
        close(scores.logps, exact(request).gather(-1, torch.from_numpy(request.token_ids).long()[:, None])[:, 0])
        assert scores.topk_ids is scores.topk_logps is scores.tail is scores.hidden is None


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_its_own_most_likely_tokens(make, requests, exact, vocab, temperature):
    asked = [replace(request, k=5, temperature=temperature) for request in requests]
    for request, scores in zip(asked, ask_all(make(chunk_bytes=500), asked), strict=True):
        top = exact(request).topk(5)
        assert scores.topk_ids.dtype == np.int32
        assert scores.topk_ids.tolist() == top.indices.tolist()
        close(scores.topk_logps, top.values)
        close(scores.tail, 1 - top.values.exp().sum(-1))
        assert scores.topk_ids.max(initial=0) < vocab  # never a row of padding


def test_all_tokens_leave_no_tail(make, requests, vocab):
    for scores in ask_all(make(), [replace(request, k=10**6) for request in requests]):
        assert scores.topk_ids.shape[1] == vocab
        close(scores.tail, 0.0, atol=1e-6)
        assert (scores.tail >= 0).all()


def test_given_tokens_then_its_own_without_repeats(make, requests, exact):
    request = requests[2]
    own = exact(request).topk(3).indices.numpy()
    given = np.stack([own[:, 1], np.full(7, 5), np.full(7, 5), np.full(7, -1)], axis=1).astype(np.int32)
    (scores,) = ask_all(make(), [replace(request, ids=given, k=3)])
    assert scores.topk_ids.shape == scores.topk_logps.shape == (7, 7)
    logp = exact(request)
    for row in range(7):
        ids = scores.topk_ids[row]
        present = ids[ids >= 0]
        assert len(set(present.tolist())) == len(present)
        assert set(present.tolist()) == {*own[row].tolist(), 5}
        assert ids[0] == own[row, 1]  # the first mention stays
        close(scores.topk_logps[row][ids >= 0], logp[row, present])
        assert not scores.topk_logps[row][ids < 0].any()
        close(scores.tail[row], 1 - logp[row, present].exp().sum())


def test_hidden_states_and_head_give_the_same_log_probs(make, requests, exact, vocab):
    teacher = make()
    for request, scores in zip(requests, ask_all(teacher, [replace(r, hidden=True) for r in requests]), strict=True):
        assert scores.logps is None
        assert scores.head == "t"
        logits = teacher.head.logits(scores.hidden, vocab)
        close(logits.double().log_softmax(-1), exact(request))


def test_low_log_probs_are_raised_to_the_floor_and_counted(make, model_folder, requests, vocab):
    sharp = model_folder(3, initializer_range=1.0)
    teacher = make(model=str(sharp), logp_floor=-8.0)
    free = make(model=str(sharp), logp_floor=-1000.0)
    scores = ask_all(teacher, [replace(request, k=vocab) for request in requests])
    plain = ask_all(free, [replace(request, k=vocab) for request in requests])
    below = sum(int((p.logps < -8).sum() + (p.topk_logps < -8).sum()) for p in plain)
    assert sum(answer.num_floored for answer in scores) == below > 0
    assert not any(answer.num_floored for answer in plain)
    for ours, theirs in zip(scores, plain):
        assert (ours.logps >= -8).all()
        close(ours.topk_logps, np.maximum(theirs.topk_logps, -8))
        close(ours.tail, theirs.tail)  # of the probabilities as they are


def test_an_impossible_token_is_finite(make, requests):
    teacher = make()
    with torch.no_grad():
        teacher.head.weight[7] *= 1e30
    answers = ask_all(teacher, [replace(request, k=3) for request in requests])
    for scores in answers:
        for logps in (scores.logps, scores.topk_logps):
            assert np.isfinite(logps).all()
            assert (logps >= -30).all()
    assert sum(scores.num_floored for scores in answers) > 0


def test_its_weights_never_change(make, requests):
    teacher = make()
    before = digest(teacher)
    assert not any(parameter.requires_grad for parameter in teacher.model.model.parameters())
    scores = ask_all(teacher, [replace(request, hidden=True, k=0) for request in requests])
    ask_all(teacher, [replace(request, k=3) for request in requests])
    assert not any(answer.hidden.requires_grad for answer in scores)
    assert not any(module.training for module in teacher.model.model.modules())
    assert digest(teacher) == before


@pytest.fixture
def forwards(monkeypatch):
    """`forwards(teacher)`: a list that gets the shape of each forward pass."""

    def watch(teacher: HFTeacher) -> list[tuple[int, ...]]:
        shapes: list[tuple[int, ...]] = []
        decoder(teacher.model.model).register_forward_pre_hook(
            lambda module, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
        )
        return shapes

    return watch


def test_concurrent_requests_share_forward_passes(make, requests, forwards):
    teacher = make()
    shapes = forwards(teacher)
    together = ask_all(teacher, requests * 10)
    assert len(shapes) == 1
    assert teacher.model.num_tokens == 10 * sum(len(request.token_ids) for request in requests)
    for scores, alone in zip(together, ask_all(teacher, requests) * 10):
        close(scores.logps, alone.logps)


def test_views_and_temperatures_share_them_too(make, requests, exact, forwards):
    model = make().model
    teachers = [HFTeacher("all", model, View(45)), HFTeacher("few", model, View(20, logp_floor=-2.0))]
    asked = [replace(requests[2], token_ids=requests[2].token_ids % 20, temperature=t, k=2) for t in (1.0, 0.5)]
    shapes = forwards(teachers[0])

    async def ask():
        return await asyncio.gather(*(teacher.score(request) for teacher in teachers for request in asked))

    together: list[Any] = asyncio.run(ask())
    assert [shape[0] for shape in shapes] == [4]
    for scores, (vocab, floor, request) in zip(
        together, [(v, floor, r) for v, floor in ((45, -30.0), (20, -2.0)) for r in asked], strict=True
    ):
        logp = exact(request, vocab)
        close(scores.logps, logp.gather(-1, torch.from_numpy(request.token_ids).long()[:, None])[:, 0].clamp(min=floor))
        assert scores.topk_ids.max() < vocab
        assert scores.num_floored == int((scores.logps == floor).sum() + (scores.topk_logps == floor).sum())
    assert [scores.num_floored > 0 for scores in together] == [False, False, True, True]


@pytest.mark.parametrize("entries", [1, 100, 10**6])
def test_answers_read_together_or_apart_are_the_same(make, requests, vocab, monkeypatch, entries):
    monkeypatch.setattr("opd.teachers.hf.MAX_ENTRIES", entries)
    teacher = make()
    given = [np.full((len(request.token_ids), 2), i, np.int32) for i, request in enumerate(requests)]
    asked = [replace(request, ids=ids, k=3) for request, ids in zip(requests, given)] + [replace(r, k=1) for r in requests]
    together = ask_all(teacher, asked)
    for request, scores in zip(asked, together, strict=True):
        (alone,) = ask_all(teacher, [request])
        assert scores.topk_ids.tolist() == alone.topk_ids.tolist()
        for name in ("logps", "topk_logps", "tail"):
            close(getattr(scores, name), getattr(alone, name))


def test_without_streams_nothing_is_cached_or_masked(make, requests):
    teacher = make()
    seen: list[dict[str, object]] = []
    decoder(teacher.model.model).register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs), with_kwargs=True
    )
    ask_all(teacher, requests)
    assert [sorted(inputs) for inputs in seen] == [["input_ids", "use_cache"]]
    assert seen[0]["use_cache"] is False


def test_answers_are_delivered_pass_by_pass_before_newer_requests(make, requests):
    """The first answered asks again at once, and comes after all who waited already."""
    teacher = make(max_batch_tokens=1)
    order: list[str] = []

    async def ask(name: str, again: int = 0) -> None:
        await teacher.score(requests[0])
        order.append(name)
        if again:
            await ask(f"{name} again", again - 1)

    async def run():
        await asyncio.gather(ask("a", again=1), ask("b"), ask("c"))

    asyncio.run(run())
    assert order == ["a", "b", "c", "a again"]


def test_requests_are_gathered_while_more_may_come(make, requests, forwards):
    coming = 20
    teacher = make(busy=lambda: coming > 0, max_batch_tokens=10**6)
    shapes = forwards(teacher)

    async def ask():
        nonlocal coming
        tasks = []
        for _ in range(20):
            tasks.append(asyncio.create_task(teacher.score(requests[0])))
            await asyncio.sleep(0)
            coming -= 1
        await asyncio.gather(*tasks)

    asyncio.run(ask())
    assert [shape[0] for shape in shapes] == [20]


def test_a_full_budget_is_answered_though_more_may_come(make, requests):
    teacher = make(busy=lambda: True, max_batch_tokens=30)

    async def ask():
        return await asyncio.gather(*(teacher.score(requests[0]) for _ in range(9)))

    assert len(asyncio.run(asyncio.wait_for(ask(), 30))) == 9


def test_an_error_reaches_everyone_who_asked_and_nobody_after(make, requests, monkeypatch):
    teacher = make()

    def fail(*arguments):
        raise RuntimeError("broken")

    async def ask():
        return await asyncio.gather(*(teacher.score(request) for request in requests), return_exceptions=True)

    with monkeypatch.context() as patched:
        patched.setattr(teacher.model, "_states", fail)
        assert all(isinstance(answer, RuntimeError) for answer in asyncio.run(ask()))
    assert not any(isinstance(answer, BaseException) for answer in asyncio.run(ask()))


def test_a_cancelled_request_does_not_hold_up_the_others(make, requests):
    teacher = make()

    async def ask():
        tasks = [asyncio.create_task(teacher.score(request)) for request in requests]
        await asyncio.sleep(0)
        tasks[1].cancel()
        return await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 30)

    answers = asyncio.run(ask())
    assert [isinstance(answer, asyncio.CancelledError) for answer in answers] == [False, True, False, False, False]


def test_a_folder_without_a_model_is_named(make, tmp_path):
    with pytest.raises(UserError, match=r"teachers\.t\.model: .* holds no model"):
        make(model=str(tmp_path))
    with pytest.raises(UserError, match=r"teachers\.t\.model: no such folder"):
        make(model=str(tmp_path / "nothing"))


def test_a_head_with_fewer_rows_than_ids_is_refused(make):
    model = make().model
    with pytest.raises(UserError, match=r"teachers\.t\.model: its output head has 45 rows for the 46 ids of the student"):
        HFTeacher("t", model, View(46))


def test_chunks_of_an_unfinished_rollout_do_not_wait(make, requests):
    teacher = make(busy=lambda: True, max_batch_tokens=10**6)

    async def ask():
        return await asyncio.wait_for(teacher.score(replace(requests[0], stream="s")), 30)

    assert asyncio.run(ask()).logps.shape == requests[0].token_ids.shape
