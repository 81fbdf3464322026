"""Is a well-formed request possible for the model that it asks? Decided before it takes a place in the queue."""

from dataclasses import dataclass, field

from opd.records import Array, SampleRequest, ScoreRequest
from opd.teachers.abilities import Abilities
from opd.teachers.server.admission import Refused
from opd.teachers.wire import Asked


@dataclass(frozen=True)
class Bounds:
    """What a served model can answer."""

    models: tuple[str, ...]  # names that may be asked
    rows: int  # of the output head
    max_context: int  # tokens of the longest sequence
    hidden_bytes: int  # of one token's last hidden state
    vocab: int  # ids that it samples
    max_answer_bytes: int
    abilities: Abilities = field(default_factory=Abilities)
    sampling: str = "base"  # the one of the models that samples


def check_score(asked: Asked, bounds: Bounds) -> int:
    """Bytes of the answer. Raises `Refused`: 400 for what the model cannot do, 413 for too large an answer."""
    request = asked.request
    _known(asked.model, bounds)
    if asked.vocab > bounds.rows:
        raise Refused(400, f"vocab: {asked.vocab} ids, but the model's output head has {bounds.rows} rows")
    num_asked = 0 if request.ids is None else request.ids.shape[1]
    for name, count in (("k", request.k), ("ids", num_asked)):
        if count > asked.vocab:
            raise Refused(400, f"{name}: {count} of each token are more than the vocabulary of {asked.vocab}")
    _able(request, num_asked, bounds.abilities)
    length = request.keep_tokens + request.num_tokens
    if length > bounds.max_context:
        raise Refused(400, f"the sequence has {length} tokens, but the model's context holds {bounds.max_context}")
    size = bounds.hidden_bytes if request.hidden else 8 * (1 + request.k + num_asked)
    return _fits(len(request.token_ids) * size, bounds)


def check_generate(request: SampleRequest, model: str, bounds: Bounds) -> int:
    """Bytes of the longest answer. Raises `Refused`."""
    _known(model, bounds)
    if model != bounds.sampling:
        raise Refused(400, f"model: {model!r} is not the {bounds.sampling}, which alone samples")
    _below(request.context_ids, bounds.vocab)
    if request.sampling.num_topk > bounds.vocab:
        raise Refused(400, f"num_topk: {request.sampling.num_topk} are more than the vocabulary of {bounds.vocab}")
    length = len(request.context_ids) + request.max_new_tokens
    if length > bounds.max_context:
        raise Refused(400, f"context and max_new_tokens are {length}, but the model's context holds {bounds.max_context}")
    return _fits(request.max_new_tokens * 8 * (1 + request.sampling.num_topk), bounds)


def _known(model: str, bounds: Bounds) -> None:
    if model not in bounds.models:
        raise Refused(400, f"model: {model!r} is not served here, only {', '.join(bounds.models)}")


def _able(request: ScoreRequest, num_asked: int, abilities: Abilities) -> None:
    """Refuses what the backend never gives."""
    if request.hidden and not abilities.hidden:
        raise Refused(
            400, "hidden: this server's backend gives no hidden states: ask for log-probs, or serve with --backend hf"
        )
    if request.temperature != 1.0 and not abilities.temperature:
        raise Refused(
            400,
            f"temperature: {request.temperature:g}, but this server's backend scores at 1 alone: serve with --backend hf",
        )
    for name, count in (("k", request.k), ("ids", num_asked)):
        if abilities.max_k is not None and count > abilities.max_k:
            raise Refused(
                400,
                f"{name}: {count} of each token, but the server gives {abilities.max_k}: start it with more --max-logprobs",
            )


def _below(ids: Array, vocab: int) -> None:
    if ids.max(initial=0) >= vocab:
        raise Refused(400, f"context_ids: id {ids.max()}, but the model knows those below {vocab}")


def _fits(num_bytes: int, bounds: Bounds) -> int:
    if num_bytes > bounds.max_answer_bytes:
        limit = bounds.max_answer_bytes
        raise Refused(
            413, f"the answer would have {num_bytes} bytes and the limit is {limit}: ask about fewer tokens at once"
        )
    return num_bytes
