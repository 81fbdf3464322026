"""Messages there and back, what is refused, and 2,000 damaged frames of each kind."""

import json
import random
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from opd.kernels.head import OutputHead
from opd.records import SampleRequest, Sampling, ScoreRequest, Scores, Turn
from opd.teachers import wire
from opd.teachers.digest import head_digest
from opd.teachers.wire import Asked, WireError

WEIGHTS = "0123456789abcdef" * 2
VOCAB, N, K, H = 100, 5, 4, 6
RNG = np.random.default_rng(0)
IDS = RNG.integers(0, VOCAB, (N, K)).astype(np.int32)
LOGPS = -RNG.exponential(size=(N, K)).astype(np.float32)

REQUEST = ScoreRequest(
    context_ids=np.array([1, 2, 3], np.int32),
    token_ids=IDS[:, 0],
    k=7,
    ids=IDS,
    temperature=0.7,
    stream="a-b_C9",
    keep_tokens=11,
    keep_crc=2**32 - 2,
)
ASKED = Asked(REQUEST, vocab=VOCAB, logp_floor=-30.0, model="math-1.5")
SCORES = Scores(LOGPS[:, 0], np.where(IDS[0, 0] == IDS, -1, IDS), LOGPS, RNG.random(N).astype(np.float32), num_floored=3)
SAMPLE = SampleRequest(np.array([1, 5, 9], np.int32), 2**63 - 1, 64, Sampling(0.7, 0.95, 20, 4, -0.5))
TURN = Turn(
    context_ids=np.array([1, 5], np.int32),
    sampled_ids=IDS[:, 0],
    sampler_logps=LOGPS[:, 0],
    finish="eos",
    topk_ids=IDS,
    topk_logps=LOGPS,
    num_reused=2,
    num_discarded=4,
    versions=((0, 3), (4, 5)),
)
HEAD = OutputHead(torch.randn(9, H).bfloat16(), 0.5)

FRAMES = {
    "score_request": (wire.encode_score_request(ASKED), wire.decode_score_request),
    "scores": (wire.encode_scores(SCORES, WEIGHTS), wire.decode_scores),
    "hidden": (wire.encode_scores(Scores(hidden=torch.randn(N, H).half(), head="base"), WEIGHTS), wire.decode_scores),
    "sample_request": (wire.encode_sample_request(SAMPLE, "base"), wire.decode_sample_request),
    "turn": (wire.encode_turn(TURN, WEIGHTS), lambda body: wire.decode_turn(body, TURN.context_ids)),
    "head": (bytes(wire.encode_head(HEAD, "abc")), wire.decode_head),
}


def same(a: Any, b: Any) -> None:
    assert type(a) is type(b)
    if is_dataclass(a):
        for field in fields(a):
            same(getattr(a, field.name), getattr(b, field.name))
    elif isinstance(a, np.ndarray):
        assert isinstance(b, np.ndarray)
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)
    elif isinstance(a, torch.Tensor):
        assert isinstance(b, torch.Tensor)
        assert a.dtype == b.dtype
        assert torch.equal(a, b)
    else:
        assert a == b


def refused(body: bytes, decode, match: str) -> None:
    with pytest.raises(WireError, match=match) as caught:
        decode(body)
    assert "\n" not in str(caught.value)


REQUESTS = {
    "everything": REQUEST,
    "sampled": ScoreRequest(REQUEST.context_ids, REQUEST.token_ids),
    "hidden": ScoreRequest(REQUEST.context_ids, REQUEST.token_ids, hidden=True, temperature=1e-3),
    "only kept": replace(REQUEST, context_ids=np.zeros(0, np.int32), keep_tokens=1),
    "no tokens": ScoreRequest(REQUEST.context_ids, np.zeros(0, np.int32), ids=np.zeros((0, K), np.int32)),
    "no ids": ScoreRequest(REQUEST.context_ids, REQUEST.token_ids, ids=np.zeros((N, 0), np.int32)),
}


@pytest.mark.parametrize("request_", REQUESTS.values(), ids=REQUESTS.keys())
def test_questions(request_):
    asked = replace(ASKED, request=request_)
    same(wire.decode_score_request(wire.encode_score_request(asked)), asked)


ANSWERS = {
    "sampled": Scores(LOGPS[:, 0]),
    "top-k": SCORES,
    "top-k of no tokens": Scores(LOGPS[:0, 0], IDS[:0], LOGPS[:0], LOGPS[:0, 0]),
    "hidden": Scores(hidden=torch.randn(N, H), head="0" * 32),
    "hidden bf16": Scores(hidden=torch.randn(N, H).bfloat16(), head="base", num_floored=1),
    "hidden of no tokens": Scores(hidden=torch.randn(0, H).half(), head="base"),
}


