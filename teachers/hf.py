"""A frozen Hugging Face model in this process that scores rollouts in batches.

Requests are gathered until a token budget is full, or until nothing else is going on, and answered together. Logits exist
for one chunk of rows at a time. Shape legend: n tokens of a request, H hidden size, K ids a row.
"""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from opd.clock import Clock
from opd.errors import UserError
from opd.models import cache_argument, decoder, last_states, load_causal_lm, output_head
from opd.records import Array, ScoreRequest, Scores
from opd.teachers.adapters import Adapters, Beneath
from opd.teachers.experts import Experts
from opd.teachers.kv_streams import PassCache, Row, Streams, agrees, can_cache, open_row
from opd.teachers.planning import plan
from opd.teachers.scoring import read_states
from opd.teachers.stream import StreamLost

SETTLE_TURNS = 8  # of the event loop without a new request: from a rollout's end to its request it takes a few
MAX_ROUNDS = 16  # of chunks, after which the others have their turn
MAX_STREAM_BYTES = 2 * 2**30
MAX_ENTRIES = 2**24  # log-probs of an answer to several requests at once; a single one may have more


@dataclass(frozen=True)
class View:
    """As what a model is asked.

    Example: `View(vocab=151665, adapter="maths")`
    """

    vocab: int  # ids in use: rows of the head beyond are padding
    logp_floor: float = -30.0  # log-probs below are raised to it, and counted
    adapter: str | None = None  # which LoRA adapter is on; None is the base
    active_experts: int | None = None  # experts a token is routed to; None is the model's own number

    @property
    def variant(self) -> tuple[str | None, int | None]:
        """Equal for views that share forward passes and keys: they ask the same function of the tokens."""
        return self.adapter, self.active_experts


Asked = tuple[ScoreRequest, View]


