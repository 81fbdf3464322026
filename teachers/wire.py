"""What trainers and servers say to each other: records to frames (`opd.teachers.frame`) and back.

Decoding is total: whatever the bytes, it returns a well-formed value or raises `WireError`. Well-formed means types, ranks
and lengths that agree, and ids in range; whether an answer fits its question and is finite is the client's to check. Arrays
of a decoded message may be read-only views of its body. Shape legend: c context tokens, n tokens asked about, m ids a token
asked for, k entries a token, H hidden size, R rows of a head.
"""

import re
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from opd.kernels.head import OutputHead
from opd.records import Array, Chunk, SampleRequest, Sampling, ScoreRequest, Scores, Turn
from opd.teachers.frame import PROTOCOL, Body, Frame, Pieces, WireError, write

__all__ = [
    "MEDIA_TYPE",
    "PROTOCOL",
    "Asked",
    "WireError",
    "decode_chunk",
    "decode_head",
    "decode_sample_request",
    "decode_score_request",
    "decode_scores",
    "decode_turn",
    "encode_chunk",
    "encode_head",
    "encode_sample_request",
    "encode_score_request",
    "encode_scores",
    "encode_turn",
]

MEDIA_TYPE = "application/vnd.opd.safetensors"
MAX_INT = 2**31 - 1
NO_CRC = -1
STREAM_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")  # of models and heads
DIGEST = re.compile(r"[0-9a-f]{16,64}")
FINISH = re.compile(r"eos|length|stopped|env")
TEMPERATURES = (1e-3, 1e3)  # beyond these, logits / temperature leaves float32
LOWEST_FLOOR = -1e30  # in float32 with room to spare
SMALLEST = 1e-30


@dataclass(frozen=True, eq=False)
class Asked:
    """A question to a server: the request, and as what its model is asked.

    Example: `Asked(request, vocab=151669, logp_floor=-30.0, model="math")`
    """

    request: ScoreRequest
    vocab: int  # ids in use: log-probs are normalised over these
    logp_floor: float  # log-probs below are raised to it
    model: str = "base"  # or the name of an adapter


def encode_score_request(asked: Asked) -> bytes:
    """The frame of a question."""
    request = asked.request
    fields = {
        "model": asked.model,
        "vocab": asked.vocab,
        "logp_floor": asked.logp_floor,
        "k": request.k,
        "hidden": request.hidden,
        "temperature": request.temperature,
        "stream": request.stream,
        "keep_tokens": request.keep_tokens,
        "keep_crc": NO_CRC if request.keep_crc is None else request.keep_crc,
    }
    tensors = {"context_ids": request.context_ids, "token_ids": request.token_ids, "ids": request.ids}
    return bytes(write("score_request", fields, tensors))


def decode_score_request(body: Body) -> Asked:
    """The question in a frame. Raises `WireError`."""
    frame = Frame(body, "score_request")
    vocab = frame.integer("vocab", 1)
    crc = frame.integer("keep_crc", NO_CRC, 2**32 - 1)
    request = ScoreRequest(
        context_ids=_ids(frame, "context_ids", 1, vocab),
        token_ids=_ids(frame, "token_ids", 1, vocab),
        k=frame.integer("k", 0),
        ids=_ids(frame, "ids", 2, vocab) if frame.has("ids") else None,
        hidden=frame.flag("hidden"),
        temperature=frame.real("temperature", *TEMPERATURES),
        stream=frame.text_or_none("stream", STREAM_NAME),
        keep_tokens=frame.integer("keep_tokens", 0),
        keep_crc=None if crc == NO_CRC else crc,
    )
    asked = Asked(request, vocab, frame.real("logp_floor", LOWEST_FLOOR, -SMALLEST), frame.text("model", NAME))
    frame.finish()
    if request.ids is not None:
        _same_length("ids", request.ids, "token_ids", request.token_ids)
    if request.keep_tokens and request.stream is None:
        raise WireError("keep_tokens: there is no stream whose tokens could be kept")
    if not request.keep_tokens + len(request.context_ids):
        raise WireError("context_ids: empty, and nothing is kept of a stream: the first token has nothing before it")
    return asked


def encode_scores(scores: Scores, weights: str) -> bytes:
    """The frame of an answer from a model whose weights have this digest."""
    fields = {"weights": weights, "head": scores.head, "num_floored": scores.num_floored}
    tensors = {
        "logps": scores.logps,
        "topk_ids": scores.topk_ids,
        "topk_logps": scores.topk_logps,
        "tail": scores.tail,
        "hidden": scores.hidden,
    }
    return bytes(write("scores", fields, tensors))