@pytest.mark.parametrize("scores", ANSWERS.values(), ids=ANSWERS.keys())
@pytest.mark.parametrize("body", [bytes, bytearray, memoryview])
def test_answers(scores, body):
    answer, weights = wire.decode_scores(body(wire.encode_scores(scores, WEIGHTS)))
    same(answer, scores)
    assert weights == WEIGHTS


def test_turns_and_their_requests():
    request, model = wire.decode_sample_request(wire.encode_sample_request(SAMPLE, "base"))
    same(request, SAMPLE)
    assert model == "base"
    greedy = replace(SAMPLE, sampling=Sampling(temperature=0.0))
    same(wire.decode_sample_request(wire.encode_sample_request(greedy))[0], greedy)
    for turn in (TURN, Turn(TURN.context_ids, IDS[:0, 0], LOGPS[:0, 0], "length")):
        decoded, weights = wire.decode_turn(wire.encode_turn(turn, WEIGHTS), TURN.context_ids)
        same(decoded, turn)
        assert weights == WEIGHTS


@pytest.mark.parametrize("record", [REQUEST, SAMPLE.sampling, TURN], ids=lambda record: type(record).__name__)
def test_no_field_of_a_record_is_left_out(record):
    """The records above give every field a value of its own, so that the tests above see each of them travel."""
    unset = {field.name for field in fields(record) if getattr(record, field.name) is field.default}
    trainers_own = {"teacher_logps", "observations", "state_hash", "mistake"}  # no server knows them
    alone = {"hidden", "logps_too"}  # the former excludes the others, and the latter goes with it and to no server
    assert unset <= alone | (trainers_own if record is TURN else set())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_heads(dtype):
    head = OutputHead(torch.nn.Parameter(torch.randn(9, H).to(dtype)), 0.125)
    pieces = wire.encode_head(head, "abc")
    body = bytearray(b"".join(pieces))
    assert len(body) == pieces.num_bytes
    decoded, head_id = wire.decode_head(body)
    same(decoded, OutputHead(head.weight.detach(), 0.125))  # type: ignore
    assert head_id == "abc"


@pytest.mark.parametrize(
    "head",
    [
        OutputHead(torch.randn(9, H), bias=torch.randn(9).bfloat16()),
        OutputHead(torch.randn(9, H).bfloat16(), softcap=30.0),
        OutputHead(None, 2.0, width=9),
    ],
    ids=["bias", "soft cap", "the states are the logits"],
)
def test_heads_of_other_forms(head):
    decoded, _ = wire.decode_head(bytearray(bytes(wire.encode_head(head, "abc"))))
    same(decoded, head)
    assert head_digest(decoded) == head_digest(head)
    assert head_digest(head) != head_digest(replace(head, bias=None, softcap=None, width=0, weight=torch.randn(9, H)))
    assert head_digest(head) != head_digest(replace(head, scale=3.0))


def test_a_message_of_another_kind():
    refused(FRAMES["scores"][0], wire.decode_score_request, "of kind 'scores', not 'score_request'")


def test_the_size_of_a_top_64_answer():
    n, k = 2048, 64
    logps = np.zeros((n, k), np.float32)
    answer = Scores(logps[:, 0], np.zeros((n, k), np.int32), logps, logps[:, 1])
    assert len(wire.encode_scores(answer, WEIGHTS)) <= 530 * n
    assert len(wire.encode_scores(Scores(logps[:, 0]), WEIGHTS)) <= 4.2 * n


BAD_REQUESTS = {
    "vocab": (replace(ASKED, vocab=0), "vocab"),
    "an id beyond": (replace(ASKED, vocab=int(IDS.max())), "ids: has ids that are not from 0 to below"),
    "an id below": (replace(ASKED, request=replace(REQUEST, context_ids=np.array([-1]))), "context_ids: has ids"),
    "-1 asked": (replace(ASKED, request=replace(REQUEST, ids=IDS * 0 - 1)), "^ids: has ids"),
    "lengths": (replace(ASKED, request=replace(REQUEST, ids=IDS[1:])), "ids: 4 rows, but token_ids 5"),
    "k": (replace(ASKED, request=replace(REQUEST, k=-1)), "k: must be an integer"),
    "k float": (replace(ASKED, request=replace(REQUEST, k=1.0)), "k: must be an integer"),
    "hidden": (replace(ASKED, request=replace(REQUEST, hidden=1)), "hidden: must be true or false"),
    "temperature 0": (replace(ASKED, request=replace(REQUEST, temperature=0.0)), "temperature: must be a number"),
    "temperature -1": (replace(ASKED, request=replace(REQUEST, temperature=-1.0)), "temperature: must be a number"),
    "temperature huge": (replace(ASKED, request=replace(REQUEST, temperature=1e300)), "temperature: must be a number"),
    "floor 0": (replace(ASKED, logp_floor=0.0), "logp_floor: must be a number"),
    "floor beyond float32": (replace(ASKED, logp_floor=-1e300), "logp_floor: must be a number"),
    "model": (replace(ASKED, model="../x"), "model: must be a string like"),
    "model with a new line": (replace(ASKED, model="base\n"), "model: must be a string like"),
    "stream": (replace(ASKED, request=replace(REQUEST, stream="a" * 65)), "stream: must be a string like"),
    "stream empty": (replace(ASKED, request=replace(REQUEST, stream="")), "stream: must be a string like"),
    "keep below 0": (replace(ASKED, request=replace(REQUEST, keep_tokens=-1)), "keep_tokens: must be an integer"),
    "keep of nothing": (replace(ASKED, request=replace(REQUEST, stream=None)), "keep_tokens: there is no stream"),
    "nothing before": (
        replace(ASKED, request=replace(REQUEST, context_ids=IDS[0, :0], keep_tokens=0)),
        "context_ids: empty, and nothing is kept",
    ),
}


