"""Streams: chunk by chunk equals the whole, whatever the chunks, rewinds, neighbours, evictions and architecture."""

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    FalconConfig,
    FalconForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from opd.models import decoder
from opd.records import ScoreRequest, Scores
from opd.teachers.hf import HFModel, View
from opd.teachers.kv_streams import PassCache, Row, Stream, Streams, agrees, extent, open_row
from opd.teachers.stream import StreamLost, ids_crc

CPU = torch.device("cpu")
SIZES: dict[str, Any] = {
    "vocab_size": 45,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "initializer_range": 0.2,
}
WIDER: dict[str, Any] = SIZES | {"intermediate_size": 48, "num_key_value_heads": 2, "max_position_embeddings": 512}
FULL = ["llama", "eager", "gpt2"]
PARTIAL = ["sliding", "mixed", "hybrid", "dynamic", "alibi"]


def build(kind: str, micro_model):
    torch.manual_seed(0)
    if kind == "gpt2":
        return GPT2LMHeadModel(GPT2Config(**SIZES, n_positions=64))
    if kind == "sliding":
        return MistralForCausalLM(MistralConfig(**WIDER, sliding_window=5))
    if kind == "mixed":
        layers = ["full_attention", "sliding_attention"]
        return Qwen2ForCausalLM(Qwen2Config(**WIDER, use_sliding_window=True, sliding_window=5, layer_types=layers))
    if kind == "hybrid":
        layers = ["linear_attention", "full_attention"]
        heads: dict[str, Any] = {
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 8,
            "head_dim": 8,
        }
        experts: dict[str, Any] = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
        experts |= {"shared_expert_intermediate_size": 16, "linear_value_head_dim": 8}
        return Qwen3NextForCausalLM(Qwen3NextConfig(**WIDER, **heads, **experts, layer_types=layers))
    if kind == "alibi":
        return FalconForCausalLM(FalconConfig(**SIZES, alibi=True, new_decoder_architecture=False))
    if kind == "dynamic":
        return micro_model(3, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4})
    return micro_model(3)


@pytest.fixture(scope="module")
def load(micro_model, tmp_path_factory):
    """`load(kind, **settings)`: a model of that architecture; the same weights every time."""
    folders = {}

    def get(kind: str = "llama", **settings) -> HFModel:
        if kind not in folders:
            folders[kind] = tmp_path_factory.mktemp(kind)
            build(kind, micro_model).save_pretrained(folders[kind])
        attention = "eager" if kind == "eager" else "sdpa"
        return HFModel("m", str(folders[kind]), attention=attention, device=CPU, chunk_bytes=2**20, **settings)

    return get


@pytest.fixture
def view(vocab):
    return View(vocab)


def ids(seed: int, size: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 37, size).astype(np.int32)


def one(model: HFModel, request: ScoreRequest, view: View) -> Scores:
    (answer,) = model.score_batch([(request, view)])
    assert isinstance(answer, Scores), answer
    return answer


def same(ours: Scores, theirs: Scores, rows: slice = slice(None), atol: float = 1e-5) -> None:
    for field in ("logps", "topk_logps", "tail", "hidden"):
        a, b = getattr(ours, field), getattr(theirs, field)
        assert (a is None) == (b is None)
        if a is not None:
            np.testing.assert_allclose(a, b[rows], rtol=0, atol=atol)
    if ours.topk_ids is not None and theirs.topk_ids is not None:
        assert ours.topk_ids.tolist() == theirs.topk_ids[rows].tolist()


PAYLOADS = {
    "sampled": {},
    "temperature": {"temperature": 0.7},
    "topk": {"k": 5},
    "given": {"ids": 4, "k": 2},
    "hidden": {"hidden": True},
}


def whole_request(context, tokens, payload: str) -> ScoreRequest:
    wanted = dict(PAYLOADS[payload])
    if "ids" in wanted:
        wanted["ids"] = ids(99, 4 * len(tokens)).reshape(-1, 4)
    return ScoreRequest(context, tokens, **wanted)


def part(request: ScoreRequest, start: int, stop: int, name: str, with_context: int = 0) -> ScoreRequest:
    """Of the tokens [start, stop); the stream keeps all before, but for `with_context` tokens that are sent again."""
    sequence = np.concatenate([request.context_ids, request.token_ids])
    c = len(request.context_ids)
    keep = max(0, c + start - with_context) if start else 0
    return replace(
        request,
        context_ids=sequence[keep : c + start],
        token_ids=request.token_ids[start:stop],
        ids=None if request.ids is None else request.ids[start:stop],
        stream=name,
        keep_tokens=keep,
    )


