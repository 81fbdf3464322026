"""Formulas to trees: the LaTeX and plain notation that answers use, read by recursive descent.

A tree is nested tuples: `("number", "2.5")`, `("name", "x_1")`, `("+", a, b)`, `("call", "sin", a)`, ... Anything that is
not understood raises `Unreadable`, so that a formula is never misread to decide a grade.
"""

import re
from typing import Any

MAX_DEPTH = 60
Tree = tuple[Any, ...]


class Unreadable(Exception):
    """The text is no formula of the kind that is understood."""


class Ambiguous(Unreadable):
    """A number follows a number: `2 3` is no product."""


_FUNCTION_NAMES = """
sin cos tan cot sec csc sinh cosh tanh arcsin arccos arctan asin acos atan ln log lg exp sqrt abs floor ceil Re Im
"""
_LETTER_NAMES = """
alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi rho sigma tau upsilon phi varphi
chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Upsilon Phi Psi Omega hbar ell mho odot angle star partial
"""
_ACCENT_NAMES = "dot ddot vec hat bar tilde overline underline widehat"
FUNCTIONS = frozenset(_FUNCTION_NAMES.split())
_LETTERS = frozenset(_LETTER_NAMES.split())
_ACCENTS = frozenset(_ACCENT_NAMES.split())
_TOKEN = re.compile(
    r"(?P<number>(?:\d++(?:\.\d*+)?|\.\d++)(?:[eE][+-]?\d++(?![\w.]))?)|\\(?P<command>[a-zA-Z]++)|(?P<letters>[a-zA-Z]++)"
    r"|(?P<symbol>[-+*/^_!'|()\[\]{}])|\s++|(?P<odd>.)",
    re.DOTALL,
)
_APPLIED = re.compile("(sin|cos|tan|cot|sec|csc|ln|log|exp)([xyzn])")  # `cosx`
_PAIRS = {"(": ")", "[": "]", "{": "}", "lfloor": "rfloor", "lceil": "rceil"}
_TIMES = {"*", "\\cdot", "\\times", "/", "\\div"}
_ENDS = {")", "]", "}", "+", "-", "\\rfloor", "\\rceil", "\\pm", *_TIMES}


def read_expression(text: str) -> Tree:
    """The tree of a tidy formula. Raises `Unreadable`. Linear in the text's length.

    Example: `read_expression("2x") == ("*", ("number", "2"), ("name", "x"))`
    """
    reader = _Reader(_tokens(text))
    try:
        tree = reader.sum()
    except RecursionError:
        raise Unreadable("nested too deeply") from None
    if reader.place < len(reader.tokens):
        raise Unreadable(text)
    return tree


def _tokens(text: str) -> list[str]:
    """Numbers, letters, symbols, and words with a backslash: `pi` and `sqrt` get theirs, other words are letters."""
    tokens: list[str] = []
    for match in _TOKEN.finditer(text):
        if match["odd"]:
            raise Unreadable(text)
        if match["letters"]:
            word = match["letters"]
            applied = _APPLIED.fullmatch(word)
            if word in FUNCTIONS or word == "pi":
                tokens.append("\\" + word)
            else:
                tokens += ["\\" + applied[1], applied[2]] if applied else word
        elif match["command"]:
            tokens.append("\\" + match["command"])
        elif not match.group().isspace():
            tokens.append(match.group())
    return tokens


