"""Is a server the teacher that a recipe means? Decided from its `/v1/info` before anything is scored."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from opd.errors import UserError
from opd.teachers.abilities import usable
from opd.teachers.client.replica import Replica
from opd.teachers.frame import PROTOCOL
from opd.teachers.wire import NAME

Info = dict[str, Any]
MAX_INFO_BYTES = 2**20
DIGEST = re.compile(r"[0-9a-f]{16,64}")


@dataclass(frozen=True)
class Identity:
    """What must stay the same as long as a run asks a teacher."""

    weights: str  # digest of the model that is asked
    tokens: str  # digest of its token -> id map
    head: str  # id of its output head
    num_tokens: int  # ids its tokenizer uses
    rows: int  # of its output head


def identity(info: Info, model: str) -> Identity:
    """Of the served model called `model`, which `info` must list."""
    weights = info["models"][model]["weights"]
    return Identity(weights, info["tokens"], info["head"], info["num_tokens"], info["rows"])


async def read_info(replica: Replica) -> Info:
    """The replica's `/v1/info`, every field that is used checked.

    Raises `UserError` when it is no teacher server of this protocol, and what `Replica.get_json` raises.
    """
    info = await replica.get_json("/v1/info", MAX_INFO_BYTES)
    start = f"{replica.field}: {replica.url}"
    protocol = info.get("protocol") if isinstance(info, dict) else None
    if type(protocol) is not int:
        raise UserError(f"{start} is no teacher server of opd: its /v1/info names no protocol")
    if protocol != PROTOCOL:
        raise UserError(f"{start} speaks protocol {protocol}, this side speaks {PROTOCOL}: install the same opd on both")
    for name, is_right in _FIELDS.items():
        if not is_right(info.get(name)):
            raise UserError(f"{start}: its /v1/info has no usable {name!r}: install the same opd on both")
    return info


def check_same(infos: Sequence[tuple[str, Info]], field: str, *, model: str, digest: str | None) -> Identity:
    """What the replicas at these addresses have in common. `field` is the teacher's, as `teachers.maths`.

    Raises `UserError`: a replica does not serve `model`, has other weights than `digest`, or differs from the first.
    """
    first_url, first = infos[0]
    for url, info in infos:
        if model not in info["models"]:
            served = ", ".join(sorted(info["models"]))
            raise UserError(f"{field}.served_as: {url} serves no {model!r}, only {served}; name one of these")
        found = identity(info, model)
        if digest is not None and found.weights != digest.lower():
            raise UserError(
                f"{field}.url: {url} serves weights {found.weights}, but {field}.digest is {digest}; "
                "start the server with the right model, or correct the digest"
            )
        if (differing := difference(found, identity(first, model))) is not None:
            raise UserError(f"{field}.url: {url} and {first_url} differ in {differing}; replicas must serve the same model")
    return identity(first, model)


def difference(one: Identity, other: Identity) -> str | None:
    """What two servers differ in, for a message; None where they are the same teacher."""
    for name, text in _DIFFERENCES.items():
        if getattr(one, name) != getattr(other, name):
            return f"{text} ({getattr(one, name)} and {getattr(other, name)})"
    return None


def _natural(value: Any) -> bool:
    return type(value) is int and 0 < value < 2**62


def _digest(value: Any) -> bool:
    return type(value) is str and DIGEST.fullmatch(value) is not None


def _name(value: Any) -> bool:
    return type(value) is str and NAME.fullmatch(value) is not None


def _models(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and bool(value)
        and all(_name(name) and isinstance(one, dict) and _digest(one.get("weights")) for name, one in value.items())
    )


def _eos_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(one) is int and 0 <= one < 2**31 for one in value)


def _limits(value: Any) -> bool:
    return isinstance(value, dict) and _natural(value.get("body_bytes"))


_FIELDS: dict[str, Callable[[Any], bool]] = {
    "models": _models,
    "tokens": _digest,
    "num_tokens": _natural,
    "rows": _natural,
    "head": _name,
    "eos_ids": _eos_ids,
    "max_context": _natural,
    "limits": _limits,
    "scores": usable,
}
_DIFFERENCES = {
    "weights": "their weights",
    "tokens": "their token -> id maps",
    "num_tokens": "their numbers of tokens",
    "head": "their output heads",
    "rows": "the rows of their output heads",
}
