"""A teacher's view of a rollout that still grows, turn by turn and token by token of the student."""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from opd.alignment.aligner import Aligner
from opd.records import Array, Turn
from opd.teachers import stream


class Scoring(Protocol):
    """Scores one rollout. Calls are made one after another; `begin` comes before each turn, the first included.

    Example: `scoring.begin(turns, context_ids, no_ids); await scoring.logps(chunk.sampled_ids); scoring.close()`
    """

    def begin(self, turns: Sequence[Turn], context_ids: Array, reused_ids: Array) -> None:
        """The next turn follows `turns`, in this context [c] of the student, and begins with these reused tokens [r]."""
        ...

    async def logps(self, sampled_ids: Array) -> Array:
        """[m] float32, m <= n: the teacher's log-probs of the turn's tokens so far [n], reused ones first, which only grow.

        Only what is new is sent. NaN where a token is reused, or has no counterpart in the teacher's tokenizer.
        """
        ...

    def close(self) -> None:
        """Lets the teacher forget the rollout."""
        ...


class OwnScoring:
    """By a teacher that reads the student's own tokens; m = n."""

    def __init__(self, teacher: stream.Scoring, temperature: float = 1.0) -> None:
        self._text = _Text(teacher, temperature)

    def begin(self, turns: Sequence[Turn], context_ids: Array, reused_ids: Array) -> None:
        """See `Scoring.begin`. The context shows the turns before as the student saw them."""
        self._text.begin(np.concatenate([context_ids, reused_ids]))
        self._num_reused = len(reused_ids)
        self._logps = np.full(len(reused_ids), np.nan, np.float32)

    async def logps(self, sampled_ids: Array) -> Array:
        """See `Scoring.logps`."""
        known = len(self._logps)
        if known < len(sampled_ids):
            logps = await self._text.append(known - self._num_reused, sampled_ids[known:])
            self._logps = np.concatenate([self._logps, logps])
        return self._logps[: len(sampled_ids)]

    def close(self) -> None:
        """See `Scoring.close`."""
        self._text.close()


class AlignedScoring:
    """By a teacher with another tokenizer; m counts the leading tokens that no further text changes. More text may change
    the teacher's last tokens: these are then dropped and sent anew.

    Each unit's sum is split equally among its tokens. A unit that holds a reused token has none, as in `opd.judging`.
    """

    def __init__(
        self,
        teacher: stream.Scoring,
        aligner: Aligner,
        context_after: Callable[[Sequence[Turn]], Array],
        temperature: float = 1.0,
    ) -> None:
        """`context_after` gives the teacher's context of the turn that follows some."""
        self._text, self._aligner, self._context_after = _Text(teacher, temperature), aligner, context_after

    def begin(self, turns: Sequence[Turn], context_ids: Array, reused_ids: Array) -> None:
        """See `Scoring.begin`. The context is rendered anew, under the teacher's own chat template."""
        shown = self._context_after(turns)
        self._text.begin(shown)
        self._growing = self._aligner.growing(shown)
        self._num_reused = len(reused_ids)
        self._ids = np.zeros(0, np.int32)  # the teacher's
        self._logps = np.zeros(0, np.float32)
        self._split = np.zeros(0, np.float32)

    async def logps(self, sampled_ids: Array) -> Array:
        """See `Scoring.logps`."""
        growing = self._growing
        growing.append(sampled_ids[growing.num_sampled :])
        tail, start = growing.tail, growing.teacher_start
        assert start <= len(self._ids), "what was to be scored before was not"
        least = min(len(self._ids) - start, len(tail.token_ids))
        same = self._ids[start : start + least] == tail.token_ids[:least]
        keep = least if same.all() else int(same.argmin())
        if keep < len(tail.token_ids):
            logps = await self._text.append(start + keep, tail.token_ids[keep:])
            self._ids = np.concatenate([self._ids[:start], tail.token_ids])
            self._logps = np.concatenate([self._logps[: start + keep], logps])
        split = tail.reduce(self._logps[start : start + len(tail.token_ids)], "split")
        split[~tail.per_token(tail.aligned)] = np.nan
        if (reused := self._num_reused - growing.student_start) > 0:
            split[: tail.student_ends[np.searchsorted(tail.student_ends, reused)]] = np.nan
        self._split = np.concatenate([self._split[: growing.student_start], split])
        return self._split[: growing.student_start + (int(tail.student_ends[tail.settled - 1]) if tail.settled else 0)]

    def close(self) -> None:
        """See `Scoring.close`."""
        self._text.close()


class _Text:
    """What a teacher reads of one rollout, as a stream: a turn sends no token again that the turns before it have sent."""

    def __init__(self, teacher: stream.Scoring, temperature: float) -> None:
        self._teacher, self._temperature = teacher, temperature
        self._stream: stream.ScoreStream | None = None

    def begin(self, context_ids: Array) -> None:
        """The next tokens follow this context [c], which is sent with the first of them."""
        self._context_ids, self._is_sent = context_ids, False

    async def append(self, keep: int, ids: Array) -> Array:
        """[n] float32: log-probs of `ids` [n] after the context and the first `keep` tokens that came since."""
        context_ids = self._context_ids
        rest, keep = context_ids[:0], len(context_ids) + keep
        if not self._is_sent:
            keep = 0 if self._stream is None else _num_common(self._stream.sequence, context_ids)
            rest = context_ids[keep:]
        if not keep or self._stream is None:
            self.close()
            self._stream = stream.ScoreStream(self._teacher, context_ids, temperature=self._temperature)
            rest, keep = context_ids[:0], len(context_ids)
        scores = await self._stream.append(keep, np.concatenate([rest, ids]))
        assert scores.logps is not None
        self._is_sent = True
        return scores.logps[len(rest) :]

    def close(self) -> None:
        """Lets the teacher forget the sequence."""
        if self._stream is not None:
            self._stream.close()


def _num_common(one: Array, other: Array) -> int:
    """Leading tokens that two sequences have in common."""
    least = min(len(one), len(other))
    same = one[:least] == other[:least]
    return least if same.all() else int(same.argmin())
