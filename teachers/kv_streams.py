"""Sequences whose keys and values a model keeps, so that an append costs its own tokens.

Several of them share a forward pass, laid out as [left padding | cached tokens, right-aligned | new tokens | right padding].
That copy exists for one layer at a time; afterwards each stream owns the keys and values of its own tokens, no padding.
Shape legend: B rows, h KV heads, C columns of the longest cached part, W columns of new tokens, t tokens of a stream, D head
size.
"""

import inspect
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from opd.models import cache_argument
from opd.records import Array, ScoreRequest
from opd.teachers.stream import ids_crc


@dataclass(eq=False)
class Stream:
    """One unfinished sequence."""

    variant: Hashable  # of the model: whose keys and values these are
    ids: Array = field(default_factory=lambda: np.zeros(0, np.int32))  # [t]
    layers: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # keys and values [h, t, D]; none where not cached

    @property
    def num_bytes(self) -> int:
        return self.ids.nbytes + sum(part.numel() * part.element_size() for layer in self.layers for part in layer)


class Streams:
    """The streams held, of `max_bytes` together; those longest out of use go first."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = self.num_hits = self.num_evicted = 0
        self._held: OrderedDict[str, Stream] = OrderedDict()  # the least recently used first

    @property
    def num_streams(self) -> int:
        return len(self._held)

    def take(self, name: str, keep_tokens: int, variant: Hashable, crc: int | None = None) -> Stream | None:
        """The stream, no longer held; a new one when nothing is to be kept. None when it does not hold those tokens."""
        held = self._held.get(name)
        if keep_tokens and (held is None or held.variant != variant or len(held.ids) < keep_tokens):
            return None
        if keep_tokens and held is not None and crc not in (None, ids_crc(held.ids[:keep_tokens])):
            return None
        self.drop(name)
        if not keep_tokens or held is None:
            return Stream(variant)
        self.num_hits += 1
        return held

    def put(self, name: str, stream: Stream) -> None:
        """Holds `stream` until it is evicted; not at all when it is larger than the bound."""
        self.drop(name)
        if (size := stream.num_bytes) > self.max_bytes:
            self.num_evicted += 1
            return
        self._held[name] = stream
        self.num_bytes += size

    def drop(self, name: str) -> None:
        """Forgets the stream, if it is held."""
        if (stream := self._held.pop(name, None)) is not None:
            self.num_bytes -= stream.num_bytes

    def evict(self) -> None:
        """Drops the least recently used until the others fit."""
        while self.num_bytes > self.max_bytes:
            self.drop(next(iter(self._held)))
            self.num_evicted += 1


@dataclass(eq=False)
class Row:
    """One row of a forward pass: a sequence of which the first tokens are cached."""

    ids: Array  # [cached + new]
    num_cached: int
    num_scored: int  # the last so many are asked about
    stream: Stream | None = None

    @property
    def fed(self) -> Array:
        """The new tokens."""
        return self.ids[self.num_cached :]


def extent(request: ScoreRequest, cached: bool) -> tuple[int, int]:
    """(tokens taken from the cache, tokens fed) of a request; `cached` tells whether the model keeps any keys.

    The state that predicts the first token asked about must be fresh: without a context the token before it is fed again.
    """
    total = request.keep_tokens + request.num_tokens
    kept = (request.keep_tokens if len(request.context_ids) else max(0, request.keep_tokens - 1)) if cached else 0
    return kept, total - kept


def open_row(streams: Streams, request: ScoreRequest, variant: Hashable, cached: bool) -> Row | None:
    """The row that answers `request`; None when its stream is lost."""
    stream = None
    if request.stream is not None:
        stream = streams.take(request.stream, request.keep_tokens, variant, request.keep_crc)
    if request.stream is not None and stream is None:
        return None
    kept = np.zeros(0, np.int32) if stream is None else stream.ids[: request.keep_tokens]
    ids = np.concatenate([kept, request.context_ids, request.token_ids]).astype(np.int32)
    return Row(ids, extent(request, cached)[0], len(request.token_ids), stream)


class PassCache(Cache):
    """The cache of one forward pass over `rows` [B]; leaves each stream with the keys and values of its row's tokens."""

    def __init__(self, rows: Sequence[Row]) -> None:
        super().__init__(layers=[])
        self.rows = rows
        self.columns = max(row.num_cached for row in rows)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """C, whatever the layer."""
        return self.columns

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """The keys and values [B, h, C + W, D] to attend to, of new ones [B, h, W, D]."""
        keys, values = (self._joined(layer_idx, i, states) for i, states in enumerate((key_states, value_states)))
        for b, row in enumerate(self.rows):
            if row.stream is not None:
                own = slice(self.columns - row.num_cached, self.columns + len(row.fed))
                fresh = keys[b, :, own].clone(), values[b, :, own].clone()
                row.stream.layers[layer_idx : layer_idx + 1] = [fresh]  # in place: the old ones are freed layer by layer
        return keys, values

    def _joined(self, layer_idx: int, which: int, states: Tensor) -> Tensor:
        if not self.columns:
            return states
        b, h, new, d = states.shape
        joined = states.new_zeros(b, h, self.columns + new, d)
        joined[:, :, self.columns :] = states
        for target, row in zip(joined, self.rows):
            if row.num_cached:
                assert row.stream is not None
                cached = row.stream.layers[layer_idx][which]
                target[:, self.columns - row.num_cached : self.columns] = cached[:, : row.num_cached]
        return joined

    def inputs(self, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
        """`attention_mask` [B, 1, W, C + W], added to scores, and `position_ids` [B, W]; none where nothing is cached."""
        if not self.columns:
            return {}
        cached = torch.tensor([row.num_cached for row in self.rows])[:, None]
        length = torch.tensor([len(row.ids) for row in self.rows])[:, None]
        query = torch.arange(max(len(row.fed) for row in self.rows))
        column = torch.arange(self.columns + len(query))
        positions = torch.minimum(cached + query, length - 1)  # padding stays within the model's positions
        padding = (column < self.columns - cached)[:, None, None].to(device)
        later = (column > self.columns + query[:, None]).to(device)
        mask = torch.zeros(len(self.rows), 1, len(query), len(column), dtype=dtype, device=device)
        mask.masked_fill_(padding | later, torch.finfo(dtype).min)
        return {"attention_mask": mask, "position_ids": positions.to(device)}


def can_cache(model: Any) -> bool:
    """Whether a decoder's keys and values stay right once computed, and whether it can be shown padded rows.

    Not so with windows or recurrent layers, rotary frequencies that follow the length, or kernels that take no mask.
    """
    config = model.config.get_text_config()
    arguments = inspect.signature(model.forward).parameters
    layers = DynamicCache(config=config).layers  # transformers' own idea of what each layer keeps
    ropes = getattr(config, "rope_parameters", None) or {}
    kinds = {rope.get("rope_type") for rope in (ropes, *ropes.values()) if isinstance(rope, dict)}
    return (
        cache_argument(model) in arguments
        and "position_ids" in arguments
        and config._attn_implementation in {"sdpa", "eager"}
        and all(type(layer) is DynamicLayer for layer in layers)
        and not getattr(config, "alibi", False)
        and not any("dynamic" in str(kind) or kind == "longrope" for kind in kinds)
    )


def agrees(states: Callable[[Sequence[Row]], Sequence[Tensor]], dtype: torch.dtype) -> bool:
    """Whether a model's cached rows get the states of whole ones, tried on a few tokens and two lengths.

    `states` gives the states [n, H] that predict the last n tokens of each row.
    """
    ids = np.arange(9, dtype=np.int32)
    wholes = ids, ids[2:8]
    streams = Stream(None), Stream(None)
    states([Row(whole[:-3], 0, 1, stream) for whole, stream in zip(wholes, streams)])
    again = states([Row(whole, len(whole) - 4, 3, stream) for whole, stream in zip(wholes, streams)])
    exact = states([Row(whole, 0, 3) for whole in wholes])
    ours, theirs = torch.cat(list(again)).float(), torch.cat(list(exact)).float()
    error = (ours - theirs).norm(dim=-1) / theirs.norm(dim=-1)
    # a mistaken mask or position moves every state by its own size; rounding may send single tokens to other experts
    return bool(error.median() < (1e-2 if dtype == torch.float32 else 1e-1))
