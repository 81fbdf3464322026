"""Units behind a number or formula: `5 cm`, `7 dozen eggs`, `2\\pi square units`.

Suites differ in whether their answers keep units, so one that only one side states does not count; two that are stated must
be the same. Known are the units of the table below. Any other plural noun (`apples`) counts things, unless it is a word of
`_NEVER`: a word that may change a value is never dropped. Words like `million` are part of the value.
"""

import re
from collections import Counter
from dataclasses import dataclass

# Of each unit its name, then what else it is called. A plural `s` or `es` is understood.
_UNITS = """
meter m metre | centimeter cm centimetre | millimeter mm millimetre | kilometer km kilometre | nanometer nm nanometre
micrometer micrometre micron | inch in | foot ft feet | yard yd | mile mi | parsec pc | kiloparsec kpc | lightyear | AU
gram g gm | kilogram kg kilo | milligram mg | microgram | pound lb | ounce oz | ton | tonne
second s sec | millisecond ms | microsecond | nanosecond ns | minute min | hour h hr | day | week | month | year yr
decade | century centuries | liter L litre | milliliter mL ml millilitre | gallon gal | quart | pint | acre | hectare
kelvin K | celsius | fahrenheit | degree deg | radian rad | newton N | joule J | kilojoule kJ | calorie cal | watt W
kilowatt kW | volt V | ampere A amp | coulomb C | farad F | henry H henries | tesla T | ohm | hertz Hz | kilohertz kHz
pascal Pa | kilopascal kPa | atmosphere atm | electronvolt eV | kiloelectronvolt keV | megaelectronvolt MeV | erg | dyne
mole mol | rpm | mph | byte | bit | dollar USD | cent | euro EUR | rupee | yen | penny pennies | dime | nickel
person people persons | man men | woman women | child children | fish | sheep | deer | mice | geese | teeth | way | unit
"""
_ENTRIES = [entry.split() for entry in _UNITS.replace("\n", "|").split("|")]
_KNOWN = {spelling: entry[0] for entry in _ENTRIES for spelling in entry}
_NAMES = frozenset(_KNOWN.values())
_VARIABLE_NAMES = "m s g h A C F H J K L N T V W mg ms pc"
_VARIABLES = frozenset(_VARIABLE_NAMES.split())  # units that could as well be variables

_SCALES = {"hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12}
_POWERS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}
_POWERS_AFTER = {"squared": 2, "cubed": 3}
_BETWEEN = frozenset({"of", "for", "the"})
_LAST_NAMES = "left total each remaining away long old tall wide high deep altogether apiece"
_LAST = frozenset(_LAST_NAMES.split())
_NEVER_NAMES = """
zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen
nineteen twenty thirty forty fifty sixty seventy eighty ninety half halves third thirds quarter quarters fourth fourths fifth
fifths sixth sixths seventh sevenths eighth eighths ninth ninths tenth tenths eleventh elevenths twelfth twelfths twentieth
twentieths hundredth hundredths thousandth thousandths millionth millionths billionth billionths score scores gross googol
infinity infinite infinitely not none never nor neither without cannot negative positive minus plus below above under over
except but than least most about almost nearly approximately roughly between from through until and
divided multiplied modulo mod base bases root roots power powers exponent factorial factorials choose inverse inverses
reciprocal opposite percent percents percentage undefined indeterminate impossible imaginary complex does doesnt
exist exists isnt arent was were has have had are this thus yes wrong incorrect false true unknown plusminus remainder
remainders squares cubes sine sines cosine cosines tangent tangents logarithm logarithms absolute abs sqrt arcsin arccos
arctan sinh cosh tanh floor ceil ceiling log exp alpha beta gamma delta epsilon zeta eta theta iota kappa lambda omicron rho
sigma tau upsilon phi chi psi omega pis thetas alphas betas
"""
_NEVER = frozenset(_NEVER_NAMES.split())
_FUNCTION = re.compile(r"(?:sin|cos|tan|cot|sec|csc|log|ln|exp)[a-zA-Z]?|(?:arc|sqrt|sinh|cosh|tanh).*")

_PART = re.compile(
    r"(?P<gap> ?)(?:(?P<times>/|\\cdot(?![a-zA-Z])|\*|\.) ?)?(?P<word>[a-zA-Z]++)"
    r"(?: ?\^ ?(?:(?P<power>-?\d)|\{ ?(?P<braced>-?\d) ?\}))?"
)
_START = re.compile(r"(?<=[\s\d)}])(?<!_)[a-zA-Z]|(?<=[\d)}])\s++(?=[a-zA-Z])")
_OPERATOR_END = re.compile(
    r"(?:[-+*/^_=<>(\[{,:|]|\\(?:cdot|times|div|pm|mp|sqrt|frac|ln|log|exp|sin|cos|tan|cot|sec|csc))\s*$"
)
_CONSTANT = re.compile(
    r"(?:\\?(?:frac|sqrt|pi|binom|ln|log|exp|sin|cos|tan|cot|sec|csc)(?![a-zA-Z])|\\(?:cdot|times|div|pm)(?![a-zA-Z])"
    r"|[^a-zA-Z\\])*+"
)
MAX_CHARS = 80


@dataclass(frozen=True)
class Unit:
    """A unit as `written`: names with their powers, the number that words like `million` stand for."""

    written: str = ""
    powers: frozenset[tuple[str, int]] = frozenset()
    scale: int = 1
    is_spelt: bool = True  # no abbreviation, which could be a product of variables

    @property
    def may_be_variable(self) -> bool:
        """Whether it could as well be a variable: `5 m`, `mg`."""
        word = _PART.match(self.written)
        return word is not None and word["word"] in _VARIABLES


