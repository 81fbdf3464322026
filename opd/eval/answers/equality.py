"""When two written answers are the same.

Their structure is compared part by part: lists in any order, tuples and intervals in order and with their brackets. What is
left are numbers, compared exactly, texts, and formulas. Formulas are compared by value, or by math-verify's algebra where
they have none, and only in a worker process: `equivalent` may take long, `same_value` never does.

What suites and models leave out without meaning it does not count: a unit (two that are stated must be the same),
currency, a percent sign, the name in `x = 5` or `f(n) = n + 1`, the base of a correct `52_8`, what follows `\\approx`, the
brackets of a point whose coordinates are in order, the modulus of `5 \\pmod 7`. Of an equation whose left side is a quantity
(`m + n = 34`, `P(A) = 0.5`, `f(2) = 5`, `2 + 3 = 5`) the last side counts; one in an unknown (`\\cos x = 0.5`) is no number.
Signs, end points, repeated elements and the order in brackets do count, and the order of letters in capitals (`ABC`, `HTT`),
in `\\text{...}` and in syllables (`cat`); other letters are products. `x = 4, y = 3` is `4, 3` in this order.
`\\log` without a base is the natural logarithm.
"""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache

from opd.eval.answers.algebra import algebraically_equal
from opd.eval.answers.expressions import Ambiguous, Tree, Unreadable, read_expression
from opd.eval.answers.forms import MAX_CHARS, Form, name_of, read_form
from opd.eval.answers.notation import normalise, tidy
from opd.eval.answers.numbers import close, same_number
from opd.eval.answers.units import NO_UNIT, same_unit, split_unit
from opd.eval.answers.values import names_of, same_equation, same_value_everywhere, value_of

MAX_UNMATCHED = 40  # elements of a list that have no partner of the same text

_CHOICE = re.compile(r"\(?([A-J])(?:\)|[.:](?!\d))\s*(?![A-Z]$)[^\s,(]")
_LETTER = re.compile(r"(?<![a-zA-Z\\])[A-J](?=\)|[.:](?!\d))")
# Words and sequences, whose letters have an order: of points, of coin tosses (`HTT`), `cat`; `abc` is a product.
_CAPITALS = re.compile(r"(?:\\[a-z]+(?=[A-Z]))?[A-Z]{2,}")
_LETTERS = re.compile(r"(?!sin|cos|tan|cot|sec|csc|log|exp)[a-z]{3,}")
_SYLLABLE = re.compile(r"[b-df-hj-np-tv-z][aeiou][b-df-hj-np-tv-z]")
# What `... = 5` may state the value of; an equation in an unknown (`\cos x = 0.5`, `2x = 5`) states none.
_TERM = r"(?:10+)?(?:[a-zA-Z]|\\(?:alpha|beta|gamma))(?:_(?:\w|\{\w+\}))?|[A-Z]{2,3}|[a-zA-Z]'*\([-+]?[.\d]+\)"
_QUANTITY = re.compile(
    rf"-?(?:{_TERM})(?:[-+](?:{_TERM}))+"  # `m+n`
    r"|(?:P|Pr|E|Var|\\Pr)(?:\(.+\)|\[.+\])"  # `P(X = 1)`
    r"|(?!\\?(?:sin|cos|tan|ln|log|exp))\\?[a-zA-Z]+(?:_(?:\w|\{\w+\}))?'*(?:\^\{-1\})?\([-+.,\d]+\)"  # `f(2)`
    r"|\|[A-Z]{1,3}\||\[[A-Z]{3,}\]|m?\\angle[A-Z]{1,3}"  # `|AB|`
)
_TITLE = re.compile("[A-Za-z][a-z]{2,}")
_MODULUS = re.compile(r"(?<! ) *+(?:\\pmod *(?:\{[^{}]*\}|\d+)|\((?:\\?mod|\\text\{mod *\}) *\d+\))[ $.]*$")
_FUNCTION = re.compile(r"([a-zA-Z])\(([a-z])\)")

Leaf = Callable[[Form, Form], bool | None]


def same_value(extracted: str, answer: str) -> bool | None:
    """Whether two answers are the same, if that can be told without evaluating formulas; None if it cannot."""
    extracted = _without_modulus(extracted, answer)
    normal = normalise(answer)
    if normalise(extracted) == normal:
        return True
    if re.fullmatch("[A-J]", normal) and (choice := _CHOICE.match(tidy(extracted))):  # "(C) 12"
        return choice[1] == normal and len({*_LETTER.findall(tidy(extracted))}) == 1
    if len(extracted) > MAX_CHARS >= len(answer):  # no way of writing the answer, and algebra would run out of time
        return False
    return _same(read_form(extracted), read_form(answer), lambda *_: None)


