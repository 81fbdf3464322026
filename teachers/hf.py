"""A frozen Hugging Face model in this process that scores rollouts in batches.

Requests are gathered until a token budget is full, or until nothing else is going on, and answered together. Logits exist
for one chunk of rows at a time. Shape legend: n tokens of a request, c rows of a chunk, V ids in use, K ids a row.
"""

import asyncio
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from opd.clock import Clock
from opd.errors import UserError
from opd.kernels.gather import gather_logprob
from opd.models import decoder, load_causal_lm, output_head
from opd.records import ScoreRequest, Scores
from opd.teachers.config import TeacherConfig


class HFTeacher:
    """See the module. `busy` tells whether more requests may be on their way, so that waiting makes fuller batches."""

    def __init__(
        self,
        name: str,
        config: TeacherConfig,
        vocab: int,
        device: torch.device,
        chunk_bytes: int,
        busy: Callable[[], bool] = lambda: False,
        clock: Clock | None = None,
    ) -> None:
        self.name, self.config, self.vocab, self.busy, self.clock = name, config, vocab, busy, clock or Clock()
        model = load_causal_lm(
            config.model,
            f"teachers.{name}.model",
            revision=config.revision,
            dtype=config.dtype,
            attention=config.attention,
            quantization=config.quantization,
        )
        self.model = model.requires_grad_(False)
        if not config.quantization:
            self.model = self.model.to(device)  # type: ignore[arg-type]
        self.head = output_head(self.model)
        rows = self.head.weight.shape[0]
        if rows < vocab:
            raise UserError(f"teachers.{name}.model: its output head has {rows} rows for the {vocab} ids of the student")
        self.device, self.chunk_bytes = device, chunk_bytes
        self.num_floored = 0
        self._waiting: list[tuple[ScoreRequest, asyncio.Future[Scores]]] = []
        self._worker: asyncio.Task[None] | None = None

    async def score(self, request: ScoreRequest) -> Scores:
        """The answer to one request, computed together with those of others."""
        assert len(request.context_ids), "an empty context has nothing to condition on"
        future: asyncio.Future[Scores] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, future))
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work())
        return await future

    async def _work(self) -> None:
        await asyncio.sleep(0)  # requests made in the same turn of the loop come together
        while self._waiting:
            while self.busy() and sum(_length(request) for request, _ in self._waiting) < self.config.max_batch_tokens:
                await asyncio.sleep(0)
            waiting, self._waiting = self._waiting, []
            try:
                with self.clock("score"):
                    answers = self.score_batch([request for request, _ in waiting])
            except Exception as error:
                for _, future in waiting:
                    if not future.done():  # whoever asked may have been cancelled
                        future.set_exception(error)
                return
            for (_, future), scores in zip(waiting, answers):
                if not future.done():
                    future.set_result(scores)
            await asyncio.sleep(0)

    @torch.no_grad()
    def score_batch(self, requests: Sequence[ScoreRequest]) -> list[Scores]:
        """Answers in the order of the requests; forward passes of similar lengths within the token budget."""
        order = sorted(range(len(requests)), key=lambda i: _length(requests[i]), reverse=True)
        answers: dict[int, Scores] = {}
        while order:
            longest = max(1, _length(requests[order[0]]))
            count = max(1, self.config.max_batch_tokens // longest)
            batch, order = order[:count], order[count:]
            for i, states in zip(batch, self._hidden([requests[i] for i in batch])):
                answers[i] = self._answer(requests[i], states)
        return [answers[i] for i in range(len(requests))]

    def _hidden(self, requests: Sequence[ScoreRequest]) -> list[Tensor]:
        """The states [n, H] that predict each request's tokens. Right padding under causal attention needs no mask."""
        width = max(1, max(_length(request) for request in requests))
        ids = np.zeros((len(requests), width), np.int64)
        for row, request in zip(ids, requests):
            row[: _length(request)] = np.concatenate([request.context_ids, request.token_ids])
        body = decoder(self.model)
        assert not self.model.training
        states = body(input_ids=torch.from_numpy(ids).to(self.device), use_cache=False).last_hidden_state
        starts = [len(request.context_ids) - 1 for request in requests]
        return [states[b, s : s + len(r.token_ids)].clone() for b, (s, r) in enumerate(zip(starts, requests))]

    def _answer(self, request: ScoreRequest, states: Tensor) -> Scores:
        if request.hidden:
            return Scores(hidden=states, head=self.name)
        n, scale = len(request.token_ids), self.head.scale / request.temperature
        asked = np.zeros((n, 0), np.int32) if request.ids is None else request.ids
        size = max(1, self.chunk_bytes // (self.vocab * states.element_size()))
        parts = [self._read(states[a : a + size], request, slice(a, a + size), asked, scale) for a in range(0, n, size)]
        logps, ids, topk_logps, tail = (
            torch.cat(column).cpu().numpy()
            for column in zip(*(parts or [self._read(states, request, slice(0), asked, scale)]))
        )
        if not ids.shape[1]:
            return Scores(logps=logps)
        return Scores(logps=logps, topk_ids=ids.astype(np.int32), topk_logps=topk_logps, tail=tail)

    def _read(
        self, states: Tensor, request: ScoreRequest, rows: slice, asked: np.ndarray, scale: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(log-prob [c], ids [c, K], their log-probs [c, K], tail mass [c]) of one chunk of rows."""
        logits = self.head.logits(states, self.vocab)
        sampled = torch.from_numpy(request.token_ids[rows].astype(np.int64)).to(self.device)
        ids = torch.from_numpy(asked[rows].astype(np.int64)).to(self.device)
        if request.k:
            ids = torch.cat([ids, logits.topk(min(request.k, self.vocab), dim=-1).indices], dim=1)
        logp = gather_logprob(logits, torch.cat([sampled[:, None], ids], dim=1), scale).logp
        ids = mark_repeats(ids)
        present = ids >= 0
        tail = 1 - (logp[:, 1:].exp() * present).sum(-1)
        floored = logp.clamp(min=self.config.logp_floor)
        self.num_floored += int((floored != logp)[:, 0].sum()) + int(((floored != logp)[:, 1:] & present).sum())
        return floored[:, 0], ids, floored[:, 1:].masked_fill(~present, 0.0), tail.clamp(min=0.0)


def mark_repeats(ids: Tensor) -> Tensor:
    """`ids` [c, K] with every second and later mention of an id in a row replaced by -1."""
    order = ids.sort(dim=-1, stable=True)
    repeated = torch.zeros_like(ids, dtype=torch.bool)
    repeated[:, 1:] = order.values[:, 1:] == order.values[:, :-1]
    return ids.masked_fill(torch.zeros_like(repeated).scatter_(-1, order.indices, repeated), -1)


def _length(request: ScoreRequest) -> int:
    return len(request.context_ids) + len(request.token_ids)
