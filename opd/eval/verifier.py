"""A user's own verifier: `reward: FILE.py:FUNCTION`."""

import math
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, cast

from opd.errors import UserError

Verifier = Callable[[str, str | list[str] | None, dict[str, Any]], bool | float]


def locate_verifier(spec: str, field: str = "reward") -> tuple[Path, str]:
    """The file and the function's name of `FILE.py:FUNCTION`, without executing anything.

    Raises UserError naming `field` if the spec is malformed or the file is missing.
    """
    file, colon, name = spec.rpartition(":")
    if not colon or not file.endswith(".py") or not name.isidentifier():
        raise UserError(f"{field}: {spec!r} is not of the form FILE.py:FUNCTION")
    path = Path(file).expanduser().resolve()
    if not path.is_file():
        raise UserError(f"{field}: there is no file {path}")
    return path, name


def load_verifier(spec: str) -> Verifier:
    """Loads FUNCTION from FILE.py: `FUNCTION(response, answer, prompt) -> bool | float`, executing the file.

    `answer` is the prompt's correct answer as the data set has it (None if it has none), `prompt` the prompt's record.
    Raises UserError if the spec is malformed, the file is missing or fails to load, or it has no such function.

    Example: `load_verifier("rewards/length.py:is_short")("Yes.", None, {})`
    """
    path, name = locate_verifier(spec)
    module_spec = spec_from_file_location(f"opd_verifier_{path.stem}", path)
    assert module_spec is not None
    assert module_spec.loader is not None
    module = module_from_spec(module_spec)
    try:
        module_spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise UserError(f"reward: {path} does not load: {type(error).__name__}: {error}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise UserError(f"reward: {path} defines no function {name!r}")
    return cast(Verifier, function)


def verifier_score(verifier: Verifier, task: tuple[str, str | list[str] | None, dict[str, Any]]) -> float:
    """A verifier's score as a finite float. Raises TypeError if it returns anything else."""
    score = verifier(*task)
    if not hasattr(score, "__float__") or not math.isfinite(float(score)):
        raise TypeError(f"it returned {score!r}; return a bool or a finite number")
    return float(score)
