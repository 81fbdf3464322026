"""Finding, reading and copying recipes: the shipped YAML files and those of the user."""

import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import MarkedYAMLError, YAMLError
from yaml.parser import ParserError
from yaml.scanner import ScannerError

from opd.errors import UserError
from opd.spelling import nearest

SHIPPED = Path(__file__).parent / "configs"


def shipped_recipes() -> Iterator[tuple[str, str]]:
    """(name, first comment line) of each shipped recipe of `opd train`, sorted. Names use slashes below `configs/`."""
    return (row for row in _shipped() if not row[0].startswith(("accelerate/", "sweeps/", "sft/")))


def shipped_sweeps() -> Iterator[tuple[str, str]]:
    """(name, first comment line) of each shipped sweep, sorted."""
    return (row for row in _shipped() if row[0].startswith("sweeps/"))


def shipped_sft() -> Iterator[tuple[str, str]]:
    """(name, first comment line) of each shipped recipe of `opd sft`, sorted."""
    return (row for row in _shipped() if row[0].startswith("sft/"))


def _shipped() -> Iterator[tuple[str, str]]:
    for name in sorted(path.relative_to(SHIPPED).with_suffix("").as_posix() for path in SHIPPED.rglob("*.yaml")):
        first = (SHIPPED / f"{name}.yaml").read_text(encoding="utf-8").partition("\n")[0]
        yield name, first.removeprefix("#").strip() if first.startswith("#") else ""


def find_recipe(recipe: str | Path) -> Path:
    """The file of a shipped name or a path. Raises `UserError` when there is none."""
    path = Path(recipe)
    if path.suffix in {".yaml", ".yml"} and path.is_file():
        return path
    shipped = SHIPPED / f"{recipe}.yaml"
    if shipped.is_file():
        return shipped
    if path.suffix in {".yaml", ".yml"}:
        raise UserError(f"recipe: no such file {str(recipe)!r}")
    names = [name for name, _ in _shipped()]
    raise UserError(f"recipe: {str(recipe)!r} is neither a file nor shipped (see opd ls){nearest(str(recipe), names)}")


def read_recipe(path: Path, seen: tuple[Path, ...] = ()) -> dict[str, Any]:
    """The mapping in `path`, over those that its `defaults:` names (one or a list; later ones win).

    A name is looked up beside the file first, then among the shipped recipes. Raises `UserError` for bad YAML, a
    file that is no mapping, or files that inherit from each other in a circle.
    """
    path = path.resolve()
    if path in seen:
        raise UserError(f"defaults: {path.name} inherits from itself")
    raw = read_yaml(path)
    parents = raw.pop("defaults", None) or []
    if not isinstance(parents, str | list) or not all(isinstance(parent, str) for parent in parents):
        raise UserError(f"{path}: defaults: expected the name of a recipe or a list of names, found {parents!r}")
    merged: dict[str, Any] = {}
    for parent in [parents] if isinstance(parents, str) else parents:
        beside = path.parent / f"{parent}.yaml"
        merged = overlay(merged, read_recipe(beside if beside.is_file() else find_recipe(parent), (*seen, path)))
    return overlay(merged, raw)


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file. Raises `UserError` for bad YAML and for anything but a mapping."""
    try:
        loaded = OmegaConf.load(path)
    except (ScannerError, ParserError) as error:
        raise UserError(f"{path}: not valid YAML{_place(path, error)}") from None
    except (YAMLError, OmegaConfBaseException) as error:
        raise UserError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None
    raw = OmegaConf.to_container(loaded)
    if not isinstance(raw, dict):
        raise UserError(f"{path}: a recipe is a mapping of names to values")
    return {str(name): value for name, value in raw.items()}


def _place(path: Path, error: MarkedYAMLError) -> str:
    """Where a YAML file breaks off, with the key in that line."""
    if error.problem_mark is None:
        return f": {error.problem}"
    number = error.problem_mark.line
    lines = path.read_text(encoding="utf-8").splitlines()
    key = re.match(r"[\s-]*([\w.-]+)\s*:", lines[number]) if number < len(lines) else None
    where = f" in line {number + 1}" + (f", at {key[1]}" if key else "")
    return f"{where}: {error.problem}; quote text that holds {{, [, # or a colon, and close what is open"


def is_sweep(raw: Mapping[str, Any]) -> bool:
    """Whether the content of a file is that of a sweep (`opd.sweep`)."""
    return "variants" in raw


class Anew(dict[str, Any]):
    """A section that takes the place of the one below, where others are merged with it."""


def overlay(base: Mapping[Any, Any], above: Mapping[Any, Any]) -> dict[str, Any]:
    """`base` with the values of `above`; mappings are merged, anything else is replaced.

    Where the prompts get another `type`, nothing of the old section stays; of another environment, no `options`.
    """
    merged = {str(name): value for name, value in base.items()}
    for name, value in above.items():
        below = {} if isinstance(value, Anew) else merged.get(str(name))
        if isinstance(below, Mapping) and isinstance(value, Mapping):
            merged[str(name)] = overlay(_still_meant(str(name), below, value), value)
        else:
            merged[str(name)] = value
    return merged


def _still_meant(section: str, below: Mapping[Any, Any], above: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """What of `below` says something in the section that `above` makes of it."""
    if section not in ("prompts", "environment"):
        return below
    if section == "prompts" and "type" in above and above["type"] != below.get("type", "dataset"):
        return {}
    renamed = "name" in below and above.get("name", below["name"]) != below["name"]
    return {name: value for name, value in below.items() if name != "options" or not renamed}


def copy_recipe(recipe: str, destination: Path) -> Path:
    """Copies a recipe to `destination` (a file, or a folder). Raises `UserError` rather than overwrite one."""
    source = find_recipe(recipe)
    target = destination / source.name if destination.is_dir() else destination
    if target.exists():
        raise UserError(f"{target} exists: choose another name")
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
    return target
