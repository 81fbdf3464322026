"""A model that vLLM computes, behind the teacher server: scores, turns and streams as `opd.teachers.server.model` has them.

What vLLM does not give is refused: hidden states, and log-probs at another temperature than 1. A stream keeps its tokens
and no keys, so that each append costs the whole sequence.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from opd.models import context_limit, read_text_config
from opd.records import Array, Chunk, Finish, SampleRequest, Turn
from opd.teachers.abilities import Abilities
from opd.teachers.digest import files_digest, tokens_digest
from opd.teachers.kv_streams import Streams, open_row
from opd.teachers.server.admission import Refused
from opd.teachers.server.model import files_of
from opd.teachers.server.options import ServeOptions, VLLMOptions
from opd.teachers.stream import StreamLost
from opd.teachers.vllm.checkpoint import adapter_rank, resolve, weight_files
from opd.teachers.vllm.process import EngineProcess, default_python
from opd.teachers.vllm.reading import PADDED_ROWS, first_entries, num_entries, read_scores
from opd.teachers.wire import Asked, encode_scores, encode_turn
from opd.tokenization import eos_ids, load_tokenizer

# the model is a folder by then; on a CPU vLLM would take most of the memory for its cache (in GiB)
ENVIRONMENT = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "4"}


@dataclass(eq=False)
class VLLMModel:
    """Implements `opd.teachers.server.backend.Backend`."""

    engine: EngineProcess
    facts: Mapping[str, Any]  # what the engine says of itself at the start
    name: str
    eos_ids: tuple[int, ...]
    weights: Mapping[str, str]
    tokens: str
    num_tokens: int  # ids that the tokenizer uses: the largest and one more
    tokenizer_files: Mapping[str, str]
    max_k: int
    streams: Streams
    head_id = "none"
    head = None
    hidden_bytes = 0
    num_scored: int = field(default=0, init=False)
    num_sampled: int = field(default=0, init=False)
    num_floored: int = field(default=0, init=False)

    @classmethod
    def load(cls, options: ServeOptions) -> "VLLMModel":
        """Starts the engine with what the options name. Raises `UserError`."""
        tokenizer = load_tokenizer(options.model, "--model", options.revision)
        ends = eos_ids(options.model, "--model", tokenizer, options.revision)
        folder = resolve(options.model, options.revision)
        vocab, own = tokenizer.get_vocab(), options.vllm
        arguments = engine_arguments(folder, own, options.dtype, options.max_batch_tokens)
        if options.adapters:
            ranks = [adapter_rank(Path(path).expanduser(), f"--adapter {name}") for name, path in options.adapters.items()]
            arguments |= {"enable_lora": True, "max_loras": len(ranks), "max_lora_rank": max(ranks)}
        files = weight_files(folder, "--model")
        adapters = {name: Path(path).expanduser().resolve() for name, path in options.adapters.items()}
        engine = EngineProcess(own.python or default_python(), environment=ENVIRONMENT)
        try:
            facts = engine.start({"arguments": arguments, "adapters": {name: str(path) for name, path in adapters.items()}})
            base = files_digest(files, f"vllm {facts['dtype']} {own.quantization}")
            weights = {"base": base}
            for name, path in adapters.items():
                weights[name] = files_digest([path / "adapter_config.json", *weight_files(path, f"--adapter {name}")], base)
        except BaseException:
            engine.close()
            raise
        called = Path(options.model).name if Path(options.model).expanduser().is_dir() else options.model.rpartition("/")[2]
        return cls(
            engine=engine,
            facts=facts,
            name=called,
            eos_ids=ends,
            weights=weights,
            tokens=tokens_digest(vocab),
            num_tokens=max(vocab.values()) + 1,
            tokenizer_files=files_of(tokenizer),
            max_k=own.max_logprobs,
            streams=Streams(int(options.stream_cache_gib * 2**30)),
        )

    @property
    def abilities(self) -> Abilities:
        """See the module."""
        ids = "exact" if self.facts["chosen_ids"] else "overlap"
        return Abilities(hidden=False, temperature=False, ids=ids, max_k=self.max_k)

    @property
    def rows(self) -> int:
        """Rows of the output head, padding included."""
        return self.facts["rows"]

    @property
    def vocab(self) -> int:
        """Ids of a turn."""
        return min(self.num_tokens, self.rows)

    @property
    def max_context(self) -> int:
        """Tokens of the longest sequence: vLLM cannot score one without sampling a token after it."""
        return self.facts["max_model_len"] - 1

    @property
    def max_batch_tokens(self) -> int:
        """Tokens of a step of the engine."""
        return self.facts["batch_tokens"]

    @property
    def max_stream_bytes(self) -> int:
        """Of the tokens of unfinished sequences."""
        return self.streams.max_bytes

    def info(self) -> dict[str, Any]:
        """What a client compares before it believes an answer."""
        return {
            "backend": "vllm",
            "engine": self.facts["vllm"],
            "model": self.name,
            "models": {name: {"weights": digest} for name, digest in self.weights.items()},
            "tokens": self.tokens,
            "num_tokens": self.num_tokens,
            "rows": self.rows,
            "head": self.head_id,
            "eos_ids": list(self.eos_ids),
            "max_context": self.max_context,
            "dtype": self.facts["dtype"],
            "cached_streams": False,
        }

    async def score(self, asked: Asked) -> bytes:
        """The frame of an answer. Raises `StreamLost`, and `Refused` as `EngineProcess.stream` does."""
        request = asked.request
        row = open_row(self.streams, request, asked.model, cached=False)
        if row is None:
            raise StreamLost(f"stream {request.stream}: {request.keep_tokens} tokens of it are not held")
        exact = self.abilities.ids == "exact"
        limit = self.max_k + PADDED_ROWS
        k = num_entries(request, vocab=asked.vocab, rows=self.rows, max_entries=limit, exact=exact)
        tensors = {"ids": row.ids}
        if exact and request.ids is not None and request.ids.size:
            tensors["chosen"] = request.ids
        fields = {"n": len(request.token_ids), "k": k, "adapter": _adapter(asked.model)}
        answer = _nothing(k) if not len(request.token_ids) else (await self.engine.ask("score", fields, tensors))[1]
        if row.stream is not None and request.stream is not None:
            row.stream.ids = row.ids
            self.streams.put(request.stream, row.stream)
            self.streams.evict()
        try:
            scores = read_scores(answer, request, vocab=asked.vocab, logp_floor=asked.logp_floor)
        except ValueError as error:
            raise Refused(500, str(error)) from None
        self.num_scored += len(request.token_ids)
        self.num_floored += scores.num_floored
        return encode_scores(scores, self.weights[asked.model])

    async def generate(self, request: SampleRequest) -> bytes:
        """The frame of a sampled turn. Raises `Refused`."""
        sampling = request.sampling
        if sampling.num_topk > self.max_k:
            raise Refused(400, f"num_topk: more than {self.max_k}: start the server with a larger --max-logprobs")
        k = min(self.rows, sampling.num_topk + PADDED_ROWS) if sampling.num_topk else 0
        fields = {**sample_fields(request, self.eos_ids, k), "adapter": None}
        chunks: list[Chunk] = []
        async for told, arrays in self.engine.stream("sample", fields, {"ids": request.context_ids}):
            if told["kind"] == "chunk":
                chunks.append(self._chunk(told["finish"], arrays, sampling.num_topk))
        if not chunks or chunks[-1].finish is None:
            raise Refused(503, "vLLM gave the turn up: come again")
        turn = Turn.of(request.context_ids, chunks)
        self.num_sampled += len(turn.sampled_ids)
        return encode_turn(turn, self.weights["base"])

    def _chunk(self, finish: Finish | None, arrays: Mapping[str, Array], num_topk: int) -> Chunk:
        sampled, topk = arrays["sampled_ids"], (None, None)
        if sampled.max(initial=0) >= self.vocab:
            raise Refused(500, f"vLLM sampled a row of the output head that is no token: above {self.vocab - 1}")
        if num_topk:
            topk = first_entries(arrays["topk_ids"], arrays["topk_logps"], num_topk, self.vocab)
        return Chunk(sampled, np.minimum(arrays["logps"], 0.0), finish, 0, *topk)

    def close_stream(self, name: str) -> None:
        """Forgets a stream."""
        self.streams.drop(name)

    def counts(self) -> Mapping[str, float]:
        """Figures for `/metrics`."""
        return {
            "opd_scored_tokens": self.num_scored,
            "opd_sampled_tokens": self.num_sampled,
            "opd_floored_logps": self.num_floored,
            "opd_stream_cache_bytes": self.streams.num_bytes,
            "opd_streams": self.streams.num_streams,
            "opd_stream_hits": self.streams.num_hits,
            "opd_stream_evictions": self.streams.num_evicted,
        }

    def when_dead(self, tell: Callable[[str], None]) -> None:
        """See `EngineProcess.when_dead`."""
        self.engine.when_dead(tell)

    def close(self) -> None:
        """Ends the engine's process."""
        self.engine.close()


