"""What a served model can be asked. Not every backend sees hidden states, or every log-prob."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Abilities:
    """The `scores` of a server's `/v1/info`; a server that does not say can do everything.

    Example: `Abilities(hidden=False, temperature=False, ids="overlap", max_k=256)`
    """

    hidden: bool = True  # hidden states, and the output head that reads them
    temperature: bool = True  # log-probs at another temperature than 1
    ids: Literal["exact", "overlap"] = "exact"  # of chosen ids: all, or those among the most likely; others are -1
    max_k: int | None = None  # most entries a token; None is the whole vocabulary, of which none can then be missing

    @classmethod
    def of(cls, info: Mapping[str, Any]) -> "Abilities":
        """From a checked `/v1/info`."""
        return cls(**info["scores"]) if "scores" in info else cls()

    @classmethod
    def shared(cls, several: Sequence["Abilities"]) -> "Abilities":
        """What all of some replicas can do."""
        return cls(
            hidden=all(one.hidden for one in several),
            temperature=all(one.temperature for one in several),
            ids="overlap" if any(one.ids == "overlap" for one in several) else "exact",
            max_k=min((one.max_k for one in several if one.max_k is not None), default=None),
        )


def usable(value: Any) -> bool:
    """Whether the `scores` of an answer from elsewhere are those of `Abilities`; None stands for a server without any."""
    if value is None:
        return True
    return (
        isinstance(value, dict)
        and value.keys() == {"hidden", "temperature", "ids", "max_k"}
        and type(value["hidden"]) is bool
        and type(value["temperature"]) is bool
        and value["ids"] in ("exact", "overlap")
        and (value["max_k"] is None or (type(value["max_k"]) is int and value["max_k"] >= 0))
    )
