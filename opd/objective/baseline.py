"""The mean advantage of an optimizer step, which a policy gradient may subtract."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from accelerate.utils import gather_object

from opd.objective.batching import MicroBatch, PackedTerm
from opd.objective.terms import advantages, clipped


def with_baselines(batches: Sequence[MicroBatch]) -> list[MicroBatch]:
    """These micro-batches of an optimizer step, `baseline: "mean"` of a term replaced by the mean of its tokens' (clipped)
    advantages over all of them and over all processes. To be called by every process.

    The student's log-probs are those that are known already, the trainer's before several updates or else the sampler's:
    this needs no forward pass, and a baseline may be any number.
    """
    sums = np.zeros((max((len(batch.terms) for batch in batches), default=0), 2))
    for batch in batches:
        for place, term in enumerate(batch.terms):
            if _wants(term):
                inputs = {**term.inputs, "reference_logps": batch.reference_logps}
                own = batch.sampler_logps if batch.old_logps is None else batch.old_logps
                found = clipped(advantages(own, inputs), inputs)[term.scale != 0]
                sums[place] += float(found.double().sum()), len(found)
    parts: list[Any] = gather_object([sums.tolist()])
    depth = max(len(part) for part in parts)
    total = sum(np.pad(np.reshape(part, (-1, 2)), ((0, depth - len(part)), (0, 0))) for part in parts)
    means = [float(value) / max(1.0, float(count)) for value, count in np.reshape(total, (-1, 2))]
    return [
        replace(
            batch,
            terms=tuple(
                PackedTerm(term.kind, term.scale, {**term.inputs, "baseline": means[place]}) if _wants(term) else term
                for place, term in enumerate(batch.terms)
            ),
        )
        for batch in batches
    ]


def _wants(term: PackedTerm) -> bool:
    return term.inputs.get("baseline") == "mean"
