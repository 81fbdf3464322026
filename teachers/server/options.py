"""What a teacher server is started with, and what can be checked of it before a model is loaded. Imports no torch."""

import ipaddress
import json
import re
import socket
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from opd.errors import UserError
from opd.teachers.client.addresses import read_token

MODEL_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


@dataclass(frozen=True)
class VLLMOptions:
    """What vLLM alone is told."""

    python: str | None = None  # an interpreter with vLLM; None is that of OPD_VLLM, or this one
    max_logprobs: int = 256  # most entries a token that may be asked for
    max_model_len: int | None = None  # tokens of a sequence, and one; None is the model's own
    tensor_parallel_size: int = 1
    distributed_executor_backend: Literal["mp", "ray"] | None = None  # ray where one engine spans machines
    gpu_memory_utilization: float = 0.9  # share of a GPU's memory
    quantization: str | None = None  # as vLLM names it


@dataclass(frozen=True)
class ServeOptions:
    """The options of `opd serve teacher`.

    Example: `ServeOptions(model="Qwen/Qwen3-8B", port=8400, adapters={"math": "./math-lora"})`
    """

    model: str  # a folder, a hub id, or a member of the tiny family
    host: str = "127.0.0.1"
    port: int = 8400  # 0 takes a free one
    token_file: str | None = None
    adapters: Mapping[str, str] = field(default_factory=dict)  # name -> folder of a LoRA adapter over `model`
    active_experts: Mapping[str, int] = field(default_factory=dict)  # name -> experts a token; over an adapter of that name
    revision: str | None = None
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    attention: str = "sdpa"
    quantization: Mapping[str, Any] = field(default_factory=dict)  # of transformers' quantisation config; empty: none
    device: str = "auto"  # auto, cpu, cuda or cuda:N
    max_batch_tokens: int = 16384  # of one forward pass, padding included
    max_queue_tokens: int = 1048576  # of all requests that are accepted and not yet answered
    max_body_mib: int = 64  # of one request, and of one answer
    stream_cache_gib: float = 2.0  # KV caches of unfinished sequences
    max_logits_mib: int = 64  # of one chunk of logits
    backend: Literal["hf", "vllm"] = "hf"
    vllm: VLLMOptions = field(default_factory=VLLMOptions)  # with that backend


# of vLLM each token of a step with log-probs costs several rows of logits in float32 at once
BATCH_TOKENS = {"hf": 16384, "vllm": 2048}
ONLY = {
    "hf": ("active_experts", "attention", "device", "max_logits_mib"),
    "vllm": (
        *("vllm_python", "max_logprobs", "max_model_len", "gpu_memory_utilization"),
        *("tensor_parallel_size", "distributed_executor_backend"),
    ),
}


def given_options(context: Any) -> list[str]:
    """Names of the options that a command line (a `typer.Context`) has, not their defaults."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return [name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"]


def check_backend(backend: Literal["hf", "vllm"], given: Iterable[str], only: Mapping[str, Sequence[str]] = ONLY) -> None:
    """Raises `UserError` for an option, of those named `given`, that the other backend alone has."""
    other = "hf" if backend == "vllm" else "vllm"
    for name in given:
        if name in only[other]:
            raise UserError(f"--{name.replace('_', '-')}: an option of --backend {other}; leave it out with {backend}")


def parse_adapters(pairs: Sequence[str]) -> dict[str, str]:
    """Name -> folder, of `NAME=DIR` each. Raises `UserError`."""
    adapters: dict[str, str] = {}
    for pair in pairs:
        name, equals, folder = pair.partition("=")
        if not equals or not folder or not MODEL_NAME.fullmatch(name):
            raise UserError(f"--adapter: {pair!r} is not NAME=DIR with a name of letters, digits, '.', '_' and '-'")
        if name == "base" or name in adapters:
            raise UserError(f"--adapter: the name {name!r} is taken; give each adapter a name of its own")
        adapters[name] = folder
    return adapters


def parse_active_experts(pairs: Sequence[str]) -> dict[str, int]:
    """Name -> number, of `NAME=N` each. Raises `UserError`."""
    numbers: dict[str, int] = {}
    for pair in pairs:
        name, equals, number = pair.partition("=")
        if not equals or not (number.isascii() and number.isdigit()) or not MODEL_NAME.fullmatch(name):
            raise UserError(
                f"--active-experts: {pair!r} is not NAME=N, a name of letters, digits, '.', '_' and '-' and a number"
            )
        if name == "base" or name in numbers:
            raise UserError(f"--active-experts: the name {name!r} is taken; give each model a name of its own")
        numbers[name] = int(number)
    return numbers


def parse_quantization(text: str | None) -> dict[str, Any]:
    """The mapping that a JSON text stands for; none is empty. Raises `UserError`."""
    if text is None:
        return {}
    try:
        options = json.loads(text)
    except ValueError as error:
        raise UserError(f"--quantization: not JSON: {error}") from None
    if not isinstance(options, dict):
        raise UserError('--quantization: not a JSON object such as {"quant_method": "torchao", ...}')
    return options


def server_token(path: str | None) -> str | None:
    """The bearer token in a file. Warns on stderr when others may read the file. Raises `UserError` as `read_token` does."""
    if path is None:
        return None
    token = read_token(path, "--token-file")
    if Path(path).expanduser().stat().st_mode & 0o077:
        print(f"warning: --token-file: others may read {path}; chmod 600 it", file=sys.stderr, flush=True)
    return token


def bind(host: str, port: int, *, has_token: bool) -> socket.socket:
    """A socket bound to the address. Raises `UserError`: unknown host, not loopback without a token, port taken.

    This comes before the model is loaded, so that a taken port shows within the first second.
    """
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise UserError(f"--host: {host!r} is no address of this machine: {' '.join(str(error).split())}") from None
    family, kind, protocol, _, address = found[0]
    if not has_token and not ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback:
        raise UserError(
            f"--host: {host or address[0]!r} can be reached from other machines: give --token-file, or serve 127.0.0.1"
        )
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a restart need not wait for old connections
    with _taken(host, port, listener):
        listener.bind(address)
    return listener


def listen(listener: socket.socket) -> None:
    """Makes a bound socket listen. Raises `UserError`: until one listens, Linux lets two sockets bind the same port."""
    host, port = listener.getsockname()[:2]
    with _taken(host, port, listener):
        listener.listen(128)


@contextmanager
def _taken(host: str, port: int, listener: socket.socket) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        listener.close()
        raise UserError(f"--port: {host}:{port} cannot be served: {error.strerror}; choose another (0 is any)") from None
