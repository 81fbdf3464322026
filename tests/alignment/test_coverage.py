"""Coverage counts."""

import numpy as np

from opd.alignment.coverage import Coverage
from opd.records import SpanMap


def test_counts_shares_and_sums():
    spans = SpanMap(
        context_ids=np.zeros(2, np.int32),
        token_ids=np.arange(4, dtype=np.int32),
        student_ends=np.array([1, 3, 4]),
        teacher_ends=np.array([1, 2, 4]),
        num_bytes=np.array([3, 5, 2]),
        aligned=np.array([True, True, False]),
    )
    found = Coverage.of(spans)
    assert found == Coverage(10, 8, 4, 3, 4, 3, 1)
    assert (found.byte_coverage, found.token_coverage, found.one_to_one_share) == (0.8, 0.75, 0.25)
    assert found + Coverage() == found
    assert found + found == Coverage(20, 16, 8, 6, 8, 6, 2)
    empty = Coverage()
    assert (empty.byte_coverage, empty.token_coverage, empty.one_to_one_share) == (1.0, 1.0, 1.0)
