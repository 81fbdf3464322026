"""The engine overlaps its stages as far as the recipe allows. Waiting stages, so a busy machine hardly matters."""

import statistics

import pytest

from benchmarks.stream_stubs import Stages, measure


@pytest.mark.parametrize("stages", [Stages(0.4, 0.2, 0.3), Stages(0.2, 0.4, 0.3), Stages(0.2, 0.2, 0.4)])
def test_lookahead_hides_all_but_the_slowest_stage(stages):
    ahead, staleness = measure(stages, 1, batch=16, steps=6)
    assert staleness == [0, 1, 1, 1, 1, 1]
    alone, fresh = measure(stages, 0, batch=16, steps=5)
    assert fresh == [0] * 5
    assert statistics.median(ahead) < 0.9 * statistics.median(alone)
    assert statistics.median(ahead) >= stages.slowest_s
    assert statistics.median(alone) >= max(stages.sample_s, stages.score_s) + stages.update_s
