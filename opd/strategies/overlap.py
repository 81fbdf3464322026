"""Term maker `overlap`: how near student and teacher are where it counts, as metrics beside the terms that teach.

At each token of some rollouts, with S and T the k most likely tokens of student and teacher there:

* `student_topk_kl`: the reverse KL over S with everything else as one more token, as `reverse_kl` with form `topk` and its
  default tail has it: sum over S of p log(p / q), and the same of the masses outside, p the student's and q the teacher's
* `topk_overlap`: |S and T in common| / k
* `overlap_mass`, `overlap_mass_teacher`: the student's and the teacher's probability of the tokens in common

DF-OPD (arXiv 2609.14193) follows these over training to tell what different prompts teach. The maker has no terms, so loss
and gradient stay as they are.

Both sides are read at the sampling temperature and before truncation, the student's under the policy that sampled. Metrics
are means over tokens.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from opd.errors import UserError
from opd.passages import Passage, passages
from opd.plugins import Models, TermMaker
from opd.records import Array, Rollout, ScoreRequest, Scores, Term
from opd.strategies.likely import ids_to_ask, likely_ids, likely_logps

if TYPE_CHECKING:
    from opd.config import RunConfig

MIN_TAIL = 1e-7  # of the mass outside, as in the loss: log-probs of fp32 cannot tell less from rounding


@dataclass(frozen=True)
class OverlapConfig:
    """Metrics of how near the student's most likely tokens are to the teacher's."""

    k: int = 16
    """Most likely tokens of each side."""
    num_rollouts: int = 8
    """Rollouts of each step that are looked at, evenly spread over its slots; 0 takes all. Each costs one request more."""


class Overlap(TermMaker):
    """See the module."""

    Config = OverlapConfig

    def __init__(self, config: OverlapConfig, run: "RunConfig") -> None:
        self.num_student_topk = config.k
        self.temperature = run.sampling.temperature or 1.0  # of greedy rollouts the sampler reports the plain softmax
        slots = run.batch.prompts * run.batch.rollouts_per_prompt
        num = min(config.num_rollouts or slots, slots)
        self.slots = {place * slots // num for place in range(num)}

    @staticmethod
    def check(config: OverlapConfig, run: "RunConfig") -> None:
        if config.k < 1:
            raise UserError(f"terms.overlap.k is {config.k}: it must be at least 1")
        if config.num_rollouts < 0:
            raise UserError(f"terms.overlap.num_rollouts is {config.num_rollouts}: it must be 0 (all) or more")
        if list(run.terms) == ["overlap"]:
            raise UserError("terms: overlap only measures, so nothing would be learned; name another beside it")

    async def collect(self, rollout: Rollout, models: Models) -> list[Term]:
        """No terms."""
        if rollout.slot in self.slots:
            likely = likely_ids(rollout, self.num_student_topk)
            logps = likely_logps(rollout, self.num_student_topk)
            await asyncio.gather(*(self._look(one, rollout, likely, logps, models) for one in passages(rollout)))
        return []

    async def _look(self, passage: Passage, rollout: Rollout, likely: Array, logps: Array, models: Models) -> None:
        ids = ids_to_ask(passage.token_ids, passage.at, likely[passage.rows])
        k, temperature = likely.shape[1], self.temperature
        request = ScoreRequest(passage.context_ids, passage.token_ids, k=k, ids=ids, temperature=temperature)
        scores = await models.score(models.teacher_for(rollout.prompt), request)
        for name, values in compared(logps[passage.rows], scores, passage.at).items():
            models.note(name, float(values.mean()), len(values))


def compared(student_logps: Array, scores: Scores, at: Array) -> Mapping[str, Array]:
    """The figures [s] at the places `at` [s] of an answer about the student's k tokens and the teacher's own k.

    `student_logps` [s, k] are the student's, of the tokens asked about there.
    """
    assert scores.topk_ids is not None
    assert scores.topk_logps is not None
    k, known = student_logps.shape[1], scores.topk_ids[at] >= 0
    log_p, log_q = student_logps.astype(np.float64), scores.topk_logps[at].astype(np.float64)
    # a token of the teacher's own that was asked about is answered only there, so its k best are those of the whole answer
    common = np.zeros(known.shape, bool)
    np.put_along_axis(common, np.argsort(np.where(known, -log_q, np.inf), axis=1, kind="stable")[:, :k], True, axis=1)
    common, known, log_q = (common & known)[:, :k], known[:, :k], log_q[:, :k]
    p, q = np.exp(log_p) * known, np.exp(log_q) * known
    outside_p, outside_q = (np.maximum(1.0 - mass.sum(1), MIN_TAIL) for mass in (p, q))
    return {
        "student_topk_kl": (p * (log_p - log_q)).sum(1) + outside_p * np.log(outside_p / outside_q),
        "topk_overlap": common.sum(1) / k,
        "overlap_mass": (p * common).sum(1),
        "overlap_mass_teacher": (q * common).sum(1),
    }