@pytest.mark.parametrize(("asked", "match"), BAD_REQUESTS.values(), ids=BAD_REQUESTS.keys())
def test_questions_that_are_refused(asked, match):
    refused(wire.encode_score_request(asked), wire.decode_score_request, match)


BAD_ANSWERS = {
    "nothing": (Scores(), "logps: missing"),
    "an id below -1": (replace(SCORES, topk_ids=IDS * 0 - 2), "topk_ids: has ids"),
    "columns": (replace(SCORES, topk_logps=LOGPS[:, 1:]), "topk_logps: shape"),
    "rows": (replace(SCORES, logps=LOGPS[1:, 0]), "rows"),
    "tail": (replace(SCORES, tail=LOGPS[1:, 0]), "tail: 4 rows, but logps 5"),
    "no tail": (replace(SCORES, tail=None), "tail: missing"),
    "tail alone": (replace(SCORES, topk_ids=None, topk_logps=None), "'tail': not part of this message"),
    "no log-probs": (replace(SCORES, topk_logps=None), "topk_logps: missing"),
    "both": (replace(SCORES, hidden=torch.zeros(N, H), head="a"), "not part of this message"),
    "no head": (Scores(hidden=torch.zeros(N, H)), "head: hidden states need"),
    "hidden without columns": (Scores(hidden=torch.zeros(N, 0), head="a"), "hidden: F32 of shape"),
    "floored": (replace(SCORES, num_floored=-1), "num_floored: must be an integer"),
}


@pytest.mark.parametrize(("scores", "match"), BAD_ANSWERS.values(), ids=BAD_ANSWERS.keys())
def test_answers_that_are_refused(scores, match):
    refused(wire.encode_scores(scores, WEIGHTS), wire.decode_scores, match)


def test_other_messages_that_are_refused():
    refused(wire.encode_scores(SCORES, "xyz"), wire.decode_scores, "weights: must be a string like")
    for change, match in (
        (replace(SAMPLE, seed=2**63), "seed"),
        (replace(SAMPLE, max_new_tokens=0), "max_new_tokens"),
        (replace(SAMPLE, context_ids=IDS[0, :0]), "context_ids: empty"),
        (replace(SAMPLE, sampling=Sampling(temperature=1e-9)), "temperature: must be 0, or"),
        (replace(SAMPLE, sampling=Sampling(top_p=0.0)), "top_p"),
        (replace(SAMPLE, sampling=Sampling(top_k=-1)), "top_k"),
    ):
        refused(wire.encode_sample_request(change), wire.decode_sample_request, match)
    for versions in (((1, 0),), ((0, 0), (0, 1)), ((0, 0), (5, 1)), (), ((0, -1),)):
        refused(wire.encode_turn(replace(TURN, versions=versions), WEIGHTS), FRAMES["turn"][1], "versions: ")
    for change, match in (
        ({"finish": "done"}, "finish"),
        ({"num_reused": 6}, "num_reused"),
        ({"num_discarded": -1}, "num_discarded"),
        ({"topk_ids": IDS * 0 - 1}, "topk_ids"),
        ({"sampler_logps": LOGPS[1:, 0]}, "sampler_logps: 4 rows"),
    ):
        refused(wire.encode_turn(replace(TURN, **change), WEIGHTS), FRAMES["turn"][1], match)
    refused(bytes(wire.encode_head(OutputHead(HEAD.weight[:0]), "a")), wire.decode_head, "weight: has no rows")  # type: ignore
    for head, match in (
        (OutputHead(HEAD.weight, bias=torch.zeros(8)), r"bias: shape \[8, 1\], but another number of rows"),
        (OutputHead(None, bias=torch.zeros(9), width=9), "bias: shape"),
        (OutputHead(None), "width: above 0 where there is no weight"),
        (OutputHead(HEAD.weight, width=9), "width: above 0"),
        (OutputHead(HEAD.weight, softcap=-1.0), "softcap: must be a number from 0"),
    ):
        refused(bytes(wire.encode_head(head, "a")), wire.decode_head, match)
    refused(bytes(wire.encode_head(HEAD, "a/b")), wire.decode_head, "head: must be a string like")


