"""A teacher's view of a rollout that still grows, token by token of the student."""

import numpy as np
from opd.alignment.aligner import Aligner

from opd.records import Array
from opd.teachers.stream import ScoreStream


class OwnScoring:
    """By a teacher that reads the student's own tokens."""

    def __init__(self, stream: ScoreStream) -> None:
        self.stream, self.num_context = stream, len(stream.sequence)
        self._logps = np.zeros(0, np.float32)

    async def logps(self, sampled_ids: Array) -> Array:
        """[n] float32: the teacher's log-probs of the tokens sampled so far [n], which only grow."""
        known = len(self._logps)
        if known < len(sampled_ids):
            scores = await self.stream.append(self.num_context + known, sampled_ids[known:])
            assert scores.logps is not None
            self._logps = np.concatenate([self._logps, scores.logps])
        return self._logps[: len(sampled_ids)]

    def close(self) -> None:
        """Lets the teacher forget the rollout."""
        self.stream.close()


class AlignedScoring:
    """By a teacher with another tokenizer. More text may change its last tokens: these are then dropped and sent anew."""

    def __init__(self, stream: ScoreStream, aligner: Aligner, context_ids: Array) -> None:
        self.stream, self.aligner, self.context_ids = stream, aligner, context_ids  # the context is the teacher's
        self._ids = np.zeros(0, np.int32)
        self._logps = np.zeros(0, np.float32)

    async def logps(self, sampled_ids: Array) -> Array:
        """[m] float32, m <= n: log-probs of the leading tokens that no further text changes, each unit's sum split equally
        among its tokens; NaN where a token has no counterpart."""
        spans = self.aligner.align(sampled_ids, self.context_ids)
        least = min(len(self._ids), len(spans.token_ids))
        same = self._ids[:least] == spans.token_ids[:least]
        keep = least if same.all() else int(same.argmin())
        if keep < len(spans.token_ids):
            scores = await self.stream.append(len(self.context_ids) + keep, spans.token_ids[keep:])
            assert scores.logps is not None
            self._ids, self._logps = spans.token_ids, np.concatenate([self._logps[:keep], scores.logps])
        logps = spans.reduce(self._logps[: len(spans.token_ids)], "split")
        logps[~spans.per_token(spans.aligned)] = np.nan
        return logps[: int(spans.student_ends[spans.settled - 1]) if spans.settled else 0]

    def close(self) -> None:
        """Lets the teacher forget the rollout."""
        self.stream.close()