def decode_scores(body: Body) -> tuple[Scores, str]:
    """(answer: log-probs, with or without a top-k, or hidden states; digest of its weights). Raises `WireError`."""
    frame = Frame(body, "scores")
    weights = frame.text("weights", DIGEST)
    num_floored, head = frame.integer("num_floored", 0), frame.text_or_none("head", NAME)
    if frame.has("hidden"):
        scores = Scores(hidden=frame.tensor("hidden"), head=head, num_floored=num_floored)
        if head is None:
            raise WireError("head: hidden states need the name of theirs")
    else:
        scores = Scores(logps=frame.array("logps", "F32", 1), head=head, num_floored=num_floored)
        if frame.has("topk_ids"):
            tail = frame.array("tail", "F32", 1)
            _same_length("tail", tail, "logps", scores.logps)
            topk_ids, topk_logps = _topk(frame, "logps", scores.logps, lowest=-1)
            scores = replace(scores, topk_ids=topk_ids, topk_logps=topk_logps, tail=tail)
    frame.finish()
    return scores, weights


def encode_sample_request(request: SampleRequest, model: str = "base") -> bytes:
    """The frame of a turn to sample."""
    sampling = request.sampling
    fields = {
        "model": model,
        "seed": request.seed,
        "first": request.first,
        "episode": request.episode,
        "max_new_tokens": request.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "presence_penalty": sampling.presence_penalty,
        "num_topk": sampling.num_topk,
    }
    return bytes(write("sample_request", fields, {"context_ids": request.context_ids}))


def decode_sample_request(body: Body) -> tuple[SampleRequest, str]:
    """(turn to sample, name of the model). Ids are only known to be >= 0. Raises `WireError`."""
    frame = Frame(body, "sample_request")
    low, high = TEMPERATURES
    sampling = Sampling(
        temperature=frame.real("temperature", 0.0, high),
        top_p=frame.real("top_p", SMALLEST, 1.0),
        top_k=frame.integer("top_k", 0),
        presence_penalty=frame.real("presence_penalty", -2.0, 2.0),
        num_topk=frame.integer("num_topk", 0),
    )
    request = SampleRequest(
        context_ids=_ids(frame, "context_ids", 1),
        seed=frame.integer("seed", 0, 2**63 - 1),
        max_new_tokens=frame.integer("max_new_tokens", 1),
        sampling=sampling,
        episode=frame.flag("episode"),
        first=frame.integer("first", 0),
    )
    model = frame.text("model", NAME)
    frame.finish()
    if 0.0 < sampling.temperature < low:
        raise WireError(f"temperature: must be 0, or a number from {low:g} to {high:g}")
    if not len(request.context_ids) > request.first:
        what = "none but those of the turn itself" if len(request.context_ids) else "empty"
        raise WireError(f"context_ids: {what}: the first token has nothing before it")
    return request, model


def encode_turn(turn: Turn, weights: str) -> bytes:
    """The frame of a sampled turn; its context stays away, since whoever asked has it."""
    fields = {"weights": weights, "finish": turn.finish, "num_reused": turn.num_reused, "num_discarded": turn.num_discarded}
    tensors = {
        "sampled_ids": turn.sampled_ids,
        "sampler_logps": turn.sampler_logps,
        "topk_ids": turn.topk_ids,
        "topk_logps": turn.topk_logps,
        "versions": np.array(turn.versions, np.int32).reshape(-1, 2),
    }
    return bytes(write("turn", fields, tensors))


def decode_turn(body: Body, context_ids: Array) -> tuple[Turn, str]:
    """(turn after this context, digest of the weights that sampled it). Raises `WireError`."""
    frame = Frame(body, "turn")
    weights = frame.text("weights", DIGEST)
    sampled_ids, sampler_logps, *topk = _sampled(frame)
    versions = _ids(frame, "versions", 2)
    if versions.shape[1] != 2 or not len(versions) or versions[0, 0] or (np.diff(versions[:, 0]) <= 0).any():
        raise WireError("versions: must be pairs (first token, version), the first of token 0, ascending")
    if versions[-1, 0] >= max(1, len(sampled_ids)):
        raise WireError("versions: the last begins after the last token")
    turn = Turn(
        context_ids=context_ids,
        sampled_ids=sampled_ids,
        sampler_logps=sampler_logps,
        finish=frame.text("finish", FINISH),  # type: ignore[arg-type]
        topk_ids=topk[0],
        topk_logps=topk[1],
        num_reused=frame.integer("num_reused", 0, len(sampled_ids)),
        num_discarded=frame.integer("num_discarded", 0),
        versions=tuple((int(first), int(version)) for first, version in versions),
    )
    frame.finish()
    return turn, weights