VALUES = [
    None,
    True,
    False,
    0,
    1,
    -1,
    2.0,
    1e999,
    float("nan"),
    2**31,
    2**63,
    10**400,
    "",
    "x",
    "\ud800\n",
    [],
    [1],
    {},
    "NaN",
]


def mutate_json(rng: random.Random, value: Any) -> Any:
    """`value` with one part replaced, removed, added or taken from elsewhere."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        copy, name = dict(value), rng.choice(list(value))
        change = rng.random()
        if change < 0.1:
            del copy[name]
        elif change < 0.2:
            copy[rng.choice(["x", "topk_ids", "hidden", "ids", name + "\n"])] = copy[rng.choice(list(value))]
        elif name == "fields" and change < 0.9 and str(copy[name]).startswith("{"):
            copy[name] = json.dumps(mutate_json(rng, json.loads(copy[name])))
        else:
            copy[name] = mutate_json(rng, copy[name])
        return copy
    if isinstance(value, list) and value and rng.random() < 0.8:
        i = rng.randrange(len(value))
        return [*value[:i], mutate_json(rng, value[i]), *value[i + 1 :]]
    if type(value) is int and rng.random() < 0.5:
        return value + rng.choice([-8, -4, -1, 1, 4, 8, 2**31, 2**62])
    return rng.choice([*VALUES, "I32", "F32", "F16", "BF16", "F64"])


def mutate(rng: random.Random, body: bytes) -> bytes:
    """The frame with a header changed in its structure, or with bytes overwritten, cut, or added."""
    for _ in range(rng.choice([1, 1, 2, 4])):
        size = int.from_bytes(body[:8], "little")
        at = rng.randrange(len(body) + 1)
        change = rng.randrange(8)
        if change == 0:
            body = body[:at]
        elif change in (1, 2):
            body = body[:at] + rng.randbytes(rng.randrange(1, 9)) + body[at + rng.choice([0, 4, 8]) :]
        elif change == 3:
            lie = rng.choice([size + 1, max(0, size - 1), 0, 2**63, 2**64 - 1, rng.randrange(400)])
            body = min(lie, 2**64 - 1).to_bytes(8, "little") + body[8:]
        elif change == 4:
            inside = 8 + rng.randrange(min(size, len(body)) + 1)
            body = body[:inside] + rng.choice([b'"', b"[", b"{", b"}", b"0", b"-", b",", b"\\"]) + body[inside + 1 :]
        else:
            try:
                text = json.dumps(mutate_json(rng, json.loads(body[8 : 8 + size]))).encode()
            except ValueError:  # damaged before
                continue
            body = len(text).to_bytes(8, "little") + text + body[8 + size :]
    return body


def well_formed(value: Any) -> None:
    """The parts of any decoded value: aligned arrays of the types that travel."""
    if is_dataclass(value):
        for field in fields(value):
            well_formed(getattr(value, field.name))
    elif isinstance(value, tuple):
        for part in value:
            well_formed(part)
    elif isinstance(value, np.ndarray):
        assert value.dtype in (np.int32, np.float32)
        assert value.flags.aligned
        value.copy()
    elif isinstance(value, torch.Tensor):
        assert value.dtype in (torch.float32, torch.float16, torch.bfloat16)
        assert value.shape[1]
        value.clone()
    else:
        assert value is None or isinstance(value, str | int | float)


@pytest.mark.parametrize("kind", FRAMES)
def test_2000_damaged_frames_are_values_or_wire_errors(kind):
    whole, decode = FRAMES[kind]
    rng = random.Random(kind)
    messages = []
    for _ in range(2000):
        body = mutate(rng, whole)
        try:
            value = decode(body)
        except WireError as error:
            messages.append(str(error))
        else:
            well_formed(value)
    assert not any("\n" in message for message in messages)
    "".join(messages).encode()  # they can be sent
    assert 1000 < len(messages) < 2000  # the damage is neither harmless nor always found at once
    assert len(set(messages)) > 20


@pytest.mark.parametrize("kind", FRAMES)
def test_every_prefix_is_refused(kind):
    whole, decode = FRAMES[kind]
    for size in range(len(whole)):
        with pytest.raises(WireError):
            decode(whole[:size])
