"""Where a model comes from: a folder, a hub id, or the tiny family. Imports no torch."""

from pathlib import Path

from opd.errors import UserError
from opd.tiny import check_name, is_tiny, resolve


def locate(name: str, field: str) -> str:
    """What `from_pretrained` takes for `name`; a member of the tiny family is built on first use.

    Raises `UserError` naming `field` for a folder that does not exist or holds no model.
    """
    check_location(name, field)
    return str(resolve(name)) if is_tiny(name) else str(Path(name).expanduser()) if Path(name).is_dir() else name


def described(name: str) -> str:
    """`name` for an error message: says so where no folder of that name exists and the hub was asked instead."""
    return name if is_tiny(name) or Path(name).expanduser().is_dir() else f"{name} (no such folder, so taken for a hub id)"


def check_location(name: str, field: str) -> None:
    """Refuses what `locate` refuses, without building or fetching anything."""
    if is_tiny(name):
        check_name(name)
        return
    path = Path(name).expanduser()
    if path.is_dir():
        if not any((path / marker).is_file() for marker in ("config.json", "adapter_config.json")):
            raise UserError(f"{field}: {name} holds no model (no config.json)")
    elif name.count("/") != 1 or name.startswith((".", "/", "~")) or Path(name).parent.is_dir():
        raise UserError(f"{field}: no such folder {name!r}, and it is no hub id of the form owner/name")
