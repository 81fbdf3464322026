"""A turn of which some tokens have come, and the rest is still to be sampled."""

from dataclasses import replace

import numpy as np

from opd.records import Chunk, SampleRequest


def rest_of(request: SampleRequest, chunk: Chunk) -> SampleRequest:
    """What is left of a request once these tokens have come."""
    return replace(
        request,
        context_ids=np.concatenate([request.context_ids, chunk.sampled_ids]),
        max_new_tokens=request.max_new_tokens - len(chunk.sampled_ids),
        first=request.first + len(chunk.sampled_ids),
    )
