"""The Hugging Face sampler: batched decoding in process with a KV cache.

Finished rows leave the batch and waiting prompts take their place, so cost follows live tokens. The noise of a token
depends on its turn's seed and its position alone, so a rollout depends on its neighbours by rounding at most. Turns that
others follow keep their keys and values until then.
Shape legend: B rows, T columns of the cache, V ids in use, P tokens of the longest prompt of a prefill.
"""

import asyncio
import copy
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.cache_utils import Cache, DynamicCache

from opd.clock import Clock
from opd.errors import UserError
from opd.models import cache_argument, decoder, last_states, output_head
from opd.records import Chunk, Finish, SampleRequest
from opd.students.drawing import draw, student_topk
from opd.students.kept_turns import KeptTurns, following_row, left_aligned
from opd.students.kv_cache import RowCache
from opd.students.noise import uniform
from opd.teachers.kv_streams import PassCache, Stream, can_cache

PREFILL_TOKENS = 8192  # of one prefill forward, padding included
MAX_KEPT_BYTES = 2**30
REFILL_SHARE = 4  # a quarter of the rows must be free before others are prefilled, so that prefills are not tiny


@dataclass(eq=False)
class _Row:
    """One turn being decoded."""

    request: SampleRequest
    chunks: "asyncio.Queue[Chunk | Exception]" = field(default_factory=asyncio.Queue)
    ids: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    topk_ids: list[Tensor] = field(default_factory=list)
    topk_logps: list[Tensor] = field(default_factory=list)
    reported: int = 0
    held: Tensor | None = None  # [V] bool, with a presence penalty: tokens that the turn holds
    awaited: bool = False  # whoever asked for the turn waits for its next chunk
    before: Stream | None = None  # keys and values of the beginning of its context
    kept: bool = False  # its own were kept for the turn after it
    finish: Finish | None = None

    @property
    def length(self) -> int:
        """Tokens in the cache once the newest sampled one has been fed back."""
        return len(self.request.context_ids) + len(self.ids)

    @property
    def goes_on(self) -> bool:
        """Whether the beginning of its context need not be read again."""
        return self.before is not None

    @property
    def num_fed(self) -> int:
        """Tokens of its context that a prefill must read."""
        return len(self.request.context_ids) - (0 if self.before is None else len(self.before.ids))


