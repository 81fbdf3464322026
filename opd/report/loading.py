"""Finding runs and results below the paths a user names, and reading them as they are.

A run that still goes on or was killed is read as far as it got. Only JSON and YAML are read: nothing here needs torch.
"""

import json
import math
import operator
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from opd.errors import UserError
from opd.recipes import read_recipe
from opd.report.results import HELDOUT, HELDOUT_AGAIN, Result, by_domain, parse_result

BESIDE = ("discarded_tokens", "dropped_tokens", "written_tokens")  # metrics: generated, and not among `sampled_tokens`
CONTENT_BYTES = 4096  # at the head of a JSON file: enough to see whether it is a result


@dataclass(frozen=True)
class Run:
    """A training run, or the results of `opd eval` (then without settings and metrics).

    `metrics` are columns [T] of metrics.jsonl; `results` are by suite, then by the step of the checkpoint (-1: none).
    """

    path: Path
    settings: Mapping[str, Any]
    metrics: Mapping[str, np.ndarray]
    results: Mapping[str, Mapping[int, Result]]
    finished: bool

    @property
    def steps(self) -> int:
        """The last step that was done."""
        return int(self.metrics["step"][-1]) if self.metrics else 0

    def last(self, suite: str) -> Result | None:
        """The evaluation of the latest checkpoint."""
        found = self.results.get(suite, {})
        return found[max(found)] if found else None

    def start(self, suite: str) -> Result | None:
        """The evaluation before the first step."""
        return self.results.get(suite, {}).get(0)

    def spent(self, name: str, steps: Sequence[int] | np.ndarray) -> np.ndarray:
        """The sum of metric `name` over the steps up to each of `steps`, as `steps` is shaped; NaN where unknown.

        Sampled tokens are all that were generated: those too that were thrown away, where a rollout was stopped or a group
        of rollouts dropped, and conditions written for a term.
        """
        if not self.metrics or name not in self.metrics:
            return np.full(len(steps), np.nan)
        values = self.metrics[name]
        for more in BESIDE if name == "sampled_tokens" else ():
            if more in self.metrics:
                values = values + np.nan_to_num(self.metrics[more])
        total = np.concatenate([[0.0], np.cumsum(values)])
        return total[np.searchsorted(self.metrics["step"], steps, side="right")]


@dataclass(frozen=True)
class Group:
    """Runs of one variant that differ in their seeds."""

    name: str
    runs: Sequence[Run]

    @property
    def counted(self) -> Sequence[Run]:
        """The runs that figures are taken from: the finished ones, or all where none is finished."""
        return [run for run in self.runs if run.finished] or self.runs

    def last(self, suite: str) -> list[Result]:
        """The final result of each counted run that has one."""
        return [result for run in self.counted if (result := run.last(suite)) is not None]


def load_groups(paths: Sequence[Path]) -> list[Group]:
    """The groups below `paths`, in their order. Raises `UserError` for a path without runs or results, or damaged files."""
    members: dict[Path, list[Run]] = {}
    seen: set[Path] = set()
    for path in paths:
        found = list(find(path))
        if not found:
            raise UserError(
                f"{path}: holds neither a run (config.yaml and env.json) nor results of `opd eval`; check the path"
            )
        for folder in found:
            place = folder.resolve()
            if place not in seen:
                seen.add(place)
                members.setdefault(place.parent if place.name.startswith("seed-") else place, []).append(load(folder))
    names = _shortest_names(list(members))
    return [Group(names[place], runs) for place, runs in members.items()]


def load_one(path: Path, option: str) -> Run:
    """The one run or folder of results at `path`. Raises `UserError` naming `option`."""
    found = list(find(path))
    if len(found) != 1:
        raise UserError(f"{option}: {path} holds {len(found)} runs or results; name one run, or one folder of `opd eval`")
    return load(found[0])


def find(path: Path) -> Iterator[Path]:
    """Runs and folders of results at or below `path`, sorted. Raises `UserError` where there is no such folder."""
    if not path.is_dir():
        raise UserError(f"{path}: no such folder; name a run, a folder of `opd eval`, or a folder above them")
    for where, folders, files in os.walk(path):
        folder = Path(where)
        if _is_run(folder) or any(_is_result(folder / name) for name in files):
            folders.clear()  # what lies inside belongs to it
            yield folder
        folders[:] = sorted((name for name in folders if not name.startswith(".")), key=_natural)


