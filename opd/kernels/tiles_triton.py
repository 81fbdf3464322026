"""What the Triton kernels do to a tile: reading logits in fp32, the soft cap, and differences that keep their digits.

Only exp, log and arithmetic, which the interpreter has, too. The series are Taylor's and that of Cephes (`tanh`), cut where
fp32 ends.
"""

from typing import no_type_check

import triton
import triton.language as tl

LOW = tl.constexpr(-1e30)  # a logit that weighs nothing; finite, so that 0 * (x - w) is 0 there
LOG2_E = tl.constexpr(1.4426950408889634)
NEAR_MAXIMA = tl.constexpr(1.0)
NEAR = tl.constexpr(0.35)  # where e^a - 1 loses digits to the subtraction


@triton.jit
@no_type_check
def read(row, columns, mask, softcap):
    """cap(logits) of a tile in fp32; outside the mask nothing is read and anything returned."""
    tile = tl.load(row + columns, mask=mask).to(tl.float32)
    tile = tl.where(tile < LOW, LOW, tile)  # what masks leave: a multiple would be -inf, and 0 * inf is NaN
    if softcap is not None:
        tile = softcap * tanh(tile / softcap)
    return tile


@triton.jit
@no_type_check
def difference(s, t, m, n, ratio):
    """(s - m) - ratio (t - n). Between near-equal rows s - t is exact, which s - m and t - n are not; with logits that carry
    unlike offsets it is the other way."""
    return tl.where((ratio == 1.0) & (tl.abs(m - n) <= NEAR_MAXIMA), (s - t) - (m - n), (s - m) - ratio * (t - n))


@triton.jit
@no_type_check
def slope(capped, softcap):
    """The cap's derivative where it gives `capped`."""
    ratio = capped / softcap
    return (1.0 - ratio) * (1.0 + ratio)


@triton.jit
@no_type_check
def tanh(u):
    square = tl.minimum(u * u, 1.0)
    series = -5.70498872745e-3 * square + 2.06390887954e-2
    series = ((series * square - 5.37397155531e-2) * square + 1.33314422036e-1) * square - 3.33332819422e-1
    decay = tl.exp(-2.0 * tl.abs(u))
    far = (1.0 - decay) / (1.0 + decay)
    return tl.where(square < 0.390625, u + u * square * series, tl.where(u < 0.0, -far, far))


@triton.jit
@no_type_check
def expm1_near(a):
    """e^a - 1 for |a| < NEAR."""
    a = tl.minimum(tl.maximum(a, -NEAR), NEAR)
    series = 1 / 24 + a * (1 / 120 + a * (1 / 720 + a * (1 / 5040)))
    return a * (1.0 + a * (0.5 + a * (1 / 6 + a * series)))


@triton.jit
@no_type_check
def minus(q, p, log_ratio):
    """q - p, where log(q / p) is known better than either: relative digits are kept where they are near."""
    return tl.where(tl.abs(log_ratio) < NEAR, p * expm1_near(log_ratio), q - p)


@triton.jit
@no_type_check
def log_mixture(log_ratio, beta):
    """log(r / max(p, q)) for r = beta p + (1 - beta) q, from log(p / q); relative digits are kept where p is near q."""
    share = tl.where(log_ratio > 0.0, 1.0 - beta, beta)  # of the smaller one
    a = -tl.abs(log_ratio)
    ratio = tl.exp(a)
    u = share * tl.where(a > -NEAR, expm1_near(a), ratio - 1.0)
    s = u / (2.0 + u)
    square = s * s
    series = 1 / 7 + square * (1 / 9 + square * (1 / 11))
    near = 2.0 * s * (1.0 + square * (1 / 3 + square * (1 / 5 + square * series)))  # log(1 + u) = 2 artanh(s)
    return tl.where(u > -0.4, near, tl.log(1.0 - share + share * ratio))
