"""Writing files so that a kill at any moment leaves the old one or the new one."""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from opd.errors import UserError


def write_text(path: Path, text: str) -> None:
    """Replaces `path` atomically. Raises `UserError` when the disk is full."""
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: Path, content: bytes) -> None:
    """As `write_text`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    with explain_full_disk(path), partial.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder to fill that takes the place of `path` when the block ends well, and is removed when it does not."""
    partial = path.with_name(f".{path.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        with explain_full_disk(path):
            yield partial
            for file in partial.rglob("*"):
                if file.is_file():
                    with file.open("rb") as handle:
                        os.fsync(handle.fileno())
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    if path.exists():
        shutil.rmtree(path)
    os.replace(partial, path)


@contextmanager
def explain_full_disk(path: Path) -> Iterator[None]:
    """Turns a write that found no space into a `UserError` that names the file."""
    try:
        yield
    except OSError as error:
        if error.errno not in {errno.ENOSPC, errno.EDQUOT}:
            raise
        raise UserError(f"{path}: the disk is full; free some space and run again with --resume") from None


@contextmanager
def explain_unwritable(path: Path) -> Iterator[None]:
    """Turns any failure to write below `path` into a `UserError`."""
    try:
        with explain_full_disk(path):
            yield
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror or error}; name another folder") from None