@pytest.mark.parametrize("kind", FULL + PARTIAL)
def test_which_models_keep_keys(load, kind):
    model = load(kind)
    assert model.cached_streams == (kind in FULL)


@pytest.mark.parametrize("payload", PAYLOADS)
@pytest.mark.parametrize("kind", FULL + PARTIAL)
def test_any_chunks_equal_the_whole(load, view, kind, payload):
    model = load(kind)
    request = whole_request(ids(1, 7), ids(2, 23), payload)
    whole = one(model, request, view)
    for number, sizes in enumerate([[1] * 23, [5, 1, 0, 17], [22, 1], [23], [0, 23], [3, 20]]):
        start = 0
        for size in sizes:
            asked = part(request, start, start + size, f"s{number}", with_context=(start + number) % 3)
            same(one(model, asked, view), whole, slice(start, start + size))
            start += size
    assert model.streams.num_streams == 6


@pytest.mark.parametrize("kind", [*FULL, "sliding"])
def test_rewinds(load, view, kind):
    """Each append keeps some tokens of the stream and replaces those after; it holds what a fresh request would."""
    model = load(kind)
    rng = np.random.default_rng(5)
    held = ids(1, 4)
    one(model, ScoreRequest(held[:3], held[3:], stream="s"), view)
    for step in range(40):
        keep = int(rng.integers(1, len(held) + 1)) if step % 4 else len(held)
        context, tokens = ids(step, int(rng.integers(0, 3))), ids(100 + step, int(rng.integers(0, 6)))
        answer = one(model, ScoreRequest(context, tokens, k=3, stream="s", keep_tokens=keep), view)
        before = np.concatenate([held[:keep], context])
        same(answer, one(model, ScoreRequest(before, tokens, k=3), view))
        held = np.concatenate([before, tokens])
    assert model.streams.num_hits == 40


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mixed"])
def test_many_streams_in_one_pass(load, view, kind):
    """Streams of different lengths, new ones and plain requests come together, in passes of any size."""
    lengths = [(1, 9), (30, 3), (2, 1), (11, 16), (5, 5), (7, 12)]
    for budget in (16384, 40, 1):
        model = load(kind, max_batch_tokens=budget)
        requests = [whole_request(ids(i, c), ids(50 + i, n), "topk") for i, (c, n) in enumerate(lengths)]
        wholes = [one(model, request, view) for request in requests]
        done = [0] * len(requests)
        rng = np.random.default_rng(budget)
        while any(at < len(request.token_ids) for at, request in zip(done, requests)):
            asked, expected = [(requests[0], view)], [(wholes[0], slice(None))]
            for i, request in enumerate(requests):
                stop = min(len(request.token_ids), done[i] + int(rng.integers(0, 6)))
                asked.append((part(request, done[i], stop, f"s{i}", with_context=int(rng.integers(0, 2))), view))
                expected.append((wholes[i], slice(done[i], stop)))
                done[i] = stop
            for answer, (whole, rows) in zip(model.score_batch(asked), expected, strict=True):
                assert isinstance(answer, Scores)
                same(answer, whole, rows)


@pytest.mark.parametrize("kind", ["llama", "sliding"])
def test_one_stream_several_times_in_one_gathering(load, view, kind):
    model = load(kind)
    request = whole_request(ids(1, 5), ids(2, 12), "sampled")
    whole = one(model, request, view)
    bounds = [(0, 3), (3, 4), (4, 10), (2, 6), (6, 12)]  # the fourth rewinds
    batches = model.num_batches

    async def ask():
        parts = [part(request, a, b, "s") for a, b in bounds] + [request]
        return await asyncio.gather(*(model.score(asked, view) for asked in parts))

    answers = asyncio.run(ask())
    for answer, (a, b) in zip(answers, bounds):
        same(answer, whole, slice(a, b))
    same(answers[-1], whole)
    assert model.num_batches - batches == 6  # the plain one has a pass of its own


