"""A user's own function of the section `reward:`, called in worker processes that end with a hung call, or with the run."""

import inspect
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opd.errors import UserError
from opd.eval.pool import WorkerPool
from opd.eval.verifier import Verifier, load_verifier, locate_verifier, verifier_score
from opd.processes import die_with_parent

if TYPE_CHECKING:  # a worker needs no numpy
    from opd.eval.grading import Item

MAX_WORKERS = 8
LOAD_S = 60.0  # to load a file, which may import large packages
MAX_CHARACTERS = 300  # of an exception's own words


class Function:
    """`spec` is the `FILE.py:FUNCTION` of the recipe's field `field`; a call may take `limit_s` seconds.

    Raises `UserError` naming the field for a function that does not load, or that does not take what it is given.
    """

    def __init__(self, spec: str, field: str, limit_s: float) -> None:
        self.spec, self.field, self.limit_s = spec, field, limit_s
        path, name = locate_verifier(spec, field)
        self._refuse_unloadable(f"{path}:{name}")
        num_workers = min(MAX_WORKERS, len(os.sched_getaffinity(0)))
        self._pool = WorkerPool(partial(_calling, f"{path}:{name}"), num_workers, limit_s)

    def _refuse_unloadable(self, located: str) -> None:
        """Loads it once, in a worker of its own: the start of those that make the calls is not timed so strictly."""
        pool = WorkerPool(_loading, 1, LOAD_S)
        try:
            (problem,) = pool.run([located])
        finally:
            pool.close()
        if problem is None:
            raise UserError(
                f"{self.field}: {self.spec} did not load within {LOAD_S:g} s, or ended its process; move what takes "
                "so long out of its file's top level"
            )
        if problem:
            raise UserError(f"{self.field}: {self.spec} {problem}")

    def __call__(self, items: Sequence["Item"]) -> list[float | None]:
        """What it returns for each item; None for a call that ran over the limit, or ended its process twice. Blocks.

        Raises `UserError` naming the field, the prompt and the line for a call that raises, or that returns no number.
        """
        try:
            found = self._pool.run([(item.response, item.answer, item.prompt) for item in items])
        except RuntimeError as error:  # the file changed since it was loaded first, or the run is over
            raise UserError(f"{self.field}: {self.spec}: {error}") from None
        for item, value in zip(items, found):
            if isinstance(value, str):
                raise UserError(f"{self.field}: {self.spec} failed on prompt {item.prompt['id']}: {value}")
        return found

    def close(self) -> None:
        """Ends the workers."""
        self._pool.close()


def _loading() -> Callable[[str], str]:
    _become_worker()
    return _load_problem


def _calling(located: str) -> Callable[[Any], float | str]:
    _become_worker()
    return partial(_call, load_verifier(located), located.rpartition(":")[0])


def _become_worker() -> None:
    die_with_parent()
    sys.stdout = sys.stderr  # what a function prints shows at once, and apart from the command's own output


def _load_problem(located: str) -> str:
    """What keeps the function from being called, in words; empty where nothing does."""
    try:
        function = load_verifier(located)
    except UserError as error:
        if error.__cause__ is None:
            return f"does not load: {str(error).removeprefix('reward: ')}"
        return f"does not load: {_in_words(error.__cause__, located.rpartition(':')[0])}"
    try:
        signature = inspect.signature(function)
        signature.bind("", None, {})
    except TypeError:
        return f"takes {signature}, but is given three arguments: (response, answer, row)"
    except ValueError:  # it has none, as some functions in C
        pass
    return ""


def _call(function: Verifier, path: str, task: tuple[str, str | list[str] | None, dict[str, Any]]) -> float | str:
    """The function's value, or what it raised in words."""
    try:
        return verifier_score(function, task)
    except BaseException as error:  # SystemExit too: the call failed, the worker goes on
        return _in_words(error, path)


def _in_words(error: BaseException, path: str) -> str:
    """The exception on one line, with the last of the user's own lines that it came through."""
    said = " ".join(f"{type(error).__name__}: {error}".split())
    said = said if len(said) <= MAX_CHARACTERS else said[:MAX_CHARACTERS] + "..."
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    return f"{said} ({Path(path).name}, line {own[-1].lineno}: {own[-1].line})" if own else said