class HFSampler:
    """See the module. Raises `UserError` for a model whose layers are not all full attention."""

    concurrent = False

    def __init__(
        self,
        student: nn.Module,
        vocab: int,
        eos_ids: Sequence[int],
        *,
        max_rows: int = 64,
        chunk_tokens: int = 16,
        dtype: torch.dtype | None = None,
        copy_weights: bool = False,
        max_kept_bytes: int = MAX_KEPT_BYTES,
        within: Callable[[], AbstractContextManager[Any]] = nullcontext,
        clock: Clock | None = None,
    ) -> None:
        """`within`: in what the model decodes, such as its adapters off. `copy_weights` keeps a copy even where the
        student's own weights would do: they may be sharded later.

        `max_kept_bytes`: of keys and values that are kept between the turns of episodes.
        """
        own = next(student.parameters()).dtype
        self.shared = dtype in (None, own) and not copy_weights
        self.model = student if self.shared else _copied(student, dtype or own)
        self._released = False
        _refuse_partial_attention(self.model)
        _refuse_other_masks(self.model)
        self.vocab, self.eos_ids = vocab, torch.tensor(sorted(eos_ids))
        self.max_rows, self.chunk_tokens = max_rows, chunk_tokens
        self.version, self.clock, self._within = 0, clock or Clock(), within
        self.cache_name = cache_argument(decoder(self.model))
        self._kept = KeptTurns(max_kept_bytes if can_cache(decoder(self.model)) else 0)
        self._waiting: deque[_Row] = deque()
        self._rows: list[_Row] = []  # the cache's rows, finished ones included until the next repack
        self._cache = RowCache()
        self._worker: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()  # who waits for chunks

    @property
    def busy(self) -> bool:
        return bool(self._waiting) or any(row.finish is None for row in self._rows)

    def sync(self, student: nn.Module, version: int) -> None:
        """See `opd.students.sampler.Sampler.sync`. The cache is empty between batches, so nothing stale survives."""
        assert not self.busy, "sync while turns are being decoded"
        self.version, self._released = version, False
        self._kept.clear()
        if not self.shared:
            with torch.no_grad():
                for mine, theirs in zip(self.model.parameters(), student.parameters(), strict=True):
                    mine.untyped_storage().resize_(mine.nbytes)
                    mine.copy_(theirs.full_tensor() if isinstance(theirs, DTensor) else theirs)

    def release(self) -> None:
        """See `opd.students.sampler.Sampler.release`. Weights that are the student's own stay."""
        assert not self.busy, "release while turns are being decoded"
        self._released = True
        self._kept.clear()
        if not self.shared:
            for parameter in self.model.parameters():
                parameter.untyped_storage().resize_(0)

    def close(self) -> None:
        """There is nothing to end."""

    async def generate(self, request: SampleRequest) -> AsyncIterator[Chunk]:
        """See `opd.students.sampler.Sampler.generate`."""
        assert not self._released, "nothing is sampled between release and sync"
        assert len(request.context_ids), "an empty context has nothing to condition on"
        row = _Row(request, before=self._kept.take(request.context_ids) if request.episode else None)
        self._waiting.append(row)
        if self._worker is None or self._worker.done():
            self._changed = asyncio.Event()  # of this loop
            self._worker = asyncio.create_task(self._work())
        try:
            while True:
                row.awaited = True
                self._changed.set()
                chunk = await row.chunks.get()
                row.awaited = False
                if isinstance(chunk, Exception):
                    raise chunk
                yield chunk
                if chunk.finish is not None:
                    return
        finally:
            row.finish = row.finish or "stopped"
            self._changed.set()

    async def _work(self) -> None:
        await asyncio.sleep(0)  # turns requested in the same turn of the loop start together
        try:
            while self.busy:
                with self.clock("sample"), torch.no_grad(), _evaluating(self.model), self._within():
                    for _ in range(self.chunk_tokens):
                        began = self._admit()
                        if not self._rows:
                            break
                        if not began:
                            self._decode()
                    self._report(self._rows)
                await asyncio.sleep(0)
                await self._all_awaited()
        except Exception as error:
            for row in (*self._rows, *self._waiting):
                row.finish = "stopped"
                row.chunks.put_nowait(error)
            self._waiting.clear()
        finally:
            self._rows, self._cache = [], RowCache()

    async def _all_awaited(self) -> None:
        """Waits until someone waits for the next chunk of every row: who is shown the last one may be about to stop it."""
        while any(row.finish is None and not (row.awaited and row.chunks.empty()) for row in self._rows):
            self._changed.clear()
            await self._changed.wait()

    def _admit(self) -> bool:
        """Drops finished rows and prefills waiting ones where it pays; makes room for the next token.

        Whether every row has just drawn its first token, so that rows that begin together report after whole chunks.
        """
        live = [i for i, row in enumerate(self._rows) if row.finish is None]
        while self._waiting and self._waiting[0].finish is not None:
            self._waiting.popleft()  # stopped before it began
        free = self.max_rows - len(live)
        wanted = self._same_sampling(self._rows[live[0]].request if live else None, free)
        alike = sum(row.goes_on == wanted[0].goes_on for row in self._waiting) if wanted else 0
        refill = wanted and (not live or len(wanted) >= min(alike, self.max_rows // REFILL_SHARE) or _fills_prefill(wanted))
        if refill or (self._rows and (4 * len(live) <= 3 * len(self._rows) or not self._cache.room)):
            self._report([row for row in self._rows if row.finish is not None])
            kept = [self._rows[i] for i in live]
            # the newest sampled token of a kept row is not in the cache yet
            width = max(
                [row.length - 1 for row in kept] + [len(row.request.context_ids) for row in wanted if refill], default=0
            )
            if refill:
                prompts, logits = self._prefill(wanted)
                self._cache.repack(torch.tensor(live, dtype=torch.long), width, prompts, [row.length for row in wanted])
                self._rows = kept + wanted
                # only now: if the prefill fails, they must hear of it
                self._waiting = deque(row for row in self._waiting if row not in wanted)
                self._append(wanted, logits)
                return not kept
            elif kept:
                self._cache.repack(torch.tensor(live, dtype=torch.long), width)
                self._rows = kept
            else:
                self._rows, self._cache = [], RowCache()
        return False

    def _same_sampling(self, running: SampleRequest | None, free: int) -> list[_Row]:
        """The next waiting rows that can join: as many as fit, all with the sampling of those running.

        Contexts of which the beginning is known join apart from whole ones, beside which they would be mostly padding.
        """
        wanted: list[_Row] = []
        tokens = 0
        for row in self._waiting:
            if wanted and row.goes_on != wanted[0].goes_on:
                continue
            first = running or (wanted[0].request if wanted else row.request)
            longest = max([tokens, row.num_fed])
            fits = len(wanted) < free and (not wanted or longest * (len(wanted) + 1) <= PREFILL_TOKENS)
            if not fits or row.finish is not None or row.request.sampling != first.sampling:
                break
            wanted.append(row)
            tokens = longest
        return wanted

    def _prefill(self, rows: Sequence[_Row]) -> tuple[Cache, Tensor]:
        """(cache with left-aligned rows, logits [R, V] after each context). Right padding alone needs no mask."""
        fed = [row.request.context_ids[-row.num_fed :] for row in rows]
        ids = np.zeros((len(fed), max(map(len, fed))), np.int64)
        for target, new in zip(ids, fed):
            target[: len(new)] = new
        going_on = [following_row(row.request.context_ids, row.before) for row in rows if row.before is not None]
        cache = PassCache(going_on) if going_on else DynamicCache()
        masks = cache.inputs(decoder(self.model).dtype, self._device) if isinstance(cache, PassCache) else {}  # type: ignore[arg-type]
        hidden = self._forward(torch.from_numpy(ids), cache, **masks)
        last = torch.tensor([len(new) - 1 for new in fed], device=hidden.device)
        logits = self._logits(hidden[torch.arange(len(fed), device=hidden.device), last])
        for row in rows:
            row.before = None  # the batch's cache holds it now
        return left_aligned(going_on) if going_on else cache, logits

    def _decode(self) -> None:
        """Feeds back each row's newest token and draws the next one."""
        device = self._device
        newest = torch.tensor([[row.ids[-1]] for row in self._rows])
        lengths = torch.tensor([row.length for row in self._rows])
        width = self._cache.layers[0].end + 1
        mask = None
        if int(lengths.min()) < width:
            outside = (torch.arange(width) < width - lengths[:, None])[:, None, None, :]
            dtype = next(decoder(self.model).parameters()).dtype
            # added to the scores, which every kind of attention understands: `eager` would add a boolean one as well
            mask = torch.zeros(outside.shape, dtype=dtype).masked_fill_(outside, torch.finfo(dtype).min).to(device)
        # finished rows go on until the next repack: keep them from running out of the model's positions
        longest = max((row.length for row in self._rows if row.finish is None), default=1)
        positions = (lengths.clamp(max=longest) - 1)[:, None].to(device)
        hidden = self._forward(newest, self._cache, attention_mask=mask, position_ids=positions)
        self._append(self._rows, self._logits(hidden[:, -1]))

    def _forward(self, ids: Tensor, cache: Cache, **inputs: Tensor | None) -> Tensor:
        body = decoder(self.model)
        device = next(body.parameters()).device
        return last_states(body(input_ids=ids.to(device), use_cache=True, **{self.cache_name: cache}, **inputs))

    @property
    def _device(self) -> torch.device:
        return next(self.model.parameters()).device

    def _logits(self, hidden: Tensor) -> Tensor:
        return output_head(self.model).logits(hidden, self.vocab)

    def _append(self, rows: Sequence[_Row], logits: Tensor) -> None:
        """Draws one token for each of `rows` [B] from `logits` [B, V]. Finished rows draw too; nobody reads theirs."""
        sampling = rows[0].request.sampling
        seeds = np.array([row.request.seed for row in rows], np.int64)
        noise = uniform(seeds, np.array([row.request.first + len(row.ids) for row in rows]))
        if sampling.presence_penalty:
            logits = logits - sampling.presence_penalty * self._held(rows, logits)
        ids, logps = draw(logits, torch.from_numpy(noise).to(logits.device), sampling)
        topk = student_topk(logits, sampling) if sampling.num_topk else None
        topk_ids, topk_logps = (part.cpu() for part in topk) if topk else (None, None)
        ended = torch.isin(ids.cpu(), self.eos_ids).tolist()
        for i, (row, token, logp) in enumerate(zip(rows, ids.tolist(), logps.tolist())):
            row.ids.append(token)
            if row.finish is not None:
                continue
            row.logps.append(logp)
            if topk_ids is not None and topk_logps is not None:
                row.topk_ids.append(topk_ids[i])
                row.topk_logps.append(topk_logps[i])
            if ended[i]:
                row.finish = "eos"
            elif len(row.logps) >= row.request.max_new_tokens:
                row.finish = "length"

    def _held(self, rows: Sequence[_Row], logits: Tensor) -> Tensor:
        """[B, V] whether a row has sampled the token: what the presence penalty counts, as in vLLM without the prompt."""
        for row in rows:
            if row.held is None:
                row.held = torch.zeros(logits.shape[1], dtype=torch.bool, device=logits.device)
            if row.ids:
                row.held[row.ids[-1]] = True
        return torch.stack([row.held for row in rows if row.held is not None])

    def _keep(self, place: int, row: _Row) -> None:
        """Keeps the keys and values of a turn that ended, for the next one. Its last token was never fed."""
        length = len(row.request.context_ids) + len(row.logps) - 1
        layers = []
        for layer in self._cache.layers:
            start = layer.end - (row.length - 1)  # finished rows go on until the next repack
            layers.append(tuple(part[place, :, start : start + length].clone() for part in layer.buffers))
        ids = np.concatenate([row.request.context_ids, row.ids[: len(row.logps) - 1]]).astype(np.int32)
        self._kept.put(ids, layers)
        row.kept = True

    def _report(self, rows: Sequence[_Row]) -> None:
        """Hands the new tokens of these rows to whoever waits for them."""
        for place, row in enumerate(self._rows):
            if row not in rows:
                continue
            if row.request.episode and row.finish == "eos" and not row.kept and self._kept.max_bytes:
                self._keep(place, row)
            new = slice(row.reported, len(row.logps))
            if new.start == new.stop:
                continue
            row.reported = new.stop
            topk = (torch.stack(row.topk_ids[new]), torch.stack(row.topk_logps[new])) if row.topk_ids else None
            row.chunks.put_nowait(
                Chunk(
                    sampled_ids=np.array(row.ids[new], np.int32),
                    sampler_logps=np.array(row.logps[new], np.float32),
                    finish=row.finish,
                    version=self.version,
                    topk_ids=topk[0].numpy().astype(np.int32) if topk else None,
                    topk_logps=topk[1].numpy() if topk else None,
                )
            )


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Nothing is dropped out within. For a chunk at a time: others may decode with the same module in between."""
    training = model.training
    model.train(False)
    try:
        yield
    finally:
        model.train(training)


def _fills_prefill(rows: Sequence[_Row]) -> bool:
    """Whether one more such prompt would not fit into the same forward pass."""
    return max(row.num_fed for row in rows) * (len(rows) + 1) > PREFILL_TOKENS


def _copied(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A copy with parameters of this type. Buffers keep theirs: rotary frequencies in bfloat16 drift with the position."""
    cast = {id(one): nn.Parameter(one.detach().to(dtype, copy=True), requires_grad=False) for one in model.parameters()}
    return copy.deepcopy(model, cast)  # which takes these for copies: there are never two in the model's own type


def _refuse_other_masks(model: nn.Module) -> None:
    kind = model.config.get_text_config()._attn_implementation  # type: ignore[union-attr,operator]
    if kind not in {"sdpa", "eager"}:
        raise UserError(f"student.attention: the Hugging Face sampler needs sdpa or eager, not {kind}")


def _refuse_partial_attention(model: nn.Module) -> None:
    config = model.config.get_text_config()  # type: ignore[union-attr,operator]
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = getattr(config, "sliding_window", None) if "layer_types" not in config.to_dict() else None
    if kinds != {"full_attention"} or window:
        what = ", ".join(sorted(kinds - {"full_attention"})) or "a sliding window"
        raise UserError(
            f"student.model: the Hugging Face sampler needs full attention in every layer; this model has {what}"
        )