def test_appends_cost_their_own_tokens(load, view):
    model = load()
    widths = []
    decoder(model.model).register_forward_pre_hook(
        lambda module, args, kwargs: widths.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    for i in range(3):
        one(model, ScoreRequest(ids(i, 100), ids(i, 10), stream=f"s{i}"), view)
    asked = [ScoreRequest(ids(9, 0), ids(i, 8), stream=f"s{i}", keep_tokens=110) for i in range(3)]
    model.score_batch([(request, view) for request in asked])
    one(model, ScoreRequest(ids(9, 1), ids(9, 4), stream="s0", keep_tokens=118), view)
    assert widths == [(1, 110)] * 3 + [(3, 9), (1, 5)]  # the token before is fed again where no context is


def test_lost_streams_are_said_to_be_lost(load, view):
    model = load()
    start = ScoreRequest(ids(1, 5), ids(2, 5), stream="s")
    more = ScoreRequest(ids(1, 1), ids(2, 2), stream="s", keep_tokens=10)

    def lost(request):
        (answer,) = model.score_batch([(request, view)])
        return isinstance(answer, StreamLost)

    assert lost(more)  # never begun
    assert not lost(start)
    assert lost(replace(more, keep_tokens=11))  # more than is held
    assert not lost(more)  # which lost nothing
    model.close_stream("s")
    model.close_stream("s")
    assert model.streams.num_streams == model.streams.num_bytes == 0
    assert lost(more)
    assert not lost(start)
    same(one(model, replace(start, context_ids=ids(7, 3)), view), one(model, ScoreRequest(ids(7, 3), ids(2, 5)), view))
    with pytest.raises(StreamLost, match="stream s: 10 tokens of it are not held"):
        asyncio.run(model.score(more, view))


def test_a_lost_stream_holds_up_no_one_in_its_pass(load, view):
    model = load()
    request = whole_request(ids(1, 5), ids(2, 12), "sampled")
    whole = one(model, request, view)
    one(model, part(request, 0, 4, "a"), view)
    lost, held, fresh = model.score_batch(
        [(part(request, 4, 9, "x"), view), (part(request, 4, 9, "a"), view), (part(request, 0, 3, "b"), view)]
    )
    assert isinstance(lost, StreamLost)
    assert isinstance(held, Scores)
    assert isinstance(fresh, Scores)
    same(held, whole, slice(4, 9))
    same(fresh, whole, slice(0, 3))


@pytest.mark.parametrize("kind", ["llama", "sliding"])
def test_memory_is_bounded_and_the_least_used_goes_first(load, view, kind):
    model = load(kind)
    one(model, ScoreRequest(ids(0, 5), ids(1, 5), stream="s"), view)
    size = model.streams.num_bytes
    assert size == 10 * 4 + (2 * 2 * 2 * 8 * 10 * 4 if kind == "llama" else 0)  # layers, keys and values, heads, size
    model = load(kind, max_stream_bytes=3 * size)
    for name in "abcd":
        one(model, ScoreRequest(ids(0, 5), ids(1, 5), stream=name), view)
    assert (model.streams.num_streams, model.streams.num_bytes, model.streams.num_evicted) == (3, 3 * size, 1)
    touch = ScoreRequest(ids(0, 1), ids(1, 0), stream="b", keep_tokens=9)
    one(model, touch, view)
    one(model, ScoreRequest(ids(0, 5), ids(1, 5), stream="e"), view)  # "c" goes, "b" was used
    answers = model.score_batch([(replace(touch, stream=name), view) for name in "abcde"])
    assert [isinstance(answer, Scores) for answer in answers] == [False, True, False, True, True]
    assert model.streams.num_bytes == 3 * size
    huge = ScoreRequest(ids(0, 35), ids(1, 5), stream="huge")
    same(one(model, huge, view), one(model, replace(huge, stream=None), view))
    assert (model.streams.num_streams, model.streams.num_bytes) == (3, 3 * size)  # is not kept, and drives out no one


def test_a_pass_that_fails_loses_its_streams_and_no_others(load, view, monkeypatch):
    model = load()
    for name in "ab":
        one(model, ScoreRequest(ids(0, 5), ids(1, 5), stream=name), view)

    def fail(*arguments):
        raise RuntimeError("out of memory")

    more = ScoreRequest(ids(0, 1), ids(1, 2), stream="a", keep_tokens=10)
    with monkeypatch.context() as patched:
        patched.setattr(model, "_states", fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            asyncio.run(model.score(more, view))
    with pytest.raises(StreamLost):
        asyncio.run(model.score(more, view))
    asyncio.run(model.score(replace(more, stream="b"), view))


def test_views_of_one_stream_may_differ(load, view):
    model = load()
    request = whole_request(ids(1, 5), ids(2, 12) % 20, "topk")
    narrow = View(20)
    one(model, part(request, 0, 5, "s"), view)
    same(one(model, part(request, 5, 12, "s"), narrow), one(model, request, narrow), slice(5, 12))


def test_bfloat16_streams_stay_close(load, view):
    model = load(dtype="bfloat16")
    assert model.cached_streams
    request = whole_request(ids(1, 5), ids(2, 12), "sampled")
    whole = one(model, request, view)
    for start in range(0, 12, 4):
        same(one(model, part(request, start, start + 4, "s"), view), whole, slice(start, start + 4), atol=0.15)


def test_positions_of_padding_stay_within_the_model(load, view):
    """A row that ends at GPT-2's last position shares a pass with a wider one."""
    model = load("gpt2")
    full, other = ids(1, 64), ids(2, 30)
    one(model, ScoreRequest(full[:40], full[40:62], stream="full"), view)
    one(model, ScoreRequest(other[:9], other[9:10], stream="other"), view)
    asked = [
        ScoreRequest(full[:0], full[62:], stream="full", keep_tokens=62),
        ScoreRequest(other[:0], other[10:], stream="other", keep_tokens=10),
    ]
    ours = model.score_batch([(request, view) for request in asked])
    for answer, (ids_, start) in zip(ours, ((full, 62), (other, 10))):
        assert isinstance(answer, Scores)
        same(answer, one(model, ScoreRequest(ids_[:start], ids_[start:]), view))


def test_what_is_taken_from_the_cache_and_what_is_fed():
    def asked(context: int, tokens: int, keep: int) -> ScoreRequest:
        return ScoreRequest(ids(0, context), ids(0, tokens), stream="s", keep_tokens=keep)

    assert extent(asked(3, 4, 0), True) == (0, 7)
    assert extent(asked(3, 4, 5), True) == (5, 7)
    assert extent(asked(0, 4, 5), True) == (4, 5)
    assert extent(asked(0, 4, 1), True) == (0, 5)
    assert extent(asked(0, 4, 5), False) == (0, 9)


def test_the_layout_of_a_pass():
    """[left padding | cached | new | right padding], with each stream left with its own tokens' keys alone."""
    a, b = Stream(None, np.arange(3, dtype=np.int32)), Stream(None)
    a.layers = [(torch.full((1, 3, 2), 7.0), torch.full((1, 3, 2), 8.0))]
    cache = PassCache([Row(np.arange(3, dtype=np.int32), 2, 1, a), Row(np.arange(2, dtype=np.int32), 0, 1, b)])
    inputs = cache.inputs(torch.float32, CPU)
    assert (inputs["attention_mask"][:, 0] == 0).int().tolist() == [
        [[1, 1, 1, 0], [1, 1, 1, 1]],
        [[0, 0, 1, 0], [0, 0, 1, 1]],
    ]
    assert inputs["position_ids"].tolist() == [[2, 2], [0, 1]]
    new = torch.arange(8.0).reshape(2, 1, 2, 2)
    keys, values = cache.update(new, -new, 0)
    assert keys[:, 0, :, 0].tolist() == [[7, 7, 0, 2], [0, 0, 4, 6]]
    assert values[:, 0, :, 0].tolist() == [[8, 8, 0, -2], [0, 0, -4, -6]]
    assert [[part[0, :, 0].tolist() for part in stream.layers[0]] for stream in (a, b)] == [
        [[7, 7, 0], [8, 8, 0]],
        [[4, 6], [-4, -6]],
    ]


def test_nothing_cached_needs_no_mask():
    cache = PassCache([Row(np.arange(3, dtype=np.int32), 0, 1, Stream(None))])
    states = torch.ones(1, 1, 3, 2)
    assert cache.inputs(torch.float32, CPU) == {}
    assert cache.update(states, states, 0)[0] is states


def test_a_model_whose_cached_rows_differ_is_found_out():
    def states(rows):
        return [torch.full((row.num_scored, 4), 1.0 + (0.5 if row.num_cached else 0.0)) for row in rows]

    assert not agrees(states, torch.float32)
    assert agrees(lambda rows: [torch.ones(row.num_scored, 4) for row in rows], torch.float32)


def test_a_stream_of_another_adapter_is_not_taken():
    streams = Streams(1000)
    stream = streams.take("s", 0, "x")
    assert stream is not None
    stream.ids = np.arange(9, dtype=np.int32)
    streams.put("s", stream)
    assert streams.take("s", 5, "y") is None
    assert streams.take("s", 5, None) is None
    assert open_row(streams, ScoreRequest(ids(0, 1), ids(0, 1), stream="s", keep_tokens=5), None, True) is None
    assert streams.take("s", 5, "x") is stream
    assert (streams.num_streams, streams.num_bytes, streams.num_hits) == (0, 0, 1)


def test_a_stream_with_other_tokens_counts_as_lost():
    streams = Streams(10**6)
    row = open_row(streams, ScoreRequest(ids(0, 3), ids(1, 4), stream="s"), None, False)
    assert row is not None
    assert row.stream is not None
    row.stream.ids = row.ids
    streams.put("s", row.stream)
    more = ScoreRequest(ids(0, 0), ids(2, 2), stream="s", keep_tokens=5, keep_crc=ids_crc(row.ids[:5]))
    assert open_row(streams, replace(more, keep_crc=ids_crc(row.ids[1:6])), None, False) is None
    assert open_row(streams, more, None, False) is not None
