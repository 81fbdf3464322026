"""Student's t distribution for whole degrees of freedom."""

from functools import lru_cache
from math import cos, exp, lgamma, pi, sin, sqrt, tan

import numpy as np

from opd.records import Array


@lru_cache(maxsize=65536)
def quantile(level: float, df: int) -> float:
    """The t with P(|T| <= t) = level < 1.

    By Newton's method in the angle atan(t / sqrt(df)), in which the probability is concave: it rises to the root.
    """
    slope = 2 / sqrt(pi) * exp(lgamma((df + 1) / 2) - lgamma(df / 2))  # at angle 0
    angle = 0.0
    for _ in range(200):
        step = (level - _at_angle(angle, df)) / (slope * cos(angle) ** (df - 1))
        angle += step
        if step < 1e-14:
            break
    return sqrt(df) * tan(angle)


def _at_angle(angle: float, df: int) -> float:
    """P(|T| <= sqrt(df) tan(angle)). Abramowitz and Stegun, 26.7.3 and 26.7.4."""
    odd = df % 2
    if df == 1:
        return 2 / pi * angle
    powers = cos(angle) ** np.arange(odd, df - 1, 2)
    series = sin(angle) * float(_coefficients(df) @ powers)
    return 2 / pi * (angle + series) if odd else series


@lru_cache(maxsize=1024)
def _coefficients(df: int) -> Array:
    """Odd: 1, 2/3, 2*4/(3*5), ...; even: 1, 1/2, 1*3/(2*4), ..."""
    steps = np.arange(2 + df % 2, df - 1, 2)
    return np.concatenate([[1.0], np.cumprod((steps - 1) / steps)])