def encode_chunk(chunk: Chunk, weights: str) -> bytes:
    """The frame of the next tokens of a turn, sampled by weights of this digest. Policy versions are the client's."""
    tensors = {
        "sampled_ids": chunk.sampled_ids,
        "sampler_logps": chunk.sampler_logps,
        "topk_ids": chunk.topk_ids,
        "topk_logps": chunk.topk_logps,
    }
    return bytes(write("chunk", {"weights": weights, "finish": chunk.finish}, tensors))


def decode_chunk(body: Body, version: int) -> tuple[Chunk, str]:
    """(tokens as of the policy `version`, digest of the weights that sampled them). Raises `WireError`."""
    frame = Frame(body, "chunk")
    weights = frame.text("weights", DIGEST)
    sampled_ids, sampler_logps, *topk = _sampled(frame)
    finish: Any = frame.text_or_none("finish", FINISH)
    frame.finish()
    return Chunk(sampled_ids, sampler_logps, finish, version, *topk), weights


def encode_head(head: OutputHead, head_id: str) -> Pieces:
    """The frame of an output head [R, H], maybe gigabytes, in buffers that share its memory: iterate, or `bytes()` it."""
    fields = {"head": head_id, "scale": head.scale, "softcap": head.softcap or 0.0, "width": head.width}
    bias = None if head.bias is None else head.bias[:, None]
    return write("head", fields, {"weight": head.weight, "bias": bias})


def decode_head(body: Body) -> tuple[OutputHead, str]:
    """(head, its id). The weight is a view of a writable body (a bytearray), a copy of `bytes`. Raises `WireError`."""
    frame = Frame(body, "head")
    weight, bias = (frame.tensor(name) if frame.has(name) else None for name in ("weight", "bias"))
    scale, softcap = frame.real("scale", -1e30, 1e30), frame.real("softcap", 0.0, 1e30) or None
    width, head_id = frame.integer("width", 0), frame.text("head", NAME)
    frame.finish()
    if weight is not None and not len(weight):
        raise WireError("weight: has no rows")
    if (weight is None) != (width > 0):
        raise WireError("width: above 0 where there is no weight, else 0")
    if bias is not None and (weight is None or bias.shape != (len(weight), 1)):
        raise WireError(f"bias: shape {list(bias.shape)}, but another number of rows in weight")
    return OutputHead(weight, scale, None if bias is None else bias[:, 0], softcap, width), head_id


def _ids(frame: Frame, name: str, rank: int, vocab: int = MAX_INT, lowest: int = 0) -> Array:
    """int32 from `lowest` to below `vocab`."""
    array = frame.array(name, "I32", rank)
    if array.size and (array.min() < lowest or array.max() >= vocab):
        raise WireError(f"{name}: has ids that are not from {lowest} to below {vocab}")
    return array


def _sampled(frame: Frame) -> tuple[Array, Array, Array | None, Array | None]:
    """(sampled ids [n], their log-probs [n], the student's own ids and log-probs [n, k] or None)."""
    sampled_ids, sampler_logps = _ids(frame, "sampled_ids", 1), frame.array("sampler_logps", "F32", 1)
    _same_length("sampler_logps", sampler_logps, "sampled_ids", sampled_ids)
    if not frame.has("topk_ids"):
        return sampled_ids, sampler_logps, None, None
    return sampled_ids, sampler_logps, *_topk(frame, "sampled_ids", sampled_ids, lowest=0)


def _topk(frame: Frame, other: str, rows: Array | None, lowest: int) -> tuple[Array, Array]:
    """(ids [n, k], log-probs [n, k]) with as many rows as the other array."""
    ids, logps = _ids(frame, "topk_ids", 2, lowest=lowest), frame.array("topk_logps", "F32", 2)
    if ids.shape != logps.shape:
        raise WireError(f"topk_logps: shape {logps.shape}, but topk_ids {ids.shape}")
    _same_length("topk_ids", ids, other, rows)
    return ids, logps


def _same_length(name: str, array: Array, other: str, rows: Array | None) -> None:
    if rows is None or len(array) != len(rows):
        raise WireError(f"{name}: {len(array)} rows, but {other} {0 if rows is None else len(rows)}")
