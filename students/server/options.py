"""What a rollout server is started with. Imports no torch."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from opd.teachers.server import options as teacher
from opd.teachers.server.options import VLLMOptions


@dataclass(frozen=True)
class StudentOptions:
    """The options of `opd serve student`.

    Example: `StudentOptions(model="Qwen/Qwen3-1.7B", port=8500)`
    """

    model: str  # a folder, a hub id, or a member of the tiny family: the one that the trainer starts from
    host: str = "127.0.0.1"
    port: int = 8500  # 0 takes a free one
    token_file: str | None = None
    revision: str | None = None
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    attention: str = "sdpa"
    device: str = "auto"  # auto, cpu, cuda or cuda:N
    max_rows: int = 64  # turns decoded at once
    chunk_tokens: int = 16  # between two reports of an unfinished turn
    kept_mib: int = 1024  # of keys and values between the turns of episodes
    max_queue_tokens: int = 1048576  # of all turns that are accepted and not yet sampled
    max_body_mib: int = 16  # of one request; weights may be as large as the model
    backend: Literal["hf", "vllm"] = "hf"
    max_batch_tokens: int = 8192  # of a step of vLLM
    vllm: VLLMOptions = field(default_factory=VLLMOptions)  # with that backend


ONLY = {
    "hf": ("attention", "device", "max_rows", "kept_mib"),
    "vllm": (
        *("vllm_python", "max_batch_tokens", "max_model_len", "gpu_memory_utilization"),
        *("tensor_parallel_size", "distributed_executor_backend"),
    ),
}


def check_backend(backend: Literal["hf", "vllm"], given: Iterable[str]) -> None:
    """Raises `UserError` for an option, of those named `given`, that the other backend alone has."""
    teacher.check_backend(backend, given, ONLY)
