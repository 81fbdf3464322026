"""Sampling noise as a pure function of (seed, position), so that a rollout does not depend on its neighbours."""

import numpy as np

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def uniform(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """[B] float64 in [0, 1) from `seeds` [B] and `positions` [B] (integers), by SplitMix64 (Steele et al. 2014)."""
    with np.errstate(over="ignore"):  # arithmetic modulo 2**64 is the point
        states = _mix(seeds.astype(np.uint64) + _GOLDEN) + positions.astype(np.uint64) * _GOLDEN  # 0 would stay 0
        return (_mix(states) >> np.uint64(11)) * 2.0**-53


def slot_seed(*parts: int) -> int:
    """A 63-bit seed from integers such as (run seed, step, slot)."""
    state = np.zeros(1, np.uint64)
    with np.errstate(over="ignore"):
        for part in parts:
            state = _mix(state + _GOLDEN + np.array([part], np.int64).astype(np.uint64))
    return int(state[0] >> np.uint64(1))


def _mix(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
