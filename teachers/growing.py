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
        self.stream, self.num_context = stream, len(context_ids)  # the context is the teacher's
        self._growing = aligner.growing(context_ids)
        self._ids = np.zeros(0, np.int32)  # the teacher's
        self._logps = np.zeros(0, np.float32)
        self._split = np.zeros(0, np.float32)

    async def logps(self, sampled_ids: Array) -> Array:
        """[m] float32, m <= n: log-probs of the leading tokens that no further text changes, each unit's sum split equally
        among its tokens; NaN where a token has no counterpart. The tokens sampled so far [n] only grow."""
        growing = self._growing
        growing.append(sampled_ids[growing.num_sampled :])
        tail, start = growing.tail, growing.teacher_start
        assert start <= len(self._ids), "what was to be scored before was not"
        least = min(len(self._ids) - start, len(tail.token_ids))
        same = self._ids[start : start + least] == tail.token_ids[:least]
        keep = least if same.all() else int(same.argmin())
        if keep < len(tail.token_ids):
            scores = await self.stream.append(self.num_context + start + keep, tail.token_ids[keep:])
            assert scores.logps is not None
            self._ids = np.concatenate([self._ids[:start], tail.token_ids])
            self._logps = np.concatenate([self._logps[: start + keep], scores.logps])
        split = tail.reduce(self._logps[start : start + len(tail.token_ids)], "split")
        split[~tail.per_token(tail.aligned)] = np.nan
        self._split = np.concatenate([self._split[: growing.student_start], split])
        return self._split[: growing.student_start + (int(tail.student_ends[tail.settled - 1]) if tail.settled else 0)]

    def close(self) -> None:
        """Lets the teacher forget the rollout."""
        self.stream.close()
