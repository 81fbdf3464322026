"""A folder on disk that is built once: whole or absent, whoever else builds it at the same time."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path


def root() -> Path:
    """The folder that holds one folder for each cached member."""
    return Path(os.environ.get("OPD_CACHE") or Path.home() / ".cache" / "opd") / "tiny"


def cached(key: str, build: Callable[[Path], None]) -> Path:
    """The folder of `key`; if absent, `build` fills an empty sibling folder, which is then renamed to it."""
    final = root() / key
    if final.is_dir():
        return final
    from filelock import FileLock  # not needed on a hit

    final.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(final.with_suffix(".lock")):  # whoever comes second waits, then finds the folder
        if final.is_dir():
            return final
        with tempfile.TemporaryDirectory(prefix=f"{key}.", dir=final.parent) as temporary:
            # TemporaryDirectory is private to its owner; a folder made inside it has the usual permissions.
            unfinished = Path(temporary) / key
            unfinished.mkdir()
            build(unfinished)
            unfinished.rename(final)
    return final
