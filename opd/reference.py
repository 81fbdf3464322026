"""The reference page: every field of a recipe with its default and the string below it in the source."""

import ast
import dataclasses
import inspect
import json
from collections.abc import Iterator
from textwrap import dedent
from typing import Any, get_args, get_origin, get_type_hints

from opd.config import RunConfig
from opd.registry import CONTROLLERS, ENVIRONMENTS, MASKS, PROMPT_SOURCES, TERM_MAKERS

PLUGINS = {"rollout": CONTROLLERS, "terms": TERM_MAKERS, "masks": MASKS}


def fields() -> Iterator[tuple[str, str, str]]:
    """(dotted key, default, help) of every field, plug-ins included, in the order of the recipe."""
    for key, default, text in _fields(RunConfig, ""):
        yield key, default, text
        if key == "prompts":
            for name, source in PROMPT_SOURCES.each():
                for inner in _fields(source.Config, "prompts."):
                    yield inner[0], inner[1], f"(type: {name}) {inner[2]}"
            for name, environment in ENVIRONMENTS.each():
                for inner in _fields(environment.Config, "prompts.options."):
                    yield inner[0], inner[1], f"(name: {name}) {inner[2]}"
        elif key in PLUGINS:
            for name, plugin in PLUGINS[key].each():
                yield from _fields(plugin.Config, f"{key}.{name}.")


def _fields(kind: type, prefix: str) -> Iterator[tuple[str, str, str]]:
    texts, hints = _strings_below(kind), get_type_hints(kind)
    for field in dataclasses.fields(kind):
        key = f"{prefix}{field.name}"
        parts = [part for part in (hints[field.name], *get_args(hints[field.name])) if dataclasses.is_dataclass(part)]
        if not parts or field.name in texts:
            yield key, _default(field), texts.get(field.name, "")
        for part in parts:
            inner = f"{key}.NAME." if get_origin(hints[field.name]) is dict else f"{key}."
            yield from _fields(part, inner)  # type: ignore[arg-type]


def _default(field: "dataclasses.Field[Any]") -> str:
    value = field.default if field.default is not dataclasses.MISSING else None
    if field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    if isinstance(value, str) and "\n" in value:
        return json.dumps(value)
    return "required" if value == "???" else "null" if value is None else str(value)


def _strings_below(kind: type) -> dict[str, str]:
    """The string literal that follows each annotated field in the class body, those of its bases included."""
    texts: dict[str, str] = {}
    for base in reversed(kind.__mro__[1:-1]):
        texts |= _strings_below(base)
    body = ast.parse(dedent(inspect.getsource(kind))).body[0]
    assert isinstance(body, ast.ClassDef)
    for field, after in zip(body.body, body.body[1:]):
        named = isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if named and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            texts[field.target.id] = " ".join(str(after.value.value).split())  # type: ignore[union-attr]
    return texts
