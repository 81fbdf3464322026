"""The one error a user can cause."""

from collections.abc import Iterable
from dataclasses import MISSING, fields, is_dataclass
from typing import Any


class UserError(ValueError):
    """A mistake the user can mend. The message is one line: the field, what is wrong with it, and the fix.

    The command line prints it and exits with code 2; Python callers may catch it as a `ValueError`.
    """


def refuse_unused(config: Any, names: Iterable[str], field: str, why: str) -> None:
    """Refuses those options `names` of a configuration that are set although they have no effect. `why`: "with" or "without"
    what.

    Raises `UserError` naming the option below `field`.
    """
    unset = {one.name: one.default if one.default_factory is MISSING else one.default_factory() for one in fields(config)}
    for name in names:
        if getattr(config, name) != (default := unset[name]):
            fix = f", or set it to {_spelt(default)} where it is inherited" if _spelt(default) else ""
            raise UserError(f"{field}.{name}: has no effect {why}; leave it out{fix}")


def _spelt(default: Any) -> str:
    """A default as a recipe has it; of longer texts nothing."""
    if isinstance(default, str):
        return default if default.isidentifier() else ""
    return "null" if default is None or is_dataclass(default) else str(default).lower()
