"""One notation for answers: what LaTeX, Unicode and programming languages write differently, and what only decorates.

Every rewriting is linear in the answer's length, since this runs outside the grader's time limit.
"""

import re

_UNICODE = str.maketrans(
    {
        "−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "÷": "/", "π": r"\pi ", "√": r"\sqrt ",
        "∞": r"\infty ", "°": " degrees ", "∪": r"\cup ", "∈": r"\in ", "±": r"\pm ", "≤": r"\le ", "≥": r"\ge ",
        "≈": r"\approx ", "²": "^2", "³": "^3", "½": r"\frac{1}{2}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}",
        "θ": r"\theta ",
        "€": "", "£": "", "…": r"\ldots ", "“": "", "”": "", "\u00a0": " ", "\u2009": " ", "\u202f": " ",
    }
)  # fmt: skip

_NOT_NAME = r"(?![a-zA-Z])"
_REWRITES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in [
        (r"\\\\", r"\\row "),  # a line break, which would hide what follows it
        (r"\\?\$|\\[()]|\\\[|\\\]", ""),
        (r"^\s*\*\*(?=[^*])|(?<=[^*])\*\*\s*$", ""),  # Markdown's bold
        (r"(?<=\d)(?:\{,\}|,\\!)\s*(?=\d{3}(?!\d))", ""),  # thousands
        (r"(?<=\d)\\,(?=\d{3}(?!\d))", ""),
        (r"\\!", ""),
        (r"\\[,;: ]|~|\\(?:quad|qquad|displaystyle|textstyle|limits|thinspace)" + _NOT_NAME, " "),
        (r"\\(?:left|right|[bB]igg?[lr]?)" + _NOT_NAME + r"\s*\.?", ""),
        (r"\\[dtc]frac" + _NOT_NAME, r"\\frac"),
        (r"\\mathbb\s*(?:\{\s*R\s*\}|R" + _NOT_NAME + ")", r"(-\\infty ,\\infty )"),
        (
            r"\\(?:text(?:bf|it|rm|normal)?|math(?:rm|bf|it|sf|bb|cal)|mbox|hbox|boldsymbol|bm|operatorname|boxed|fbox|emph)"
            + _NOT_NAME
            + r"\s*(?:\{([^{}]*)\})?",
            r"\1",
        ),
        (r"\^\s*(?:\{\s*\\circ\s*\}|\\circ" + _NOT_NAME + r")|\\degree" + _NOT_NAME, " degrees "),
        (r"\\(?:leqslant|leq|le)" + _NOT_NAME + "|<=", r"\\le "),
        (r"\\(?:geqslant|geq|ge)" + _NOT_NAME + "|>=", r"\\ge "),
        (r"\\lt" + _NOT_NAME, "<"),
        (r"\\gt" + _NOT_NAME, ">"),
        (r"\\(?:lvert|rvert|vert)" + _NOT_NAME, "|"),
        (r"\\(?:langle)" + _NOT_NAME, "("),
        (r"\\(?:rangle)" + _NOT_NAME, ")"),
        (r"\\lbrace" + _NOT_NAME, r"\\{"),
        (r"\\rbrace" + _NOT_NAME, r"\\}"),
        (r"\\varnothing", r"\\emptyset"),
        (r"^\s*(?i:(?:the )?(?:final )?answer(?: is)?) ?: ?", ""),
        (r"\\%", "%"),
        (r"\bnp\.|\bmath\.|\bsp\.", ""),
        (r"\*\*", "^"),
        (r"\s+", " "),
    ]
]
_TRAILING = re.compile(r"(?<!\.)[.,;]$")  # no ellipsis
_SPACE = re.compile(r"(?<!\d) | (?!\d)")  # "1 1/2" is not "11/2"
_CHOICE = re.compile(r"\(([A-Za-z])\)")
_THOUSANDS = re.compile(r"[+-]?\d{1,3}(?:(?:,\d{3})+|(?: \d{3})+)(?:\.\d*)?")


def tidy(answer: str) -> str:
    """The answer without delimiters, fonts, sizes and kinds of space; single spaces are kept.

    Example: `tidy("$\\\\dfrac{1}{2}\\\\text{ cm}$.") == "\\\\frac{1}{2} cm"`
    """
    answer = answer.translate(_UNICODE)
    for pattern, replacement in _REWRITES:
        answer = pattern.sub(replacement, answer)
    return _TRAILING.sub("", answer.strip()).strip()


def normalise(answer: str) -> str:
    """The tidy answer without spaces, thousands separators and the brackets of a multiple-choice letter.

    Two answers with the same normal text are the same. Example: `normalise("\\\\left( 3, x \\\\right)") == "(3,x)"`
    """
    return without_spaces(tidy(answer))


def without_spaces(tidied: str) -> str:
    """`normalise` of a text that is tidy already."""
    if _THOUSANDS.fullmatch(tidied):  # with its spaces: `2, 100` are two numbers
        return re.sub("[, ]", "", tidied)
    text = _SPACE.sub("", tidied)
    choice = _CHOICE.fullmatch(text)
    return choice[1] if choice else text
