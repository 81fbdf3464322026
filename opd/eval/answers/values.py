"""Formulas by their values: two are the same if they agree at a few points to three hundred digits.

Runs in a worker, under the grader's time limit; still, a value that would be expensive (`9^{9^{9}}`) is refused.
"""

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
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
_WIDE_NAMES = "root abs ln log lg floor ceil arcsin arccos arctan asin acos atan"
_WIDE = frozenset(_WIDE_NAMES.split())
_SIGNED = frozenset("xyz")
_REAL = frozenset("xyztu")  # letters that do not stand for whole numbers


class Undefined(Exception):
    """The formula has no value here, or none that is cheap."""


def same_value_everywhere(first: Tree, second: Tree) -> bool | None:
    """Whether two formulas have the same value at points drawn for their variables.

    Rules for logarithms and roots hold where both sides are real: `\\ln x^2` is `2\\ln x`. Formulas with an absolute value
    are the same only if they are real at the same points: `\\ln |x|` is not `\\ln x`. None if they have no value.
    """
    points = _values(first, second)
    if points is None:
        return None
    if points.one_sided and "abs" in _calls(first, second):
        return False
    return all(_close(*values) for values in points.compared)


def same_equation(first: tuple[Tree, Tree], second: tuple[Tree, Tree]) -> bool | None:
    """Whether two equations are the same up to a constant factor. None if they have no value, or hold everywhere."""
    left, right = (("-", *sides) for sides in (first, second))
    points = _values(left, right)
    if points is None:
        return None
    ratios: list[Any] = []
    for one, other in points.compared:
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
        value = mp.mpmathify(_evaluate(tree, _Point({})))
    except (Undefined, *_NO_VALUE):
        return None
    if mp.im(value) != 0:
        return None
    sign, mantissa, exponent, _ = mp.re(value)._mpf_
    return Fraction(-mantissa if sign else mantissa) * Fraction(2) ** exponent


@dataclass
class _Point:
    """Values of the variables; `is_real` until a part of the formula has none there that is real."""

    coordinates: Mapping[str, Any]
    is_real: bool = True


@dataclass
class _Points:
    """Pairs of values to compare, and whether at some point only one of the two was real."""

    compared: list[tuple[Any, Any]]
    one_sided: bool = False


def _values(first: Tree, second: Tree) -> _Points | None:
    """Both values at each point where both are real; at all points if those are too few, or if `i` is in a formula.

    None if there are fewer points with values than needed.
    """
    names = sorted(names_of(first) | names_of(second))
    draw = _Draw.of(first, second, names)
    wanted = NUM_POINTS * (2 if draw.is_wide else 1) if names else 1
    found: list[tuple[Any, Any]] = []
    reality: list[tuple[bool, bool]] = []
    for attempt in range(3 * wanted):
        try:
            coordinates = {name: draw.coordinate(place, name, attempt) for place, name in enumerate(names)}
            points = _Point(coordinates), _Point(coordinates)
            found.append((_evaluate(first, points[0]), _evaluate(second, points[1])))
            reality.append((points[0].is_real, points[1].is_real))
        except (Undefined, *_NO_VALUE):
            continue
        if len(found) >= wanted and reality.count((True, True)) >= min(wanted, NUM_POINTS):
            break
    if len(found) < min(wanted, NUM_POINTS):
        return None
    if ("constant", "i") in {*_nodes(first), *_nodes(second)}:
        return _Points(found)
    real = [values for values, known in zip(found, reality) if all(known)]
    return _Points(real if len(real) > 1 else found, any(one != other for one, other in reality))


@dataclass(frozen=True)
class _Draw:
    """Where formulas are compared. Most are told apart at fractions from a third to 3; those with roots, logarithms,
    absolute values or whole parts (`is_wide`) need larger points and, for the names in `signed`, negative ones.

    Letters other than x, y and z are taken to be positive where there are several, as in physics; an absolute value in a
    formula tells otherwise. `whole`: names that stand for whole numbers, since both formulas have whole parts; where one has
    (`is_stepped`), some points are whole, since `\\lceil x \\rceil` is `\\lfloor x \\rfloor + 1` elsewhere.
    """

    is_wide: bool
    signed: frozenset[str]
    whole: frozenset[str]
    is_stepped: bool

    @classmethod
    def of(cls, first: Tree, second: Tree, names: Sequence[str]) -> "_Draw":
        is_wide = bool(_calls(first, second) & _WIDE)
        everywhere = len(names) == 1 or bool(_calls(first, second) & {"abs"})
        steps = [bool(_calls(tree) & _AT_INTEGERS) for tree in (first, second)]
        whole = frozenset(names) - _REAL if all(steps) else frozenset()
        signed = frozenset(names) if everywhere else frozenset(names) & _SIGNED
        return cls(is_wide, signed - whole if is_wide else frozenset(), whole, any(steps))

    def coordinate(self, place: int, name: str, attempt: int) -> Any:
        """Of the `place`-th name: a fixed draw, a whole number from 3 to 40 or a fraction up to 50 in size."""
        mp = _mp()
        draw = zlib.crc32(f"{name} {attempt}".encode())
        if name in self.whole or (self.is_stepped and attempt % 4 == 3):
            return mp.mpf(3 + draw % 38)
        value = mp.mpf(700 + draw % 5_600) / 2_111
        if self.is_wide:
            value *= (1, 4, 16)[attempt % 3]
        is_negative = name in self.signed and (attempt >> place % 3) & 1  # all combinations of three names' signs
        return -value if is_negative else value


def _calls(*trees: Tree) -> set[str]:
    """The functions in formulas; also "root", for a root or a power that is no whole number."""
    nodes = [node for tree in trees for node in _nodes(tree)]
    roots = {"root" for node in nodes if node[0] == "root" or (node[0] == "^" and not _is_whole(node[2]))}
    return roots | {node[1] for node in nodes if node[0] == "call"}


def _is_whole(exponent: Tree) -> bool:
    inside = exponent[1] if exponent[0] == "neg" else exponent
    return inside[0] == "number" and inside[1].isdigit()


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


def _evaluate(tree: Tree, point: _Point) -> Any:
    """The value at a point. Raises Undefined; mpmath raises ArithmeticError, ValueError or TypeError."""
    value = _value_at(tree, point)
    point.is_real &= _mp().im(value) == 0
    return value


def _value_at(tree: Tree, point: _Point) -> Any:
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
        return point.coordinates[parts[0]]
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
        return _power(first, 1 / second)
    assert kind == "binom", kind
    if max(abs(first), abs(second)) > 2_000:
        raise Undefined(kind)
    return mp.binomial(first, second)


def _power(base: Any, exponent: Any) -> Any:
    """Odd roots of negative numbers are real."""
    mp = _mp()
    if base == 0 and mp.re(exponent) <= 0:
        raise Undefined("0^0")
    if base != 0 and abs(exponent) * abs(mp.log(abs(base), 2)) > MAX_BITS:
        raise Undefined("power")
    if mp.im(base) == 0 and mp.re(base) < 0 and mp.im(exponent) == 0 and exponent != mp.nint(exponent):
        for odd in (3, 5, 7):
            top = mp.nint(exponent * odd)
            if _close(exponent * odd, top):
                return (-1) ** int(top) * mp.power(-base, exponent)
    return mp.power(base, exponent)


def _call(name: str, value: Any) -> Any:
    mp = _mp()
    if name in {"factorial", "fac2", "exp", "sinh", "cosh", "tanh"} and abs(value) > 2_000:
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