def engine_arguments(folder: Path, own: VLLMOptions, dtype: str, max_batch_tokens: int) -> dict[str, Any]:
    """Of vLLM's engine, for scoring. Raises `UserError` for a folder without a configuration."""
    config = read_text_config(str(folder), "--model")
    named = getattr(config, "dtype", None) if dtype == "auto" else dtype
    arguments: dict[str, Any] = {
        "model": str(folder),
        "skip_tokenizer_init": True,
        "trust_remote_code": False,
        "generation_config": "vllm",  # nothing of the model's own sampling
        "dtype": "auto" if named is None else str(named).removeprefix("torch."),  # vLLM's auto makes float32 smaller
        "max_model_len": own.max_model_len or context_limit(config),
        "max_num_batched_tokens": max_batch_tokens,
        "max_logprobs": own.max_logprobs + PADDED_ROWS,
        "logprobs_mode": "processed_logprobs",  # of the distribution sampled from; those of prompts are always plain
        "enable_prefix_caching": False,  # a token whose keys are cached has no log-prob
        "tensor_parallel_size": own.tensor_parallel_size,
        "distributed_executor_backend": own.distributed_executor_backend,
        "gpu_memory_utilization": own.gpu_memory_utilization,
        "disable_log_stats": True,
    }
    return arguments if own.quantization is None else arguments | {"quantization": own.quantization}


def sample_fields(request: SampleRequest, eos_ids: Sequence[int], k: int) -> dict[str, Any]:
    """Of a question to the engine: a turn, with k most likely tokens beside each sampled one. Raises `Refused`."""
    sampling = request.sampling
    if sampling.num_topk and sampling.temperature and sampling.truncated:
        raise Refused(400, "num_topk: vLLM gives none before truncation and penalty: leave these out, or num_topk")
    return {
        "seed": request.seed,
        "max_tokens": request.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "presence_penalty": sampling.presence_penalty,
        "eos_ids": list(eos_ids),
        "k": k,
    }


def _adapter(model: str) -> str | None:
    return None if model == "base" else model


def _nothing(k: int) -> dict[str, Array]:
    """The engine's answer about no tokens."""
    logps = np.zeros((0, 1 + k), np.float32)
    return {"logps": logps[:, 0], "topk_ids": logps[:, 1:].astype(np.int32), "topk_logps": logps[:, 1:]}
