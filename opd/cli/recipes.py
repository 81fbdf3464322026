"""`opd ls | cp | validate | config | doctor`: finding recipes, copying them, and checking them before they cost anything."""

import inspect
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.markup import escape

Listed = Literal["recipes", "sweeps", "sft", "suites", "protocols", "environments", "controllers", "terms", "masks"]
What = Annotated[Listed, typer.Argument(help="What to list.")]
Recipe = Annotated[str, typer.Argument(help="A shipped recipe (see opd ls) or the path of a YAML file.")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[key.sub=value]...", help="Values set anew.")]


def add_to(app: typer.Typer) -> None:
    app.command("ls")(list_recipes)
    app.command("cp")(copy)
    app.command("validate")(validate)
    app.command("config")(config)
    app.command("doctor")(doctor)


def list_recipes(what: What = "recipes") -> None:
    """List the shipped recipes (of opd train, sweep or sft), evaluation suites, protocols or plug-ins."""
    rows = list(_rows(what))
    width = max(len(name) for name, _ in rows)
    for name, about in rows:
        print(f"{name:<{width}}  {about}".rstrip())


def _rows(what: str) -> Iterator[tuple[str, str]]:
    """(name, what it is)."""
    if what == "suites":
        from opd.eval.suites import SUITES

        return ((name, f"{suite.size} problems, {suite.path} (unverified)") for name, suite in SUITES.items())
    if what == "protocols":
        from opd.eval.protocols import PROTOCOLS

        return ((name, f"{preset.paper}: {', '.join(preset.suites)}") for name, preset in PROTOCOLS.items())
    from opd.registry import CONTROLLERS, ENVIRONMENTS, MASKS, TERM_MAKERS

    registries = {"environments": ENVIRONMENTS, "controllers": CONTROLLERS, "terms": TERM_MAKERS, "masks": MASKS}
    if what in registries:
        return ((name, _about(kind, name in registries[what].builtin)) for name, kind in registries[what].each())
    from opd.recipes import shipped_recipes, shipped_sft, shipped_sweeps

    return {"recipes": shipped_recipes, "sweeps": shipped_sweeps, "sft": shipped_sft}[what]()


def _about(kind: type, builtin: bool) -> str:
    """The first sentence of a plug-in's docstring, which for those of the house is the module's."""
    text = inspect.cleandoc((sys.modules[kind.__module__].__doc__ if builtin else kind.__doc__) or "")
    sentence = re.split(r"(?<=[.!?])\s|\n\n", re.sub(r"^[A-Z][\w ]* `\w+`: ", "", text))[0]
    return " ".join(sentence.split()).removesuffix(".")


def copy(recipe: Recipe, destination: Annotated[Path, typer.Argument(help="A file or a folder.")] = Path()) -> None:
    """Copy a recipe, to change it."""
    from opd.recipes import copy_recipe

    print(copy_recipe(recipe, destination))


def validate(recipe: Recipe, overrides: Overrides = None) -> None:
    """Check a recipe, or every run of a sweep: keys, types, combinations, and that the files it names exist."""
    from opd.config import load_config, parse_overrides
    from opd.recipes import find_recipe, is_sweep, read_recipe
    from opd.validation import check_files, controller_notes

    if is_sweep(read_recipe(find_recipe(recipe))):
        from opd.sweep import plan_sweep

        runs = plan_sweep(recipe, parse_overrides(overrides or []), Path(os.devnull))  # a folder in which no run is done
        print(f"{recipe}: ok ({len(runs)} runs)")
        return
    loaded = load_config(recipe, overrides or [])
    check_files(loaded)
    for note in controller_notes(loaded):
        print(note if note.startswith("WARNING") else f"note: {note}", file=sys.stderr)
    print(f"{recipe}: ok")


def config(
    recipe: Annotated[str | None, typer.Argument(help="A recipe, to print with every value filled in.")] = None,
    overrides: Overrides = None,
) -> None:
    """Print a recipe with every value filled in or, without one, every field with its meaning."""
    from opd.config import load_config, to_yaml

    if recipe is not None:
        print(to_yaml(load_config(recipe, overrides or [])), end="")
        return
    from opd.reference import fields

    console = Console(highlight=False, soft_wrap=True)
    for key, default, text in fields():
        console.print(f"[bold]{escape(key)}[/bold] = {escape(default)}\n    {escape(text)}")


def doctor(recipe: Recipe, overrides: Overrides = None) -> None:
    """Look for what would make numbers silently wrong. Loads tokenizers and templates, never weights."""
    from opd.config import load_config
    from opd.validation import check_files

    loaded = load_config(recipe, overrides or [])
    check_files(loaded)
    from opd.doctor import examine

    marks = {"ok": "[green]ok[/green]  ", "warn": "[yellow]warn[/yellow]", "error": "[red]error[/red]"}
    console = Console(highlight=False, soft_wrap=True)
    findings = examine(loaded)
    for finding in findings:
        console.print(f"{marks[finding.level]} {escape(finding.subject)}: {escape(finding.text)}")
        if finding.fix:
            console.print(f"     fix: {escape(finding.fix)}")
    if any(finding.level == "error" for finding in findings):
        raise typer.Exit(2)
