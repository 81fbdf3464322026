"""Written numbers: decimals, fractions, mixed and repeating ones, with or without a unit, to exact values.

Numbers are compared exactly, as lm-eval (minerva_math) and Hendrycks' MATH do. Others allow a relative error: 1e-5 in the
grader of Minerva's physics answers, 1e-4 in Qwen2.5-Math's, for every number, so that 10112370 passes for 10112369. Here
only a decimal fraction of six digits or more also stands for what was rounded or cut to it (`0.333333` for 1/3, about
math-verify's rule), and one that goes on (`0.333...`) from three digits.
"""

import re
from dataclasses import dataclass
from fractions import Fraction

from opd.eval.answers.units import NO_UNIT, Unit, read_unit

MAX_DIGITS = 1_000  # of a number that becomes a value; longer ones are compared as text
MAX_EXPONENT = 1_000
ROUNDED_DIGITS = 6
GOING_ON_DIGITS = 3  # of `0.333...`

# Possessive throughout: what was taken is not given back, so that matching is linear.
_GROUPS = r"(?:\d{1,3}(?:[ ]\d{3}(?![\d/]))++|\d++(?:,\d{3}(?!\d))*+)"  # `12 000` or `12,000`
_DECIMAL = rf"(?:{_GROUPS}(?:\.\d*+)?|\.\d++)"
_TOP = rf"(?:\{{[ ]?(?P<fraction_top>[+-]?[ ]?{_DECIMAL})[ ]?\}}|(?P<top_digit>\d))"
_BOTTOM = rf"(?:\{{[ ]?(?P<fraction_bottom>[+-]?[ ]?{_DECIMAL})[ ]?\}}|(?P<bottom_digit>\d))"
_CORE = re.compile(
    rf"""(?P<sign>[+-]?)[ ]?(?:
        (?P<repeating>\d*+\.\d*+)\\(?:overline|bar)[ ]?\{{(?P<period>\d++)\}}
      | (?P<mantissa>{_DECIMAL})(?:
            [eE](?P<e>[+-]?\d++)
          | [ ]?(?:\\times|\\cdot|\*|x)[ ]?10[ ]?\^[ ]?(?:\{{[ ]?(?P<power>[+-]?[ ]?\d++)[ ]?\}}|(?P<plain>[+-]?\d++)))
      | (?:(?P<whole>\d++)[ ]?)?\\frac[ ]?{_TOP}[ ]?{_BOTTOM}
      | (?:(?P<whole_plain>\d++)[ ])?(?P<top>{_DECIMAL})[ ]?/[ ]?(?P<bottom>\d++(?:\.\d*+)?)
      | (?P<decimal>{_DECIMAL})(?P<cut>\.\.\.|[ ]?\\l?dots)?
    )""",
    re.VERBOSE,
)


@dataclass(frozen=True)
class Number:
    """A written number, as `written` without its unit. `value` is None for one too long to become a value, which
    `canonical` then stands for.

    `digits` is the number of significant digits of a decimal fraction, 0 for anything exact; `goes_on` if dots follow it.
    `value` counts words like `million`; `may_be_product` if its unit could be a variable
    (`6m`, `\\frac{37}{4} m`); of `6 m` it is a unit.
    """

    written: str
    canonical: str
    value: Fraction | None
    digits: int = 0
    percent: bool = False
    unit: Unit = NO_UNIT
    goes_on: bool = False
    may_be_product: bool = False


def read_number(text: str) -> Number | None:
    """The number that a tidy text is, None if it is none.

    Example: `read_number("1\\\\frac{4}{5} cm").value == Fraction(9, 5)`
    """
    match = _CORE.match(text)
    if match is None or _is_no_fraction(match):
        return None
    tail = text[match.end() :]
    percent = tail.strip() in {"%", "percent", "per cent"}
    unit = NO_UNIT if percent else read_unit(tail)
    if unit is None:
        return None
    value, digits, canonical = _value(match)
    if unit.scale > 1:
        if value is None:
            return None
        value *= unit.scale
    is_fraction = (match["top"] or match["fraction_top"] or match["top_digit"]) is not None
    may_be_product = unit.may_be_variable and (is_fraction or tail[0] != " ")
    return Number(match.group().strip(), canonical, value, digits, percent, unit, match["cut"] is not None, may_be_product)