def _without_modulus(extracted: str, answer: str) -> str:
    """`5 \\pmod 7` as 5, where the correct answer states no modulus."""
    return extracted if "mod" in answer or "mod" not in extracted else _MODULUS.sub("", extracted)


def equivalent(pair: tuple[str, tuple[str, ...]]) -> bool:
    """Whether an extracted answer equals any of the correct answers. It may never return."""
    extracted, answers = pair
    return any(_equivalent(extracted, answer) for answer in answers)


def _equivalent(extracted: str, answer: str) -> bool:
    extracted = _without_modulus(extracted, answer)
    same = same_value(extracted, answer)
    if same is None:
        same = _same(read_form(extracted), read_form(answer), _same_formula)
    return algebraically_equal(extracted, answer) if same is None else same


def _same(first: Form, second: Form, leaf: Leaf) -> bool | None:
    """`second` is the correct answer, which matters for percent signs, bases and units that could be variables."""
    if not same_unit(first.unit, second.unit) or (first.name and second.name and first.name != second.name):
        return False
    if first.kind == second.kind and first.text and first.text == second.text:
        return True
    if first.text.lower() == second.text.lower() and _TITLE.fullmatch(first.text) and _TITLE.fullmatch(second.text):
        return True
    kinds = {first.kind, second.kind}
    if "unreadable" in kinds:
        return None
    if kinds == {"number"}:
        assert first.number is not None
        assert second.number is not None
        lacks_variable = second.number.may_be_product and not first.unit.powers
        return not lacks_variable and same_number(first.number, second.number)
    if "equation" in kinds:
        return _same_equation(first, second, leaf)
    if "union" in kinds:
        return _unordered(first.parts, second.parts, leaf) if kinds == {"union"} else _unless_described(first, second)
    if kinds <= {"list", "tuple"}:
        return _same_collection(first, second, leaf)
    if kinds <= {"based", "number"}:
        return _same_digits(first.text, second.text)
    if kinds & {"list", "tuple"}:
        return _unless_described(first, second)
    if kinds & {"text", "based"}:
        return False
    if _are_words(first.text, second.text):
        return False
    if {first.text, second.text} & {r"\infty", r"-\infty"}:
        return False
    return leaf(first, second)


def _are_words(first: str, second: str) -> bool:
    if _CAPITALS.fullmatch(first) and _CAPITALS.fullmatch(second):
        return True
    letters = _LETTERS.fullmatch(first) and _LETTERS.fullmatch(second)
    return bool(letters and (_SYLLABLE.search(first) or _SYLLABLE.search(second)))


def _unless_described(first: Form, second: Form) -> bool | None:
    """A union, list or tuple equals no number, text or formula, unless a formula describes it (`x \\ne 2`)."""
    for form in (first, second):
        if form.kind == "formula":
            try:
                _tree(form.tidied)
            except Unreadable:
                return None
    return False


def _same_collection(first: Form, second: Form, leaf: Leaf) -> bool | None:
    lists = [form.kind == "list" for form in (first, second)]
    if all(lists):
        if _is_assignment(first) != _is_assignment(second):  # `x = 4, y = 3` is `4, 3`
            return _ordered(first.parts, second.parts, leaf)
        return _unordered(first.parts, second.parts, leaf)
    if any(lists):  # `1, 2` may stand for `(1, 2)` and the other way round, but not a set, an interval or `1:2`
        if {first.brackets, second.brackets} != {"", "()"}:
            return False
    elif first.brackets != second.brackets:
        return False
    return _ordered(first.parts, second.parts, leaf)


def _is_assignment(form: Form) -> bool:
    """Whether a list states the values of different names; `x_1 = 2, x_2 = 1` are solutions in any order."""
    names = {name_of(part.parts[0].tidied).partition("_")[0] for part in form.parts if part.kind == "equation"}
    return len(names - {""}) == len(form.parts) > 1


def _ordered(first: Sequence[Form], second: Sequence[Form], leaf: Leaf) -> bool | None:
    if len(first) != len(second):
        return False
    known = [_same(one, other, leaf) for one, other in zip(first, second)]
    return False if False in known else None if None in known else True


