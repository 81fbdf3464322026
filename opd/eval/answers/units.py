"""Units behind a number or formula. They do not count: suites differ in whether their answers keep them."""

import re

_TAIL = re.compile(r"(?:[a-zA-Z]++|\^ ?(?:-?\d|\{ ?-?\d ?\})|\\cdot |[ /*.])*+(?<![/*])")
_START = re.compile(r"(?<=[\s\d)}])(?<!_)[a-zA-Z]|(?<=[\d)}])\s++(?=[a-zA-Z])")
_WORD = re.compile(r"( ?)([a-zA-Z]++)")
_SHORT_NAMES = """
cm mm km nm in ft yd mi kg lb lbs oz hr hrs min sec mL ml mph rpm rad deg eV keV MeV Hz kHz Pa kPa atm mol yr AU kpc
"""
_VARIABLE_NAMES = "m s g h A C F H J K L N T V W mg ms pc"
_OTHER_NAMES = "sqrt sinh cosh tanh arcsin arccos arctan choose base over modulo"
_SHORT = frozenset(_SHORT_NAMES.split())
_VARIABLES = frozenset(_VARIABLE_NAMES.split())  # units that could as well be variables
_PARTICLES = frozenset({"a", "per", "of", "sq"})
_NEVER = frozenset(_OTHER_NAMES.split())
MAX_CHARS = 80


def is_unit(text: str) -> bool:
    """Whether a tidy text is a unit: spelt words, known abbreviations, and their powers. An empty text is one."""
    if len(text) > MAX_CHARS or not _TAIL.fullmatch(text) or text.lstrip().startswith("^"):
        return False
    for space, word in _WORD.findall(text):
        spelt = len(word) > 3 or (len(word) == 3 and space and set(word.lower()) & set("aeiou"))
        known = spelt or word in _SHORT or word in _VARIABLES or (word in _PARTICLES and space)
        if word in _NEVER or not known:
            return False
    return True


def may_be_variable(unit: str) -> bool:
    """Whether a unit could as well be a variable: `5 m`, `mg`."""
    word = _WORD.match(unit)
    return word is not None and word[2] in _VARIABLES


def split_unit(formula: str) -> tuple[str, str]:
    """A tidy formula and the unit behind it, which may be empty. Example: `split_unit("2\\\\pi cm") == ("2\\\\pi", "cm")`"""
    for start in _START.finditer(formula, max(0, len(formula) - MAX_CHARS)):
        place = start.start()
        if is_unit(formula[place:]):
            return formula[:place].rstrip(), formula[place:].strip()
    return formula, ""