def _is_no_fraction(match: re.Match[str]) -> bool:
    """Whether it divides by zero, or is a product: before an improper fraction a whole number is a factor."""
    top = match["top"] or match["fraction_top"] or match["top_digit"] or ""
    bottom = match["bottom"] or match["fraction_bottom"] or match["bottom_digit"]
    if bottom is None:
        return False
    is_mixed = (match["whole"] or match["whole_plain"]) is not None
    is_proper = top.isdigit() and bottom.isdigit() and (len(top), top) < (len(bottom), bottom)
    return not bottom.strip("+-0. ") or (is_mixed and not is_proper)


def _value(match: re.Match[str]) -> tuple[Fraction | None, int, str]:
    """Exact value, significant digits of a decimal, and the text that equal numbers without a value share."""
    sign = -1 if match["sign"] == "-" else 1
    if match["repeating"] is not None:
        start, period = match["repeating"], match["period"]
        if len(start) + len(period) > MAX_DIGITS:
            return None, 0, match.group()
        places = len(start.partition(".")[2])
        value = Fraction(start.rstrip(".") or "0") + Fraction(int(period), (10 ** len(period) - 1) * 10**places)
        return sign * value, 0, ""
    written = match["mantissa"] or match["decimal"]
    if written is not None:
        exponent = (match["e"] or match["power"] or match["plain"] or "0").replace(" ", "")
        return _decimal_value(sign, written, exponent)
    if match["top"] is not None:
        whole, top, bottom = match["whole_plain"], match["top"], match["bottom"]
    else:
        whole = match["whole"]
        top = match["fraction_top"] or match["top_digit"]
        bottom = match["fraction_bottom"] or match["bottom_digit"]
    top, bottom = (re.sub("[, ]", "", part) for part in (top, bottom))
    if len(top) + len(bottom) + len(whole or "") > MAX_DIGITS:
        return None, 0, match.group()
    fraction = Fraction(top) / Fraction(bottom)
    return sign * (fraction + int(whole or 0)), 0, ""


def _decimal_value(sign: int, written: str, exponent: str) -> tuple[Fraction | None, int, str]:
    whole, _, places = re.sub("[, ]", "", written).partition(".")
    digits = (whole + places).lstrip("0")
    stripped = digits.rstrip("0")
    if len(exponent) > 18:
        return None, 0, f"{sign} {digits} {len(places)} {exponent}"
    shift = int(exponent) - len(places) + len(digits) - len(stripped)
    if not stripped:
        return Fraction(0), 0, ""
    if len(stripped) > MAX_DIGITS or abs(shift) > MAX_EXPONENT:
        return None, 0, f"{sign * int(bool(stripped))} {stripped} {shift}"
    value = sign * int(stripped) * Fraction(10) ** shift
    return value, len(digits) if places.strip("0") else 0, ""


def same_number(extracted: Number, answer: Number) -> bool:
    """Whether two written numbers are equal. A percent sign may be worked out, `50%` is also 0.5.

    It may be left out, too, but an answer up to 1 without one is meant as it is: `0.5%` is not 0.5.
    """
    if extracted.value is None or answer.value is None:
        return extracted.value is answer.value and extracted.canonical == answer.canonical
    if extracted.percent != answer.percent:
        percent, plain = (extracted, answer) if extracted.percent else (answer, extracted)
        assert percent.value is not None
        assert plain.value is not None
        if percent.value == 100 * plain.value:
            return True
        if extracted.percent and abs(answer.value) <= 1:
            return False
    return close(extracted, answer.value, answer.digits) or close(answer, extracted.value, extracted.digits)


def close(rounded: Number, value: Fraction, digits: int = 0) -> bool:
    """Whether `value`, known to `digits` digits (0: exactly), equals the number or is what it was rounded or cut from."""
    if rounded.value is None or rounded.value == value:
        return rounded.value == value
    if rounded.digits < (GOING_ON_DIGITS if rounded.goes_on else ROUNDED_DIGITS) or 0 < digits <= rounded.digits:
        return False
    beyond = (abs(value) - abs(rounded.value)) / last_place(rounded)
    return value * rounded.value > 0 and -0.5 <= beyond < 1


def last_place(number: Number) -> Fraction:
    """What one unit of a decimal's last digit is worth."""
    assert number.value
    magnitude = abs(number.value)
    exponent = len(str(magnitude.numerator)) - len(str(magnitude.denominator))
    if Fraction(10) ** exponent > magnitude:
        exponent -= 1
    return Fraction(10) ** (exponent - number.digits + 1)