def _natural(name: str) -> list[tuple[int, str]]:
    """`seed-2` before `seed-10`."""
    return [(int(part or 0), "") if place % 2 else (0, part) for place, part in enumerate(re.split(r"(\d+)", name))]


def _is_run(folder: Path) -> bool:
    return (folder / "config.yaml").is_file() and (folder / "env.json").is_file()


def _is_result(path: Path) -> bool:
    if path.suffix != ".json":
        return False
    with path.open("rb") as file:
        head = file.read(CONTENT_BYTES)
    return b'"suite"' in head and b'"settings"' in head


def _shortest_names(places: Sequence[Path]) -> dict[Path, str]:
    """The last part of each path, and before it as many more as tell it from the others."""
    names, depth = {place: place.name for place in places}, 1
    while len(set(names.values())) < len(places):
        depth, taken = depth + 1, Counter(names.values())
        names = {place: "/".join(place.parts[-depth:]) if taken[name] > 1 else name for place, name in names.items()}
    return names


def load(path: Path) -> Run:
    """What lies in the folder of a run, or of `opd eval`."""
    if not _is_run(path):
        found = [one for file in sorted(path.glob("*.json")) if _is_result(file) for one in _results(file)]
        return Run(path, {}, {}, {suite: {_step(result): result} for suite, result in found}, finished=True)
    settings = flatten(read_recipe(path / "config.yaml"))
    results: dict[str, dict[int, Result]] = {}
    for step, file in _by_step(path.glob("eval/step-*.json")):
        for suite, result in _results(file, HELDOUT):
            results.setdefault(suite, {})[step] = result
    trained = HELDOUT in results
    for step, folder in _by_step(path.glob("eval/step-*/")):
        for file in sorted(folder.glob("*.json")):
            # An evaluation of its own, perhaps with other settings: it does not take the place of one while training.
            suite = HELDOUT_AGAIN if trained and file.stem == HELDOUT else file.stem
            for name, result in _results(file, suite):
                results.setdefault(name, {})[step] = result
    metrics = _metrics(path / "metrics.jsonl")
    summary = _json(path / "summary.json") if (path / "summary.json").is_file() else None
    finished = summary is not None and summary.get("steps") == settings.get("steps", summary.get("steps"))
    return Run(path, settings, metrics, results, finished)


def _by_step(paths: Iterable[Path]) -> list[tuple[int, Path]]:
    """(N, path) of `step-N` and `step-N.json`."""
    found = [(re.fullmatch(r"step-(\d+)(?:\.json)?", path.name), path) for path in paths]
    return sorted((int(name[1]), path) for name, path in found if name)


def _step(result: Result) -> int:
    return -1 if result.step is None else result.step


def flatten(mapping: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as dotted names."""
    flat: dict[str, Any] = {}
    for key, value in mapping.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) and value else {f"{prefix}{key}": value}
    return flat


def _metrics(path: Path) -> dict[str, np.ndarray]:
    """Columns of metrics.jsonl, NaN where a line lacks a figure or it is not finite.

    The last line may have been cut short by a kill.
    """
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            rows.append({**row, "step": operator.index(row["step"])})
        except (ValueError, KeyError, TypeError):
            if number < len(lines):
                raise UserError(f"{path}: line {number} is damaged; mend it, or leave this run out") from None
    names = {name for row in rows for name, value in row.items() if isinstance(value, int | float)}
    missing = float("nan")
    return {name: np.array([_number(row.get(name, missing)) for row in rows]) for name in names}


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else float("nan")


def _results(path: Path, suite: str | None = None) -> list[tuple[str, Result]]:
    """The result with its suite's name, `suite` where that is given, and then those of its domains."""
    raw = _json(path)
    try:
        whole = parse_result(raw, suite or path.stem)
        name = suite or whole.suite
        return [(name, whole), *((f"{name}/{domain}", part) for domain, part in by_domain(raw, whole).items())]
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        why = f"{error} is missing" if isinstance(error, KeyError) else error
        raise UserError(f"{path}: no result of an evaluation ({why}); leave it out") from None


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
        if not isinstance(found, dict):
            raise ValueError("no JSON object")
        return found
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: damaged or not readable ({error}); restore it, or leave this run out") from None
