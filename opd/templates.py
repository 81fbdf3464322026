"""Texts that hold `{names}`, each of which stands for something: which of them a template may have.

Other braces are text: those of LaTeX commands (`\\frac{a}{b}`), of its sub- and superscripts (`x_{max}`), and those in which
more or less than one word stands.
"""

import re
from collections.abc import Iterable

from opd.errors import UserError

LATEX = r"\\[A-Za-z]+(?:\{[^{}]*\})+|[_^]\{[^{}]*\}"
NAME = re.compile(rf"{LATEX}|\{{([A-Za-z_]\w*)\}}")


def check_template(field: str, template: str, names: Iterable[str], needed: Iterable[str] = ()) -> None:
    """Raises `UserError` naming `field` for a template without one of the `needed` names, or with one not of `names`."""
    for name in needed:
        if f"{{{name}}}" not in template:
            raise UserError(f"{field}: it must contain {{{name}}}")
    for found in NAME.finditer(template):
        if found[1] is not None and found[1] not in names:
            known = ", ".join(f"{{{name}}}" for name in names)
            raise UserError(
                f"{field}: {{{found[1]}}} stands for nothing; allowed is {known}, and {{ {found[1]} }} with spaces is text"
            )
