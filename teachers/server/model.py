"""The model behind a server: what it is, what it can be asked, and its answers as frames."""

import contextlib
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from opd.errors import UserError
from opd.kernels.head import OutputHead
from opd.models import context_limit
from opd.records import SampleRequest, Turn
from opd.students.hf_sampler import HFSampler
from opd.teachers.abilities import Abilities
from opd.teachers.digest import adapter_digest, experts_digest, head_digest, tokens_digest, weights_digest
from opd.teachers.hf import HFModel, View
from opd.teachers.server.admission import Refused
from opd.teachers.server.options import ServeOptions
from opd.teachers.wire import Asked, encode_scores, encode_turn
from opd.tokenization import eos_ids, load_tokenizer


@dataclass(eq=False)
class ServedModel:
    """One loaded base with its adapters, its tokenizer, and the digests by which clients know them.

    Implements `opd.teachers.server.backend.Backend`.
    """

    model: HFModel
    active_experts: Mapping[str, int]  # by model name, for those that do not have the base's own number
    name: str  # of the base, without its folders
    eos_ids: tuple[int, ...]
    weights: Mapping[str, str]  # digest by model name: `base`, the adapters, and those with fewer experts
    head_id: str
    tokens: str  # digest of the token -> id map
    num_tokens: int  # ids that the tokenizer uses: the largest and one more
    tokenizer_files: Mapping[str, str]  # texts from which `AutoTokenizer.from_pretrained` makes the tokenizer anew
    num_sampled: int = 0  # tokens sampled so far
    num_floored: int = 0  # log-probs raised to the floor so far
    abilities = Abilities()

    @classmethod
    def load(cls, options: ServeOptions) -> "ServedModel":
        """Loads what the options name. Raises `UserError`."""
        tokenizer = load_tokenizer(options.model, "--model", options.revision)
        ends = eos_ids(options.model, "--model", tokenizer, options.revision)
        model = HFModel(
            "--model",
            options.model,
            revision=options.revision,
            dtype=options.dtype,
            attention=options.attention,
            quantization=dict(options.quantization) or None,
            adapters=options.adapters,
            adapter_field="--adapter {}",
            device=device_of(options.device),
            chunk_bytes=options.max_logits_mib * 2**20,
            max_batch_tokens=options.max_batch_tokens,
            max_stream_bytes=int(options.stream_cache_gib * 2**30),
        )
        base = weights_digest(_Named(model.base_state))  # type: ignore[arg-type]
        weights = {"base": base}
        for name in options.adapters:
            weights[name] = adapter_digest(base, model.adapter_state(name))
        for name, number in options.active_experts.items():
            model.experts.check(number, f"--active-experts {name}")
            weights[name] = experts_digest(weights.get(name, base), number)
        name = Path(options.model).name if Path(options.model).expanduser().is_dir() else options.model.rpartition("/")[2]
        vocab = tokenizer.get_vocab()
        return cls(
            model=model,
            active_experts=options.active_experts,
            name=name,
            eos_ids=ends,
            weights=weights,
            head_id=head_digest(model.head),
            tokens=tokens_digest(vocab),
            num_tokens=max(vocab.values()) + 1,
            tokenizer_files=files_of(tokenizer),
        )

    @property
    def rows(self) -> int:
        """Rows of the output head, padding included."""
        return self.model.head.num_rows

    @property
    def vocab(self) -> int:
        """Ids that are sampled."""
        return min(self.num_tokens, self.rows)

    @property
    def max_context(self) -> int:
        """Tokens of the longest sequence."""
        model: Any = self.model.model
        return context_limit(model.config.get_text_config())

    @property
    def hidden_bytes(self) -> int:
        """Of one token's last hidden state."""
        return self.model.head.hidden_size * self.model.dtype.itemsize

    @property
    def head(self) -> OutputHead:
        """The output head."""
        return self.model.head

    @property
    def max_batch_tokens(self) -> int:
        """Of one forward pass, padding included."""
        return self.model.max_batch_tokens

    @property
    def max_stream_bytes(self) -> int:
        """Of the KV caches of unfinished sequences."""
        return self.model.streams.max_bytes

    def info(self) -> dict[str, Any]:
        """What a client compares before it believes an answer."""
        return {
            "backend": "hf",
            "model": self.name,
            "models": {name: {"weights": digest} for name, digest in self.weights.items()},
            "tokens": self.tokens,
            "num_tokens": self.num_tokens,
            "rows": self.rows,
            "head": self.head_id,
            "eos_ids": list(self.eos_ids),
            "max_context": self.max_context,
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "cached_streams": self.model.cached_streams,
        }

    async def score(self, asked: Asked) -> bytes:
        """The frame of an answer. Runs where the model lives. Raises `StreamLost`."""
        adapter = asked.model if asked.model in self.model.adapters else None
        view = View(asked.vocab, asked.logp_floor, adapter, self.active_experts.get(asked.model))
        scores = await self.model.score(asked.request, view)
        self.num_floored += scores.num_floored
        if scores.hidden is not None:
            scores = replace(scores, head=self.head_id)
        return encode_scores(scores, self.weights[asked.model])

    async def generate(self, request: SampleRequest) -> bytes:
        """The frame of a sampled turn. Runs where the model lives. Raises `Refused` for a model that scores alone."""
        if isinstance(self.sampler, UserError):
            raise Refused(400, f"this model is served for scoring alone: {self.sampler}")
        chunks: Any = self.sampler.generate(request)
        async with contextlib.aclosing(chunks):
            turn = Turn.of(request.context_ids, [chunk async for chunk in chunks])
        self.num_sampled += len(turn.sampled_ids)
        return encode_turn(turn, self.weights["base"])

    @cached_property
    def sampler(self) -> HFSampler | UserError:
        """The sampler of the base, or why there is none. Made where the model lives."""
        try:
            return HFSampler(self.model.model, self.vocab, self.eos_ids)
        except UserError as error:
            return error

    def close_stream(self, name: str) -> None:
        """Forgets a stream. Runs where the model lives."""
        self.model.close_stream(name)

    def counts(self) -> Mapping[str, float]:
        """Figures for `/metrics`."""
        streams = self.model.streams
        return {
            "opd_batches": self.model.num_batches,
            "opd_scored_tokens": self.model.num_tokens,
            "opd_sampled_tokens": self.num_sampled,
            "opd_floored_logps": self.num_floored,
            "opd_stream_cache_bytes": streams.num_bytes,
            "opd_streams": streams.num_streams,
            "opd_stream_hits": streams.num_hits,
            "opd_stream_evictions": streams.num_evicted,
        }

    def when_dead(self, tell: Callable[[str], None]) -> None:
        """It lives as long as this process."""

    def close(self) -> None:
        """It ends with this process."""


@dataclass(frozen=True)
class _Named:
    """A base's weights under the names they have without adapters, as `weights_digest` reads a module."""

    state: Mapping[str, Tensor]

    def state_dict(self, keep_vars: bool = False) -> Mapping[str, Tensor]:
        return self.state


def files_of(tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """The texts of a tokenizer's files by name."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        files = sorted(path for path in Path(folder).rglob("*") if path.is_file())
        return {path.relative_to(folder).as_posix(): path.read_text("utf-8") for path in files}


def device_of(name: str) -> torch.device:
    """Raises `UserError` for a device that this machine does not have."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kind, _, index = name.partition(":")
    if kind == "cpu" and not index:
        return torch.device("cpu")
    if kind != "cuda" or (index and not index.isdecimal()):
        raise UserError(f"--device: {name!r} is none of auto, cpu, cuda and cuda:N")
    count = torch.cuda.device_count()
    if int(index or 0) >= count:
        raise UserError(f"--device: {name} is not there: PyTorch sees {count} CUDA devices; --device cpu works everywhere")
    return torch.device(name)
