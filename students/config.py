"""Configuration of the student and of its sampler."""

from dataclasses import dataclass
from typing import Literal

from omegaconf import MISSING


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters through peft; the base stays frozen and serves as the student's own reference."""

    r: int = 16
    """Rank."""
    alpha: int = 32
    """Scale: the update is multiplied by alpha / r."""
    dropout: float = 0.0
    """Dropout on the adapters' input."""
    target_modules: str = "all-linear"
    """As in peft: `all-linear` (without the output head), or names separated by commas."""


@dataclass(frozen=True)
class StudentConfig:
    """The model that learns."""

    model: str = MISSING
    """A Hugging Face folder, a hub id, or a member of the tiny family (`tiny:student`)."""
    revision: str | None = None
    """Commit, tag or branch of a hub id."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the master weights and of the optimizer's state."""
    attention: str = "sdpa"
    """Attention kind, as transformers' `attn_implementation`."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    lora: LoraConfig | None = None
    """Train low-rank adapters instead of all weights."""


@dataclass(frozen=True)
class SamplerConfig:
    """What decodes the student's rollouts: the Hugging Face sampler in process, or the servers at `url`."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of the sampling weights. `auto` is the precision of the loss; where it is not that of the master weights, the
    sampler keeps a copy, which without `lookahead` is gone while the student is updated."""
    max_rows: int = 64
    """Rollouts decoded at once; the others wait for a freed row."""
    chunk_tokens: int = 16
    """Tokens between two reports of an unfinished rollout; the unit of stops and restarts within a single answer."""
    kept_mib: int = 1024
    """Memory for keys and values kept between the turns of episodes, so that a turn reads only what is new."""
    url: str | None = None
    """Address of a rollout server (`opd serve student`), as `http://127.0.0.1:8500`; several are separated by commas. They
    get the weights before the rollouts of each step, and have `max_rows`, `chunk_tokens` and `kept_mib` of their own."""
    token_file: str | None = None
    """File with the servers' bearer token."""
    timeout_s: float = 60.0
    """With `url`: longest silence of a server that is asked for something, in seconds; then it counts as down."""
    deadline_s: float = 600.0
    """With `url`: when no server has given a token for so many seconds, the run stops, and can be resumed."""
    max_in_flight: int = 256
    """With `url`: turns at once on each server; others wait."""
    max_mismatch: float = 0.1
    """With `url`: the most that the servers' log-probs and the trainer's may differ by, in nats a token on average, in a
    step whose rollouts are of the newest weights; beyond it the run stops, since the servers sample from something else."""

    @property
    def urls(self) -> tuple[str, ...]:
        """The servers' addresses."""
        return tuple(part.strip().rstrip("/") for part in (self.url or "").split(",") if part.strip())


@dataclass(frozen=True)
class SamplingConfig:
    """How rollouts are drawn."""

    temperature: float = 1.0
    """Softmax temperature; 0 is greedy."""
    top_p: float = 1.0
    """Nucleus: the smallest set of tokens with this probability."""
    top_k: int = 0
    """Only the k most likely tokens; 0 keeps all."""
    max_new_tokens: int = 1024
    """Longest completion, in tokens."""
    max_context: int | None = None
    """Longest prompt plus completion, in tokens; null takes the student's own limit. Longer prompts are skipped and
    counted."""
