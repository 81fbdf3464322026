"""A rollout that is scored while it grows: each chunk costs its own tokens, whatever came before stays in a KV cache."""

import uuid
import zlib
from typing import Protocol

import numpy as np

from opd.records import Array, ScoreRequest, Scores


class StreamLost(Exception):
    """The model does not hold the stream, or less of it than was to be kept: evicted, or another process. Send it whole."""


def ids_crc(ids: Array) -> int:
    """CRC-32 of token ids [t] as little-endian int32."""
    return zlib.crc32(np.ascontiguousarray(ids, "<i4").tobytes())


class Scoring(Protocol):
    """A teacher that keeps streams."""

    async def score(self, request: ScoreRequest) -> Scores: ...

    def close_stream(self, name: str) -> None: ...


class ScoreStream:
    """One unfinished sequence at one teacher. Appends are made one after another."""

    def __init__(
        self, teacher: Scoring, context_ids: Array, *, k: int = 0, hidden: bool = False, temperature: float = 1.0
    ) -> None:
        assert len(context_ids), "an empty context has nothing to condition on"
        self.teacher, self.k, self.hidden, self.temperature = teacher, k, hidden, temperature
        self.name = uuid.uuid4().hex
        self.sequence = np.asarray(context_ids, np.int32)
        self._held = 0  # tokens the teacher has seen; its own business after it lost them

    async def append(self, keep_tokens: int, ids: Array, asked: Array | None = None) -> Scores:
        """Scores of `ids` [n] after the first `keep_tokens` tokens of the sequence, context included; it drops later ones.

        `asked` [n, m] are further ids whose log-probs are wanted. A stream that the teacher lost is sent again as a whole.
        """
        assert 1 <= keep_tokens <= len(self.sequence)
        kept = self.sequence[:keep_tokens]
        held = self._held = min(self._held, keep_tokens)  # should this fail, later tokens may have been replaced
        try:
            scores = await self._ask(kept, held, ids, asked)
        except StreamLost:
            scores = await self._ask(kept, 0, ids, asked)
        self.sequence = np.concatenate([kept, np.asarray(ids, np.int32)])
        self._held = len(self.sequence)
        return scores

    def close(self) -> None:
        """Lets the teacher forget the sequence; without this it does so when it needs the room."""
        self.teacher.close_stream(self.name)

    async def _ask(self, kept: Array, held: int, ids: Array, asked: Array | None) -> Scores:
        request = ScoreRequest(
            context_ids=kept[held:],
            token_ids=np.asarray(ids, np.int32),
            k=self.k,
            ids=asked,
            hidden=self.hidden,
            temperature=self.temperature,
            stream=self.name,
            keep_tokens=held,
            keep_crc=ids_crc(kept[:held]) if held else None,
        )
        return await self.teacher.score(request)
