"""A student that vLLM samples from, behind the rollout server: turns as `opd.students.server.model` gives them.

New weights are a file in a folder that the engine reads anew; then its keys and values are forgotten. The noise of a seed is
vLLM's: other tokens than `HFSampler` draws, of the same distribution.
"""

import contextlib
import os
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from opd.records import Chunk, SampleRequest
from opd.students.going_on import rest_of
from opd.students.noise import slot_seed
from opd.students.server.options import StudentOptions
from opd.students.weights import check_weights, layout
from opd.teachers.digest import tokens_digest
from opd.teachers.vllm.checkpoint import resolve, weight_files
from opd.teachers.vllm.model import ENVIRONMENT, engine_arguments, sample_fields
from opd.teachers.vllm.process import EngineProcess, default_python
from opd.teachers.vllm.reading import PADDED_ROWS, first_entries
from opd.tokenization import eos_ids, load_tokenizer


@dataclass(eq=False)
class VLLMStudent:
    """Implements `opd.students.server.backend.StudentBackend`."""

    engine: EngineProcess
    facts: Mapping[str, Any]  # what the engine says of itself at the start
    shape: nn.Module  # the model without memory: names and shapes of its weights
    folder: "tempfile.TemporaryDirectory[str]"  # of the weights that were sent last
    name: str
    eos_ids: tuple[int, ...]
    tokens: str
    num_tokens: int
    num_file_bytes: int
    options: StudentOptions
    weights: str | None = None
    vocab: int = 0
    num_sampled: int = 0
    num_syncs: int = 0
    num_turns: int = field(default=0, init=False)  # that are being decoded

    @classmethod
    def load(cls, options: StudentOptions) -> "VLLMStudent":
        """Starts the engine. Raises `UserError`."""
        tokenizer = load_tokenizer(options.model, "--model", options.revision)
        ends = eos_ids(options.model, "--model", tokenizer, options.revision)
        source, own = resolve(options.model, options.revision), options.vllm
        arguments = engine_arguments(source, own, options.dtype, options.max_batch_tokens)
        arguments |= {"enable_prefix_caching": True}  # of the prompts of a group; forgotten with the weights
        engine = EngineProcess(own.python or default_python(), environment=ENVIRONMENT)
        try:
            facts = engine.start({"arguments": arguments, "adapters": {}})
            with torch.device("meta"):
                config = AutoConfig.from_pretrained(source, trust_remote_code=False)
                shape = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
        except BaseException:
            engine.close()
            raise
        vocab = tokenizer.get_vocab()
        return cls(
            engine=engine,
            facts=facts,
            shape=shape,
            folder=tempfile.TemporaryDirectory(prefix="opd-weights-"),
            name=Path(options.model).name,
            eos_ids=ends,
            tokens=tokens_digest(vocab),
            num_tokens=max(vocab.values()) + 1,
            num_file_bytes=sum(path.stat().st_size for path in weight_files(source, "--model")),
            options=options,
        )

    @property
    def num_bytes(self) -> int:
        """Of all weights."""
        return self.num_file_bytes

    @property
    def rows(self) -> int:
        """Rows of the output head, padding included."""
        return self.facts["rows"]

    @property
    def max_context(self) -> int:
        """Tokens of the longest prompt with its completion."""
        return self.facts["max_model_len"]

    @property
    def busy(self) -> bool:
        """Whether turns are being decoded."""
        return self.num_turns > 0

    def info(self) -> dict[str, Any]:
        """See `ServedStudent.info`."""
        return {
            "kind": "student",
            "backend": "vllm",
            "engine": self.facts["vllm"],
            "model": self.name,
            "layout": layout(self.shape),
            "dtype": self.facts["dtype"],
            "tokens": self.tokens,
            "num_tokens": self.num_tokens,
            "rows": self.rows,
            "eos_ids": list(self.eos_ids),
            "max_context": self.max_context,
            "weights": self.weights,
        }

    async def take(self, path: Path, digest: str) -> None:
        """Takes over the weights of a file. Raises `BadWeights`; what was there before then stays."""
        assert not self.busy, "weights change while turns are being decoded"
        vocab = check_weights(path, self.shape)
        self.weights = None
        os.replace(path, Path(self.folder.name, "model.safetensors"))
        await self.engine.ask("load", {"folder": self.folder.name}, {})
        self.num_syncs += 1
        self.vocab, self.weights = min(vocab, self.rows), digest

    async def generate(self, request: SampleRequest) -> AsyncIterator[Chunk]:
        """The chunks of a turn; closing it stops the turn."""
        self.num_turns += 1
        try:
            async with aclosing(_grouped(self._tokens(request), self.options.chunk_tokens)) as chunks:  # type: ignore[type-var]
                async for chunk in chunks:
                    self.num_sampled += len(chunk.sampled_ids)
                    yield chunk
        finally:
            self.num_turns -= 1

    async def _tokens(self, request: SampleRequest) -> AsyncIterator[Chunk]:
        """The tokens as they come. The engine also draws rows of its head that are no token of the model: what follows such
        a draw is thrown away and it is drawn again, which leaves the distribution over the others."""
        asked = request
        while True:
            rest = None
            async with aclosing(self._drawn(asked)) as drawn:  # type: ignore[type-var]
                async for chunk in drawn:
                    outside = np.flatnonzero(chunk.sampled_ids >= self.vocab)
                    if len(outside):
                        rest = int(outside[0])
                        chunk = _first(chunk, rest)
                    asked = rest_of(asked, chunk)
                    if len(chunk.sampled_ids):
                        yield chunk
                    if rest is not None:
                        break
            if rest is None:
                return
            asked = replace(asked, seed=slot_seed(asked.seed, asked.first))

    async def _drawn(self, request: SampleRequest) -> AsyncIterator[Chunk]:
        num_topk = request.sampling.num_topk
        k = min(self.rows, num_topk + PADDED_ROWS) if num_topk else 0
        # vLLM's noise goes by seed alone: a turn that goes on must not repeat what it began with
        seed = slot_seed(request.seed, request.first) if request.first else request.seed
        fields = {**sample_fields(replace(request, seed=seed), self.eos_ids, k), "adapter": None}
        async with aclosing(self.engine.stream("sample", fields, {"ids": request.context_ids})) as answers:  # type: ignore[type-var]
            async for told, arrays in answers:
                if told["kind"] != "chunk":
                    continue
                topk = (None, None)
                if num_topk:
                    topk = first_entries(arrays["topk_ids"], arrays["topk_logps"], num_topk, self.vocab)
                yield Chunk(arrays["sampled_ids"], np.minimum(arrays["logps"], 0.0), told["finish"], 0, *topk)

    def when_dead(self, tell: Callable[[str], None]) -> None:
        """See `EngineProcess.when_dead`."""
        self.engine.when_dead(tell)

    def close(self) -> None:
        """Ends the engine's process."""
        self.engine.close()
        with contextlib.suppress(OSError):
            self.folder.cleanup()


async def _grouped(tokens: AsyncIterator[Chunk], size: int) -> AsyncIterator[Chunk]:
    """Chunks of at least so many tokens, but for the last."""
    held: list[Chunk] = []
    async with aclosing(tokens) as coming:  # type: ignore[type-var]
        async for chunk in coming:
            held.append(chunk)
            if chunk.finish is not None or sum(len(one.sampled_ids) for one in held) >= size:
                yield _joined(held)
                held = []


def _joined(chunks: list[Chunk]) -> Chunk:
    def join(name: str) -> Any:
        parts = [getattr(chunk, name) for chunk in chunks]
        return None if parts[0] is None else np.concatenate(parts)

    return replace(chunks[-1], **{name: join(name) for name in ("sampled_ids", "sampler_logps", "topk_ids", "topk_logps")})


def _first(chunk: Chunk, count: int) -> Chunk:
    """The first tokens of a chunk that does not end there."""
    topk = (None if part is None else part[:count] for part in (chunk.topk_ids, chunk.topk_logps))
    return Chunk(chunk.sampled_ids[:count], chunk.sampler_logps[:count], None, chunk.version, *topk)
