"""Formulas by their values: two are the same if they agree at a few points to three hundred digits.

Runs in a worker, under the grader's time limit; still, a value that would be expensive (`9^{9^{9}}`) is refused.
"""

import zlib
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any

from opd.eval.answers.expressions import Tree

PRECISION_BITS = 1_200
TOLERANCE_BITS = 1_040  # 313 digits: `2^{1009} + 1` is not `2^{1009}`
MAX_BITS = 20_000  # of a value's magnitude
MAX_CHARS = 2_000  # of a number
NUM_POINTS = 4
_NO_VALUE = (
    ArithmeticError,
    ValueError,
    TypeError,
    RecursionError,
)  # a pole, outside a function's domain, a sum of hundreds

_INVERSE = {"arcsin": "asin", "arccos": "acos", "arctan": "atan", "lg": "log10", "log": "ln", "Re": "re", "Im": "im"}
_AT_INTEGERS = frozenset({"floor", "ceil"})


class Undefined(Exception):
    """The formula has no value here, or none that is cheap."""


def same_value_everywhere(first: Tree, second: Tree) -> bool | None:
    """Whether two formulas have the same value at points drawn for their variables; None if they have none."""
    for values in _values(first, second):
        if values is None:
            return None
        if not _close(*values):
            return False
    return True


def same_equation(first: tuple[Tree, Tree], second: tuple[Tree, Tree]) -> bool | None:
    """Whether two equations are the same up to a constant factor. None if they have no value, or hold everywhere."""
    left, right = (("-", *sides) for sides in (first, second))
    ratios: list[Any] = []
    for values in _values(left, right):
        if values is None:
            return None
        one, other = values
        if not _is_zero(one) and not _is_zero(other):
            ratios.append(one / other)
        elif not (_is_zero(one) and _is_zero(other)):
            return False
    return all(_close(ratio, ratios[0]) for ratio in ratios) if ratios else None


def value_of(tree: Tree) -> Fraction | None:
    """The value of a formula without variables, to many digits; None if it has none, or is not real."""
    mp = _mp()
    if names_of(tree):
        return None
    try:
        value = mp.mpmathify(_evaluate(tree, {}))
    except (Undefined, *_NO_VALUE):
        return None
    if mp.im(value) != 0:
        return None
    sign, mantissa, exponent, _ = mp.re(value)._mpf_
    return Fraction(-mantissa if sign else mantissa) * Fraction(2) ** exponent


def _values(first: Tree, second: Tree) -> Iterator[tuple[Any, Any] | None]:
    """Both values at each point; None, at last, if there are fewer points with values than needed."""
    names = sorted(names_of(first) | names_of(second))
    wanted = NUM_POINTS if names else 1
    for attempt in range(3 * wanted):
        try:
            point = {name: _coordinate(name, attempt, _is_discrete(first) or _is_discrete(second)) for name in names}
            yield _evaluate(first, point), _evaluate(second, point)
        except (Undefined, *_NO_VALUE):
            continue
        wanted -= 1
        if wanted == 0:
            return
    yield None


def _coordinate(name: str, attempt: int, discrete: bool) -> Any:
    """A fixed draw: a whole number from 3 to 40, or a fraction between a third and 3."""
    draw = zlib.crc32(f"{name} {attempt}".encode())
    return _mp().mpf(3 + draw % 38) if discrete else _mp().mpf(700 + draw % 5_600) / 2_111


def _is_discrete(tree: Tree) -> bool:
    return any(node[0] == "call" and node[1] in _AT_INTEGERS for node in _nodes(tree))


def names_of(tree: Tree) -> set[str]:
    """The variables of a formula."""
    return {node[1] for node in _nodes(tree) if node[0] == "name"}


def _nodes(tree: Tree) -> Iterator[Tree]:
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        waiting += [part for part in node[1:] if isinstance(part, tuple)]


def _close(first: Any, second: Any) -> bool:
    scale = max(abs(first), abs(second))
    return abs(first - second) <= _mp().ldexp(scale, -TOLERANCE_BITS) or (_is_zero(first) and _is_zero(second))


def _is_zero(value: Any) -> bool:
    return abs(value) < _mp().ldexp(1, -TOLERANCE_BITS)


def _mp() -> Any:
    from mpmath import mp

    mp.prec = PRECISION_BITS
    return mp


def _evaluate(tree: Tree, point: Mapping[str, Any]) -> Any:
    """The value at a point. Raises Undefined; mpmath raises ArithmeticError, ValueError or TypeError."""
    kind, *parts = tree
    mp = _mp()
    if kind == "number":
        if len(parts[0]) > MAX_CHARS or len(parts[0].lower().partition("e")[2]) > 5:
            raise Undefined(kind)
        return _bounded(mp.mpf(parts[0]))
    if kind == "value":
        return mp.mpf(parts[0].numerator) / parts[0].denominator
    if kind == "constant":
        return {"pi": +mp.pi, "e": +mp.e, "i": mp.j}[parts[0]]
    if kind == "name":
        return point[parts[0]]
    if kind == "call":
        return _bounded(_call(parts[0], _evaluate(parts[1], point)))
    values = [_evaluate(part, point) if part is not None else mp.mpf(2) for part in parts]
    return _bounded(_combine(kind, values))


def _combine(kind: str, values: list[Any]) -> Any:
    mp = _mp()
    first, second = values[0], values[-1]
    if kind == "neg":
        return -first
    if kind == "+":
        return first + second
    if kind == "-":
        return first - second
    if kind == "*":
        return first * second
    if kind == "/":
        return first / second
    if kind == "^":
        return _power(first, second)
    if kind == "root":
        return _power(first, 1 / second) if second != 3 or mp.im(first) != 0 or first >= 0 else -mp.cbrt(-first)
    assert kind == "binom", kind
    if max(abs(first), abs(second)) > 2_000:
        raise Undefined(kind)
    return mp.binomial(first, second)


def _power(base: Any, exponent: Any) -> Any:
    mp = _mp()
    if base == 0 and mp.re(exponent) <= 0:
        raise Undefined("0^0")
    if base != 0 and abs(exponent) * abs(mp.log(abs(base), 2)) > MAX_BITS:
        raise Undefined("power")
    return mp.power(base, exponent)


def _call(name: str, value: Any) -> Any:
    mp = _mp()
    if name in {"factorial", "exp", "sinh", "cosh", "tanh"} and abs(value) > 2_000:
        raise Undefined(name)
    if name in _AT_INTEGERS:  # so that a value just below a whole number by rounding is that number
        margin = mp.ldexp(1, -TOLERANCE_BITS)
        return mp.floor(value + margin) if name == "floor" else mp.ceil(value - margin)
    if name in {"ln", "log", "lg"} and value == 0:
        raise Undefined(name)
    function = abs if name == "abs" else getattr(mp, _INVERSE.get(name, name))
    return function(value)


def _bounded(value: Any) -> Any:
    mp = _mp()
    if not mp.isfinite(value) or (value != 0 and abs(mp.mag(value)) > MAX_BITS):
        raise Undefined("too large")
    return value