NO_UNIT = Unit()


def same_unit(first: Unit, second: Unit) -> bool:
    """Whether two units are the same, or one is not stated. `degrees` may be those of any scale of temperature."""
    one, other = first.powers, second.powers
    scales = {frozenset({(scale, 1)}) for scale in ("celsius", "fahrenheit")}
    is_degree = frozenset({("degree", 1)}) in (one, other) and bool({one, other} & scales)
    return not one or not other or one == other or is_degree


def read_unit(text: str) -> Unit | None:
    """The unit that a tidy text behind a number is, None if it is none. An empty text is `NO_UNIT`.

    Example: `read_unit(" m/s^2").powers == {("meter", 1), ("second", -2)}`
    """
    if not text.strip():
        return NO_UNIT
    reader = _Reader()
    place = 0
    while place < len(text.rstrip()):
        part = _PART.match(text, place)
        if part is None or len(text) > MAX_CHARS or not reader.takes(part):
            return None
        place = part.end()
    return reader.unit(text.strip())


class _Reader:
    """The words of one unit, from left to right."""

    def __init__(self):
        self.counts: Counter[str] = Counter()
        self.scale, self.sign, self.next_power = 1, 1, 1
        self.last, self.is_open, self.has_head, self.is_spelt = "", False, False, True

    def takes(self, part: re.Match[str]) -> bool:
        """Reads one word; False if it makes the whole no unit."""
        word, lower = part["word"], part["word"].lower()
        power = int(part["power"] or part["braced"] or 1)
        if part["times"]:
            if not self.last:  # an operator before the first unit: `2 * m`, `1/T`
                return False
            self.sign = -1 if part["times"] == "/" else 1
        singular = lower.removesuffix("s")
        if singular in _SCALES:
            self.scale *= _SCALES[singular]
            return not self.counts and not self.is_open and power == 1 and bool(part["gap"]) and not part["times"]
        if lower in {"per", "a", "an"}:  # `dollars a day`; the `a` of `\\sqrt{2} a` is a variable
            self.sign, self.is_open = -1, True
            return (bool(self.counts) or lower == "per") and power == 1  # `\\$18 per day` has lost its dollars
        if lower in _POWERS:
            self.next_power, self.is_open = _POWERS[lower], True
            return bool(part["gap"]) and power == 1
        if lower in _POWERS_AFTER:
            self.counts[self.last] *= _POWERS_AFTER[lower]
            return self.last in _NAMES
        if word in _BETWEEN:
            self.is_open = True
            return bool(self.counts)
        if lower in _LAST:
            return bool(self.counts)
        return self._takes_unit(word, power, bool(part["gap"]))

    def _takes_unit(self, word: str, power: int, is_apart: bool) -> bool:
        name = _name(word)
        if name is None:
            if not is_apart or not _is_noun(word):
                return False
            name = word.lower().removesuffix("s")
        if (self.last == "degree" and word in {"C", "F"}) or name in {"celsius", "fahrenheit"}:
            del self.counts["degree"]
            name = {"C": "celsius", "F": "fahrenheit"}.get(word, name)
        self.has_head |= name in _NAMES or _is_plural(word)
        self.is_spelt &= len(word) > 3
        self.counts[name] += self.sign * self.next_power * power
        self.sign, self.next_power, self.last, self.is_open = 1, 1, name, False
        return True

    def unit(self, written: str) -> Unit | None:
        if self.is_open or (self.counts and not self.has_head) or ("time" in self.counts and len(self.counts) > 1):
            return None
        powers = frozenset((name, power) for name, power in self.counts.items() if power and name != "unit")
        return Unit(written, _expanded(powers), self.scale, self.is_spelt)


def _expanded(powers: frozenset[tuple[str, int]]) -> frozenset[tuple[str, int]]:
    return frozenset({("mile", 1), ("hour", -1)}) if powers == {("mph", 1)} else powers


def _name(word: str) -> str | None:
    """The name of a known unit. Case counts in abbreviations."""
    for spelling in (word, word.lower()) if len(word) > 3 else (word,):
        for singular in (spelling, spelling.removesuffix("s"), spelling.removesuffix("es")):
            if singular in _KNOWN and (singular == spelling or len(singular) > 1):
                return _KNOWN[singular]
    return None


def _is_noun(word: str) -> bool:
    lower = word.lower()
    is_word = len(word) > 2 and bool(set(lower) & set("aeiouy")) and (word.islower() or word.istitle())
    return is_word and lower not in _NEVER and not _FUNCTION.fullmatch(lower)


def _is_plural(word: str) -> bool:
    return len(word) > 3 and word.endswith("s") and not word.endswith(("ss", "us", "is"))


def split_unit(formula: str) -> tuple[str, Unit]:
    """A tidy formula and the unit behind it, which may be `NO_UNIT`; an abbreviation only if no variable precedes it.

    Example: `split_unit("2\\\\pi cm")[0] == "2\\\\pi"`
    """
    for start in _START.finditer(formula, max(0, len(formula) - MAX_CHARS)):
        core, tail = formula[: start.start()], formula[start.start() :]
        if core.endswith((" ", "\n")):
            core, tail = core.rstrip(), " " + tail
        unit = read_unit(tail) if not _OPERATOR_END.search(core) else None
        if unit is not None and unit.scale == 1 and (unit.is_spelt or _CONSTANT.fullmatch(core)):
            return core, unit
    return formula, NO_UNIT