class HFModel:
    """See the module. `busy` tells whether more requests may be on their way, so that waiting makes fuller batches.

    Everything of it belongs to one thread.
    """

    def __init__(
        self,
        field: str,
        model: str,
        *,
        revision: str | None = None,
        dtype: str = "auto",
        attention: str = "sdpa",
        quantization: dict[str, Any] | None = None,
        adapters: Mapping[str, str] | None = None,
        adapter_field: str = "teachers.{}.adapter",
        adapted: nn.Module | None = None,
        device: torch.device,
        chunk_bytes: int,
        max_batch_tokens: int = 16384,
        max_stream_bytes: int = MAX_STREAM_BYTES,
        busy: Callable[[], bool] = lambda: False,
        clock: Clock | None = None,
    ) -> None:
        """Loads `model`, and over it the adapters in the folders `adapters`, by name; or takes what is beneath the adapters
        of `adapted`, a student that learns, in its own weights: `dtype` is then that of the passes.

        Raises `UserError` naming `field`, or `adapter_field` with the adapter's name for `{}`.
        """
        self.field, self.device = field, device
        self.chunk_bytes, self.max_batch_tokens = chunk_bytes, max_batch_tokens
        self.busy, self.clock = busy, clock or Clock()
        base: Any = adapted
        if adapted is None:
            base = load_causal_lm(
                model, field, revision=revision, dtype=dtype, attention=attention, quantization=quantization
            )
            base.requires_grad_(False)
            base = base if quantization else base.to(device)
        self.head = output_head(base)
        self.autocast = adapted is not None and dtype == "bfloat16"  # as the student's own forward has it
        if self.autocast:
            self.head = self.head.to(torch.bfloat16)
        self.num_batches = 0
        self.base_state: dict[str, Tensor] = base.state_dict()  # under the names they have without adapters
        self.experts = Experts(decoder(base))
        self._adapters = Beneath(base) if adapted is not None else Adapters(base, adapters or {}, adapter_field, device)
        self.streams, self.max_stream_bytes = Streams(max_stream_bytes), max_stream_bytes
        self.cached_streams = can_cache(decoder(self.model))  # else a stream's ids are kept, and scored again as a whole
        self.cached_streams = self.cached_streams and agrees(self._states, self.dtype)
        self.num_batches = self.num_tokens = 0  # forward passes and tokens of requests: `agrees` was none
        self._waiting: list[_Waiting] = []
        self._worker: asyncio.Task[None] | None = None

    @property
    def model(self) -> Any:
        """The frozen module. Adapters, if there are any, are in place and off."""
        return self._adapters.model

    def frozen(self) -> AbstractContextManager[None]:
        """Within, `model` is the frozen one, whatever it is to others."""
        return self._adapters.on(None)

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names for `View.adapter`."""
        return self._adapters.names

    def adapter_state(self, name: str) -> dict[str, Tensor]:
        """All that an adapter's effect depends on: its weights by name, and the factor of each of its layers."""
        return self._adapters.state(name)

    def close_stream(self, name: str) -> None:
        """Forgets the stream, if it is held."""
        self.streams.drop(name)

    async def score(self, request: ScoreRequest, view: View) -> Scores:
        """The answer to one request, computed together with those of others; `Scores.head` is left to the caller.

        Raises `StreamLost` when the request keeps tokens of a stream that is not held.
        """
        assert request.keep_tokens + len(request.context_ids), "an empty context has nothing to condition on"
        assert request.stream is not None or not request.keep_tokens
        waiting = _Waiting(request, view, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work())
        return await waiting.answer

    async def _work(self) -> None:
        await asyncio.sleep(0)  # requests made in the same turn of the loop come together
        rounds = 0
        while self._waiting:
            await self._answer_all(self._take(chunks=True))
            rounds = 0 if self.busy() else rounds + 1
            if rounds > MAX_ROUNDS or await self._gathered():
                await self._answer_all(self._take(chunks=False))
                rounds = 0

    async def _gathered(self) -> bool:
        """Waits until the requests about whole rollouts fill a batch or no more are to be expected.

        False where chunks came meanwhile: they do not wait, since someone may want to stop their rollouts, and have passes
        of their own, so that the others are batched as they would be without them.
        """
        quiet_turns = 0
        while quiet_turns < SETTLE_TURNS:
            wholes = [one.request.num_tokens for one in self._waiting if one.request.stream is None]
            if sum(wholes) >= self.max_batch_tokens:
                return True
            if len(wholes) < len(self._waiting):
                return False
            await asyncio.sleep(0)  # a turn of the loop, not a time: batches must not depend on the clock
            quiet_turns = 0 if self.busy() or len(self._waiting) > len(wholes) else quiet_turns + 1
        return True

    def _take(self, chunks: bool) -> list["_Waiting"]:
        """The waiting requests that are about chunks of unfinished rollouts, or those that are not."""
        taken = [one for one in self._waiting if (one.request.stream is not None) == chunks]
        self._waiting = [one for one in self._waiting if (one.request.stream is not None) != chunks]
        return taken

    async def _answer_all(self, waiting: Sequence["_Waiting"]) -> None:
        for batch in self._plan([(one.request, one.view) for one in waiting]):
            # whoever asked may have been cancelled
            if live := [waiting[i] for i in batch if not waiting[i].answer.done()]:
                self._settle(live)
                await asyncio.sleep(0)  # whoever was answered goes on before the next pass

    def _settle(self, waiting: Sequence["_Waiting"]) -> None:
        """Answers these in one forward pass, or tells all of them what went wrong."""
        try:
            with self.clock("score"):
                answers: Sequence[Scores | Exception] = self._pass([(one.request, one.view) for one in waiting])
        except Exception as error:
            answers = [error] * len(waiting)
        for one, answer in zip(waiting, answers):
            if isinstance(answer, Exception):
                one.answer.set_exception(answer)
            else:
                one.answer.set_result(answer)

    def score_batch(self, asked: Sequence[Asked]) -> list[Scores | StreamLost]:
        """Answers in the order of the requests."""
        answers: dict[int, Scores | StreamLost] = {}
        for batch in self._plan(asked):
            answers |= zip(batch, self._pass([asked[i] for i in batch]))
        return [answers[i] for i in range(len(asked))]

    def _plan(self, asked: Sequence[Asked]) -> list[list[int]]:
        requests, variants = [request for request, _ in asked], [view.variant for _, view in asked]
        return plan(requests, variants, self.max_batch_tokens, self.cached_streams)

    @torch.no_grad()
    def _pass(self, asked: Sequence[Asked]) -> list[Scores | StreamLost]:
        """Answers to requests of one variant of the model, no two of the same stream."""
        rows = [open_row(self.streams, request, view.variant, self.cached_streams) for request, view in asked]
        found = [row for row in rows if row is not None]
        states = self._states(found, asked[0][1]) if found else []
        for (request, _), row in zip(asked, rows):
            if request.stream is not None and row is not None and row.stream is not None:
                row.stream.ids = row.ids
                self.streams.put(request.stream, row.stream)
        self.streams.evict()
        answers = iter(self._answers([one for one, row in zip(asked, rows) if row is not None], states))
        return [
            next(answers)
            if row is not None
            else StreamLost(f"stream {request.stream}: {request.keep_tokens} tokens of it are not held")
            for (request, _), row in zip(asked, rows)
        ]

    @torch.no_grad()
    def _states(self, rows: Sequence[Row], view: View | None = None) -> list[Tensor]:
        """The states [n, H] that predict each row's tokens, in one forward pass; without a view those of the base.

        Right padding under causal attention needs no mask where nothing is cached.
        """
        ids = np.zeros((len(rows), max(len(row.fed) for row in rows)), np.int64)
        for target, row in zip(ids, rows):
            target[: len(row.fed)] = row.fed
        body = decoder(self.model)
        inputs: dict[str, Any] = {"use_cache": False}
        if any(row.stream is not None for row in rows) and self.cached_streams:
            cache = PassCache(rows)
            inputs = {"use_cache": True, cache_argument(body): cache, **cache.inputs(self.dtype, self.device)}
        adapter, active_experts = (None, None) if view is None else view.variant
        autocast = torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast)
        with self._adapters.on(adapter), self.experts.on(active_experts), autocast:
            assert not body.training
            states = last_states(body(input_ids=torch.from_numpy(ids).to(self.device), **inputs))
        self.num_batches += 1
        ends = [(len(row.fed) - 1, row.num_scored) for row in rows]
        return [states[b, end - n : end] for b, (end, n) in enumerate(ends)]

    @property
    def dtype(self) -> torch.dtype:
        """Of the activations."""
        return decoder(self.model).dtype  # type: ignore[return-value]

    def _answers(self, asked: Sequence[Asked], states: Sequence[Tensor]) -> list[Scores]:
        """What each request wants, read off its states [n, H]. Those that want the same go through the head together."""
        answers = {i: Scores(hidden=states[i].clone()) for i, (request, _) in enumerate(asked) if request.hidden}
        alike: defaultdict[tuple[float, ...], list[int]] = defaultdict(list)
        sizes: Counter[tuple[float, ...]] = Counter()
        for i, (request, view) in enumerate(asked):
            self.num_tokens += len(request.token_ids)
            if not request.hidden or request.logps_too:
                given = 0 if request.ids is None else request.ids.shape[1]
                wanted = view.vocab, view.logp_floor, request.temperature, request.k, given
                sizes[wanted] += len(request.token_ids) * (1 + given + min(request.k, view.vocab))
                alike[*wanted, sizes[wanted] // MAX_ENTRIES].append(i)
        for group in alike.values():
            for i, read in zip(group, self._read([asked[i] for i in group], [states[i] for i in group])):
                answers[i] = replace(read, hidden=answers[i].hidden) if i in answers else read
        return [answers[i] for i in range(len(asked))]

    def _read(self, asked: Sequence[Asked], states: Sequence[Tensor]) -> Iterator[Scores]:
        """Log-probs for requests that differ in their tokens and ids alone."""
        request, view = asked[0]
        lengths = [len(one.token_ids) for one, _ in asked]
        given = [np.zeros((n, 0), np.int32) if one.ids is None else one.ids for (one, _), n in zip(asked, lengths)]
        reading = read_states(
            torch.cat(list(states)),
            self.head,
            self._ids(np.concatenate([one.token_ids for one, _ in asked])),
            self._ids(np.concatenate(given)),
            k=request.k,
            vocab=view.vocab,
            temperature=request.temperature,
            logp_floor=view.logp_floor,
            chunk_bytes=self.chunk_bytes,
        )
        arrays = [part.cpu().numpy() for part in reading]
        for logps, ids, topk_logps, tail, floored in zip(*(np.split(array, np.cumsum(lengths)[:-1]) for array in arrays)):
            num_floored = int(floored.sum())
            if ids.shape[1]:
                yield Scores(logps, ids.astype(np.int32), topk_logps, tail, num_floored=num_floored)
            else:
                yield Scores(logps, num_floored=num_floored)

    def _ids(self, ids: Array) -> Tensor:
        return torch.from_numpy(ids.astype(np.int64)).to(self.device)


@dataclass(eq=False)
class _Waiting:
    request: ScoreRequest
    view: View
    answer: "asyncio.Future[Scores]"


class HFTeacher:
    """A teacher in this process: one view of a model. Several teachers may share one model."""

    digest = None  # the recipe names its weights

    def __init__(self, name: str, model: HFModel, view: View) -> None:
        """Raises `UserError` for a model with fewer ids than the view, or one that cannot have so many active experts."""
        rows = model.head.num_rows
        if rows < view.vocab:
            raise UserError(f"{model.field}: its output head has {rows} rows for the {view.vocab} ids of the student")
        assert view.adapter is None or view.adapter in model.adapters
        if view.active_experts is not None:
            model.experts.check(view.active_experts, f"teachers.{name}.active_experts")
        self.name, self.model, self.view = name, model, view
        self.head, self.head_id = model.head, name

    async def score(self, request: ScoreRequest) -> Scores:
        """See `HFModel.score`."""
        scores = await self.model.score(request, self.view)
        return replace(scores, head=self.head_id) if request.hidden else scores

    def close_stream(self, name: str) -> None:
        """See `HFModel.close_stream`."""
        self.model.close_stream(name)

    async def close(self) -> None:
        """Nothing to give up."""