class _Reader:
    def __init__(self, tokens: list[str]):
        self.tokens, self.place, self.depth, self.bars = tokens, 0, 0, 0

    @property
    def next(self) -> str:
        return self.tokens[self.place] if self.place < len(self.tokens) else ""

    def take(self, *expected: str) -> str:
        token = self.next
        if not token or (expected and token not in expected):
            raise Unreadable(f"{token!r} instead of {expected}")
        self.place += 1
        return token

    def taken(self, *tokens: str) -> bool:
        found = self.next in tokens and bool(self.next)
        self.place += found
        return found

    def sum(self) -> Tree:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise Unreadable("nested too deeply")
        tree = self.product()
        while self.next in {"+", "-"}:
            operator = self.take()
            tree = (operator, tree, self.product())
        self.depth -= 1
        return tree

    def product(self) -> Tree:
        negative = False
        while self.next in {"+", "-"}:
            negative ^= self.take() == "-"
        tree = self.power()
        while self.next and not (self.next == "|" and self.bars):
            if self.next in _TIMES:
                operator = "/" if self.take() in {"/", "\\div"} else "*"
                negative ^= self.taken("-")
                tree = (operator, tree, self.power())
            elif self.next in _ENDS:
                break
            elif _is_number(self.next) and _is_number(self.tokens[self.place - 1]):
                raise Ambiguous(self.next)
            else:
                is_fraction = self.next == "\\frac"
                factor = self.power()
                tree = ("+" if is_fraction and _is_mixed(tree, factor) else "*", tree, factor)
        return ("neg", tree) if negative else tree

    def power(self) -> Tree:
        tree = self.atom()
        while True:
            if self.taken("!"):
                tree = ("call", "fac2" if self.taken("!") else "factorial", tree)
            elif self.taken("^"):
                tree = ("^", tree, self.exponent())
            else:
                return tree

    def exponent(self) -> Tree:
        if self.taken("-"):
            return ("neg", self.exponent())
        self.taken("+")
        tree = self.argument()
        return ("^", tree, self.exponent()) if self.taken("^") else tree

    def argument(self) -> Tree:
        """What a command or `^` applies to: a group, or one token; of `\\frac12` the digits one by one."""
        return self.group() if self.next in _PAIRS else self.atom()

    def digit_or_group(self) -> Tree:
        token = self.next
        if token.isdigit() and len(token) > 1:
            self.tokens[self.place : self.place + 1] = [token[0], token[1:]]
        return self.argument()

    def group(self) -> Tree:
        closing = _PAIRS[self.take(*_PAIRS)]
        bars, self.bars = self.bars, 0
        tree = self.sum()
        self.take(closing)
        self.bars = bars
        return tree

    def atom(self) -> Tree:
        token = self.next
        if token in _PAIRS:
            return self.group()
        self.take()
        if _is_number(token):
            return ("number", token)
        if token == "|":
            self.bars += 1
            tree = self.sum()
            self.bars -= 1
            self.take("|")
            return ("call", "abs", tree)
        return self.command(token[1:]) if token[0] == "\\" else self.name(token)

    def command(self, name: str) -> Tree:
        if name in FUNCTIONS and name != "sqrt":
            return self.call(name)
        if name in {"lfloor", "lceil"}:
            tree = self.sum()
            self.take("\\" + _PAIRS[name])
            return ("call", name[1:], tree)
        if name == "sqrt":
            index = None
            if self.next == "[":
                index = self.group()
            return ("root", self.digit_or_group(), index)
        if name in {"frac", "binom"}:
            top = self.digit_or_group()
            return ("/" if name == "frac" else "binom", top, self.digit_or_group())
        if name in _ACCENTS:
            inside = self.flat()
            if inside.isdigit():  # a repeating decimal
                raise Unreadable(name)
            return self.name(f"\\{name} {inside}")
        if name == "pi":
            return ("constant", "pi") if self.next != "_" else self.name("\\pi")
        if name in _LETTERS:
            return self.name("\\" + name)
        raise Unreadable(name)

    def call(self, name: str) -> Tree:
        base = self.subscript() if name == "log" and self.taken("_") else None
        power = self.exponent() if self.taken("^") else None
        tree: Tree = ("call", name, self.group() if self.next in {"(", "[", "{"} else self.bare_argument())
        if base is not None:
            tree = ("/", ("call", "ln", tree[2]), ("call", "ln", base))
        if power == ("neg", ("number", "1")) and name in {"sin", "cos", "tan"}:
            return ("call", "arc" + name, tree[2])
        return tree if power is None else ("^", tree, power)

    def subscript(self) -> Tree:
        return self.argument()

    def bare_argument(self) -> Tree:
        """Of `\\cos 2 x`: the product up to the next sign, function or bracket."""
        tree = self.power()
        while (
            self.next
            and self.next not in _ENDS | {"*", "|", "(", "[", "\\cdot"}
            and self.next[1:] not in FUNCTIONS - {"sqrt"}
        ):
            tree = ("*", tree, self.power())
        if self.taken("/"):
            return ("/", tree, self.power())
        return tree

    def name(self, name: str) -> Tree:
        """A variable with its subscript and primes; `f(x)` and `I(0)` are names too, `k(k + 1)` is a product."""
        if self.taken("_"):
            name += "_" + self.flat()
        while self.taken("'"):
            name += "'"
        if self.tokens[self.place : self.place + 4] in (["^", "{", "\\prime", "}"], ["^", "{", "'", "}"]):
            self.place += 4
            name += "'"
        if self.tokens[self.place : self.place + 2] == ["^", "\\prime"]:
            self.place += 2
            name += "'"
        inside = self.tokens[self.place : self.place + 3]
        if len(inside) == 3 and inside[0] == "(" and inside[2] == ")" and (inside[1].isalpha() or inside[1].isdigit()):
            self.place += 3
            return ("name", f"{name}({inside[1]})")
        return ("constant", name) if name in {"e", "i"} else ("name", name)

    def flat(self) -> str:
        """A subscript or accented group as text."""
        if not self.taken("{"):
            return self.take()
        parts: list[str] = []
        while not self.taken("}"):
            token = self.take()
            if token == "{":
                raise Unreadable(token)
            parts.append(token)
        return "".join(parts)


def _is_number(token: str) -> bool:
    return token[0].isdigit() or token[0] == "."


def _is_mixed(first: Tree, second: Tree) -> bool:
    """`1\\frac{4}{5}`: a whole number before a proper fraction of whole numbers."""
    if first[0] != "number" or second[0] != "/" or any(part[0] != "number" for part in second[1:]):
        return False
    top, bottom = second[1][1], second[2][1]
    return first[1].isdigit() and top.isdigit() and bottom.isdigit() and len(bottom) < 10 and int(top[:10]) < int(bottom)
