"""Frozen models whose scores and alignment a test gives, behind the protocol that term makers use."""

from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from opd.records import Array, Prompt, Rollout, ScoreRequest, Scores, SpanMap, Turn

Unit = tuple[int, int, bool]  # student tokens, teacher tokens, aligned


def spans_of(units: Sequence[Unit]) -> SpanMap:
    sizes = np.array([unit[:2] for unit in units], np.int32).reshape(-1, 2)
    ends = sizes.cumsum(0, dtype=np.int32)
    aligned = np.array([unit[2] for unit in units], bool)
    tokens = 100 + np.arange(sizes[:, 1].sum(), dtype=np.int32)
    return SpanMap(np.array([7, 7], np.int32), tokens, ends[:, 0], ends[:, 1], np.ones(len(units), np.int32), aligned)


class Given:
    """`units` of each model, as lists a turn; a model without units reads the student's tokens. `logps` a turn as well."""

    def __init__(
        self,
        logps: Mapping[str, Sequence[Sequence[float]]],
        units: Mapping[str, Sequence[Sequence[Unit]]] | None = None,
        counterparts: Array | None = None,
        whole: Array | None = None,
    ) -> None:
        """`whole` [V] are log-probs of all of the model's tokens, the same at every place, for requests about ids."""
        self.logps, self.units, self.counterparts, self.whole = logps, units or {}, counterparts, whole
        self.turns: list[Turn] = []
        self.requests: list[tuple[str, ScoreRequest]] = []

    def teacher_for(self, prompt: Prompt) -> str:
        return prompt.domain

    def number(self, turn: Turn) -> int:
        if not any(turn is known for known in self.turns):
            self.turns.append(turn)
        return next(i for i, known in enumerate(self.turns) if known is turn)

    def align(self, model: str, rollout: Rollout, turn: Turn) -> SpanMap | None:
        number = self.number(turn)
        return spans_of(self.units[model][number]) if model in self.units else None

    def same_bytes(self, model: str) -> Array | None:
        return self.counterparts

    async def score(self, model: str, request: ScoreRequest) -> Scores:
        self.requests.append((model, request))
        logps = next(np.array(one, np.float32) for one in self.logps[model] if len(one) == len(request.token_ids))
        if request.ids is None or self.whole is None:
            return Scores(logps)
        best = np.argsort(-self.whole, kind="stable")[: request.k]
        ids = np.concatenate([request.ids, np.broadcast_to(best, (len(logps), request.k))], axis=1).astype(np.int32)
        for row in ids:  # of a repeated id the first is answered
            seen: set[int] = set()
            for column, token in enumerate(row.tolist()):
                row[column] = -1 if token in seen else token
                seen.add(token)
        found = np.where(ids >= 0, self.whole[ids.clip(min=0)], 0.0).astype(np.float32)
        return Scores(logps, ids, found, 1 - (np.exp(found) * (ids >= 0)).sum(1))


@pytest.fixture(scope="session")
def given_models():
    """The class of such models."""
    return Given