def _unordered(first: Sequence[Form], second: Sequence[Form], leaf: Leaf) -> bool | None:
    """Whether each element has a partner of its own. Any will do: but for a unit left out, equality is transitive."""
    if len(first) != len(second):
        return False
    texts = Counter(form.text for form in first) & Counter(form.text for form in second)
    remaining, others = _without(first, texts), _without(second, texts)
    if len(remaining) > MAX_UNMATCHED:
        return None
    undecided = False
    for form in remaining:
        known = [_same(form, other, leaf) for other in others]
        if True in known:
            others.pop(known.index(True))
        elif None not in known:
            return False
        else:
            undecided = True
    return None if undecided else True


def _without(forms: Sequence[Form], texts: Counter[str]) -> list[Form]:
    left = texts.copy()
    remaining = []
    for form in forms:
        if left[form.text] > 0:
            left[form.text] -= 1
        else:
            remaining.append(form)
    return remaining


def _same_equation(first: Form, second: Form, leaf: Leaf) -> bool | None:
    """Equations as such; `x = 5` and `f(x) = x + 1` also by what they give, where the other side has no name."""
    if first.kind == second.kind:
        units_agree = all(same_unit(side.unit, other.unit) for side in first.parts for other in second.parts)
        return leaf(first, second) if units_agree else False
    equation, other = (first, second) if first.kind == "equation" else (second, first)
    left, right = equation.parts
    if name_of(left.tidied) or left.kind == "tuple":  # `(x, y) = (1, 2)`
        return _same(right, other, leaf) if equation is first else _same(other, right, leaf)
    if name_of(right.tidied):
        return _same(left, other, leaf) if equation is first else _same(other, left, leaf)
    return _same(right, other, leaf) if equation is first and _is_quantity(left) else False


def _is_quantity(form: Form) -> bool:
    """Whether a side of an equation names a quantity (`m + n`, `P(A)`, `f(2)`, `|AB|`) or is arithmetic of numbers."""
    if form.kind == "number" or _QUANTITY.fullmatch(form.text.replace(" ", "")):
        return True
    try:
        return not names_of(_tree(form.tidied.replace(" degrees", "")))
    except (Unreadable, RecursionError):
        return False


def _same_digits(extracted: str, answer: str) -> bool:
    """Numbers in a base: that of the correct answer is understood where the other states none."""
    digits, bases = zip(*(text.partition("_")[::2] for text in (extracted, answer)))
    return digits[0].lstrip("0") == digits[1].lstrip("0") and bases[0] in {"", bases[1]}


def _same_formula(first: Form, second: Form) -> bool | None:
    """Two formulas, a formula and a number, or two equations, by their values."""
    try:
        if first.kind == "equation":
            return same_equation(*_sides(first, second))
        one, other = _tree_of(first), _tree_of(second)
    except Ambiguous:
        return False
    except (Unreadable, RecursionError):
        return None
    core, unit = split_unit(first.tidied)
    if unit is not NO_UNIT and not names_of(other):  # a unit that only the extracted answer states
        one = _tree(core)
    number = second.number
    if number is not None and number.value is not None and not (number.may_be_product or names_of(one)):
        other = ("value", number.value)  # `5 m`, of which the other leaves out the unit
    same = same_value_everywhere(one, other)
    if same is False:
        number, tree = (first.number, other) if first.number is not None else (second.number, one)
        if number is not None and number.digits and (value := value_of(tree)) is not None:
            return close(number, value)
    return same


def _sides(first: Form, second: Form) -> list[tuple[Tree, Tree]]:
    """Both sides of two equations; `f(n) = ...` is about the same variable as `f(x) = ...`."""
    heads = [_FUNCTION.fullmatch(form.parts[0].text) for form in (first, second)]
    sides = [tuple(map(_tree_of, form.parts)) for form in (first, second)]
    if heads[0] and heads[1] and heads[0][1] == heads[1][1]:
        sides[0] = tuple(_renamed(tree, heads[0][2], heads[1][2]) for tree in sides[0])
    return sides  # type: ignore[return-value]


def _renamed(tree: Tree, old: str, new: str) -> Tree:
    if tree[0] == "name":
        return ("name", new if tree[1] == old else tree[1].replace(f"({old})", f"({new})"))
    return tuple(_renamed(part, old, new) if isinstance(part, tuple) else part for part in tree)


def _tree_of(form: Form) -> Tree:
    if form.number is not None and form.number.value is not None and not form.unit.may_be_variable:
        return ("value", form.number.value)
    return _tree(form.tidied)


@lru_cache(maxsize=4096)
def _tree(text: str) -> Tree:
    return read_expression(text)
