"""Configuration of the loss and of the optimizer."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class ObjectiveConfig:
    """How terms become a loss."""

    precision: Literal["float32", "bfloat16"] = "float32"
    """Forward and backward in this type; `bfloat16` is autocast around fp32 master weights."""
    temperature: float | None = None
    """Student's and teacher's log-probs are those of softmax(logits / temperature); null is the sampling temperature."""
    normalizer: Literal["token_mean", "sequence_mean"] = "token_mean"
    """Divide by the trainable tokens of the whole optimizer step, or average each rollout's own mean."""
    micro_batch_tokens: int | None = None
    """Tokens of one forward pass, padding included; null is 16384, and 384 on the CPU, where more are hardly faster. Results
    do not depend on it."""
    updates_per_batch: int = 1
    """Optimizer steps a batch is split into; beyond one, the ratio to the sampling policy is not 1."""
    max_logits_mib: int = 64
    """Size of one chunk of logits, in MiB; the student's and the teacher's are held at once."""
    max_nonfinite_steps: int = 3
    """Consecutive steps with a non-finite loss or gradient that are skipped before the run stops."""


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW and its schedule."""

    lr: float = 1e-6
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay rates of the moments."""
    eps: float = 1e-8
    """Added to the denominator."""
    weight_decay: float = 0.0
    """Decoupled weight decay."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after the warm-up, as transformers' `get_scheduler`."""
    warmup_ratio: float = 0.0
    """Share of the updates in which the rate rises from 0."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this norm; 0 leaves them."""
