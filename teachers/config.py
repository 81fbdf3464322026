"""Configuration of a frozen teacher."""

from dataclasses import dataclass, field
from typing import Any, Literal

from omegaconf import MISSING


@dataclass(frozen=True)
class TeacherConfig:
    """A frozen model that scores rollouts. It runs in process, on the student's device."""

    model: str = MISSING
    """A Hugging Face folder, a hub id, or a member of the tiny family (`tiny:teacher`)."""
    revision: str | None = None
    """Commit, tag or branch of a hub id."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of the weights; `auto` is the checkpoint's own."""
    attention: str = "sdpa"
    """Attention kind, as transformers' `attn_implementation`."""
    quantization: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of transformers' quantisation config, with its `quant_method`; empty loads the weights plainly."""
    max_batch_tokens: int = 16384
    """Tokens scored in one forward pass, padding included."""
    logp_floor: float = -30.0
    """Log-probs below this are raised to it, and counted."""
