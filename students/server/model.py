"""A student in the server's own process: what it is, the weights that it holds, and the turns that it samples."""

from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from opd.models import context_limit, load_causal_lm, output_head
from opd.records import Chunk, SampleRequest
from opd.students.hf_sampler import HFSampler
from opd.students.server.options import StudentOptions
from opd.students.weights import layout, read_weights
from opd.teachers.digest import tokens_digest
from opd.teachers.server.model import device_of
from opd.tokenization import eos_ids, load_tokenizer


@dataclass(eq=False)
class ServedStudent:
    """Implements `opd.students.server.backend.StudentBackend`."""

    model: nn.Module
    name: str  # without its folders
    eos_ids: tuple[int, ...]
    tokens: str  # digest of the token -> id map
    num_tokens: int  # ids that the tokenizer uses
    options: StudentOptions
    weights: str | None = None  # digest of what was sent last; None until then, and while it is taken over
    vocab: int = 0  # ids that are sampled
    num_sampled: int = 0
    num_syncs: int = 0
    sampler: HFSampler | None = field(default=None)

    @classmethod
    def load(cls, options: StudentOptions) -> "ServedStudent":
        """Raises `UserError`."""
        tokenizer = load_tokenizer(options.model, "--model", options.revision)
        ends = eos_ids(options.model, "--model", tokenizer, options.revision)
        model: Any = load_causal_lm(
            options.model, "--model", revision=options.revision, dtype=options.dtype, attention=options.attention
        )
        model.to(device_of(options.device)).requires_grad_(False)
        vocab = tokenizer.get_vocab()
        served = cls(model, Path(options.model).name, ends, tokens_digest(vocab), max(vocab.values()) + 1, options)
        served._open_sampler(min(served.num_tokens, served.rows))  # a model that cannot be sampled from shows now
        return served

    @property
    def rows(self) -> int:
        """Rows of the output head, padding included."""
        return output_head(self.model).num_rows

    @property
    def max_context(self) -> int:
        """Tokens of the longest prompt with its completion."""
        model: Any = self.model
        return context_limit(model.config.get_text_config())

    @property
    def num_bytes(self) -> int:
        """Of all weights."""
        return sum(parameter.nbytes for parameter in self.model.parameters())

    @property
    def busy(self) -> bool:
        """Whether turns are being decoded."""
        return self.sampler is not None and self.sampler.busy

    def info(self) -> dict[str, Any]:
        """What a client compares before it sends anything."""
        return {
            "kind": "student",
            "backend": "hf",
            "model": self.name,
            "layout": layout(self.model),
            "dtype": str(next(self.model.parameters()).dtype).removeprefix("torch."),
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
        before, self.weights = self.weights, None
        try:
            vocab = read_weights(path, self.model)
        except ValueError:
            self.weights = before
            raise
        if vocab != self.vocab:
            self._open_sampler(min(vocab, self.rows))
        assert self.sampler is not None
        self.num_syncs += 1
        self.sampler.sync(self.model, self.num_syncs)  # which forgets keys and values of other weights
        self.weights = digest

    async def generate(self, request: SampleRequest) -> AsyncIterator[Chunk]:
        """The chunks of a turn; closing it stops the turn."""
        assert self.sampler is not None
        chunks: Any = self.sampler.generate(request)
        async with aclosing(chunks):
            async for chunk in chunks:
                self.num_sampled += len(chunk.sampled_ids)
                yield chunk

    def when_dead(self, tell: Callable[[str], None]) -> None:
        """It lives as long as the server."""

    def close(self) -> None:
        """There is nothing to end."""

    def _open_sampler(self, vocab: int) -> None:
        options = self.options
        self.vocab = vocab
        self.sampler = HFSampler(
            self.model,
            vocab,
            self.eos_ids,
            max_rows=options.max_rows,
            chunk_tokens=options.chunk_tokens,
            max_kept_bytes=options.kept_mib * 2**20,
        )
