"""The tiny family: small Llama models and their data, made from nothing on first use and cached on disk.

`resolve("tiny:teacher")` is the path of a Hugging Face model folder, `resolve("tiny:heldout")` that of a JSONL file, and
`resolve("tiny:addition-pool")` that of a pool of prompts which a member wrote; `tiny:NAME@SEED` is the same member trained
from another seed (default 0). A model takes seconds to a minute or two on a CPU.

The cache is `$OPD_CACHE` or `~/.cache/opd`, one folder `tiny/<digest>/` for each member, digest = hash of its settings.
Importing this package, and resolving a member that is cached, imports neither torch nor transformers.
"""

from __future__ import annotations

import difflib
from pathlib import Path

from opd.errors import UserError
from opd.tiny.cache import cached
from opd.tiny.members import MEMBERS, Data, Model, Pool, digest

__all__ = ["check_name", "is_tiny", "member_of", "resolve"]

PREFIX = "tiny:"


def is_tiny(name: str) -> bool:
    """Whether `name` is meant for `resolve`, as in `tiny:teacher`; the member itself need not exist."""
    return name.startswith(PREFIX)


def resolve(name: str) -> Path:
    """The path of `tiny:NAME` or `tiny:NAME@SEED`: a model folder or a JSONL file, built first if it is not cached."""
    member_name, seed = _parse(name)
    member = MEMBERS[member_name]
    # The builders are imported inside, so that torch is loaded only when a model is really trained.
    if isinstance(member, Data):

        def build(folder: Path) -> None:
            from opd.tiny import arithmetic, long_addition, subtraction

            tasks = {"long": long_addition, "subtraction": subtraction, "pair": subtraction}
            task = tasks.get(member.split.partition("-")[0], arithmetic)
            task.write_rows(folder / member.file_name, member)

        return cached(digest(member_name), build) / member.file_name

    if isinstance(member, Pool):

        def write(folder: Path) -> None:
            from opd.tiny.pools import write_pool

            write_pool(folder / member.file_name, member, seed)

        return cached(digest(member_name, seed), write) / member.file_name

    def build_folder(folder: Path) -> None:
        from opd.tiny.models import build_model

        build_model(folder, member_name, member, seed)

    return cached(digest(member_name, seed), build_folder)


def member_of(name: str) -> Model | Data | Pool:
    """The settings of `tiny:NAME` or `tiny:NAME@SEED`. Raises `UserError` for a name that `resolve` does not know."""
    return MEMBERS[_parse(name)[0]]


def check_name(name: str) -> None:
    """Raises `UserError` for a name that `resolve` does not know, without building anything."""
    _parse(name)


def _parse(name: str) -> tuple[str, int]:
    member, at, seed = name.removeprefix(PREFIX).partition("@")
    if not is_tiny(name) or member not in MEMBERS:
        near = difflib.get_close_matches(member, MEMBERS, n=1)
        hint = f"did you mean {PREFIX}{near[0]}? " if near else ""
        allowed = ", ".join(PREFIX + known for known in MEMBERS)
        raise UserError(f"no tiny member is called {name!r}: {hint}There are {allowed}, each also with @SEED.")
    if at and not (seed.isascii() and seed.isdigit()):
        raise UserError(f"the seed in {name!r} must be a whole number from 0, as in {PREFIX}{member}@1")
    return member, int(seed or 0)
