"""Sampling noise as a function of seed and position."""

import numpy as np

from opd.students.noise import slot_seed, uniform

GOLDEN = [0.28176129772258496, 0.36818951565166946, 0.8897992113579962]
GOLDEN_SEED = 1279368494785126216


def test_it_depends_on_its_own_seed_and_position_alone():
    seeds, positions = np.array([3, 7, 3, 9]), np.array([0, 0, 5, 2])
    together = uniform(seeds, positions)
    alone = [uniform(seeds[i : i + 1], positions[i : i + 1])[0] for i in range(4)]
    assert together.tolist() == alone
    assert len(set(alone)) == 4


def test_values_never_change():
    """A resumed or repeated run relies on them, whatever numpy's own generators do."""
    assert uniform(np.array([0, 1, 2**62]), np.array([0, 1, 1000])).tolist() == GOLDEN
    assert slot_seed(0, 0, 0) == GOLDEN_SEED


def test_uniform_over_positions_and_over_seeds():
    many = np.arange(50_000)
    for values in (uniform(np.full(50_000, 5), many), uniform(many, np.full(50_000, 5))):
        assert values.dtype == np.float64
        assert ((values >= 0) & (values < 1)).all()
        counts = np.histogram(values, 100, (0, 1))[0]
        assert ((counts - 500) ** 2 / 500).sum() < 150  # chi-square of 99 degrees, beyond the 99.9th percentile
        assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.02


def test_slot_seeds_differ():
    seeds = {slot_seed(run, step, slot) for run in range(3) for step in range(50) for slot in range(50)}
    assert len(seeds) == 3 * 50 * 50
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert slot_seed(1, 2) != slot_seed(2, 1) != slot_seed(1, 2, 0)
    assert slot_seed(-1, 0) != slot_seed(1, 0)
