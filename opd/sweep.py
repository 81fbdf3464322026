"""A sweep: one recipe times variants times seeds, each a run of its own, which can be stopped and gone on with.

    recipe: quickstart          # a shipped recipe or a file beside this one
    seeds: [0, 1, 2]
    overrides: {steps: 200}     # for every run; "${seed}" in it, or in a variant, is the run's seed
    variants:
      full: {}
      sampled: {terms: {reverse_kl: {form: sampled}}}

`seeds` may also be a mapping from each seed to changed keys of its own, as `{0: {student: {model: a}}, 1: {}}`.

The runs lie in `OUT/VARIANT/seed-S`, which is how `opd compare` knows them.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from omegaconf import MISSING, OmegaConf

from opd.config import RunConfig, build_config, parse_section
from opd.data import load_prompts
from opd.envs.config import load_tasks
from opd.errors import UserError
from opd.files import explain_unwritable, write_text
from opd.processes import die_with_parent
from opd.recipes import find_recipe, overlay, read_recipe, read_yaml
from opd.run_directory import refuse_other_recipe
from opd.validation import check_files

POLL_S = 0.5
STOP_S = 30.0  # for a run that is told to end
RESERVED = ("recipes", "report", "teacher")  # the sweep's own folders


@dataclass(frozen=True)
class SweepConfig:
    """The content of a sweep's file."""

    recipe: str = MISSING
    seeds: Any = field(default_factory=lambda: [0])
    overrides: dict[str, Any] = field(default_factory=dict)
    variants: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class PlannedRun:
    """One run: its place, its recipe as a file, and how many steps it takes."""

    variant: str
    seed: int
    path: Path
    recipe: Path
    raw: Mapping[str, Any]
    config: RunConfig

    @property
    def name(self) -> str:
        return f"{self.variant}/seed-{self.seed}"

    @property
    def steps(self) -> int:
        return self.config.steps

    @property
    def done(self) -> bool:
        """Whether it has come to its end."""
        return (self.path / "summary.json").is_file() and _steps_done(self.path) >= self.steps > 0


def plan_sweep(file: str, overrides: Mapping[str, Any], out: Path) -> list[PlannedRun]:
    """The runs of a sweep, all checked. Raises `UserError` naming the variant for a recipe that cannot work.

    `overrides` are laid over those of the file, for every run; the variant's own win.
    """
    path = find_recipe(file)
    sweep = _read_sweep(path)
    seeds = _seeds(sweep.seeds)
    if not sweep.variants or not seeds:
        raise UserError("variants: a sweep needs at least one variant and one seed")
    beside = path.parent / f"{sweep.recipe}.yaml"
    base = read_recipe(beside if beside.is_file() else find_recipe(sweep.recipe))
    runs = []
    for variant, changes in sweep.variants.items():
        if not re.fullmatch(r"\w[\w.+=-]*", variant) or variant in RESERVED:
            taken = ", ".join(RESERVED)
            raise UserError(f"variants: {variant!r} is to be a folder's name: letters, digits and . _ + = - (not {taken})")
        if not isinstance(changes, Mapping | None):
            raise UserError(f"variants.{variant} is {changes!r}: write the changed keys below it, or {{}} for none")
        for seed, own in seeds.items():
            common = overlay(overlay(overlay(base, sweep.overrides), own), overrides)
            raw = overlay(common, {**(changes or {}), "seed": seed})
            try:
                config = build_config(raw)
                check_files(config)
            except UserError as error:
                raise UserError(f"variants.{variant}: {error}") from None
            recipe = out / "recipes" / f"{variant}.seed-{seed}.yaml"
            run = PlannedRun(variant, seed, out / variant / f"seed-{seed}", recipe, raw, config)
            if run.done:  # it will not be run again, so what is reported of it must be what is asked for
                _refuse_other(run)
            runs.append(run)
    return runs


def _read_sweep(path: Path) -> SweepConfig:
    """The file's content; `${seed}` in overrides and variants is left for the recipes that they become."""
    raw = read_yaml(path)
    later = {name: raw[name] for name in ("overrides", "variants", "seeds") if isinstance(raw.get(name), Mapping)}
    now = {name: value for name, value in raw.items() if name not in later}
    return replace(parse_section(SweepConfig, now, ""), **later)


def _seeds(given: Any) -> dict[int, Mapping[str, Any]]:
    """The changed keys of each seed. Raises `UserError`."""
    if isinstance(given, list) and len(set(given)) < len(given):
        raise UserError(f"seeds: {given} names a seed twice")
    named = {seed: {} for seed in given} if isinstance(given, list) else given
    if not isinstance(named, Mapping) or not all(
        isinstance(seed, int) and not isinstance(seed, bool) and isinstance(own or {}, Mapping)
        for seed, own in named.items()
    ):
        raise UserError(f"seeds: expected a list of numbers, or a mapping from numbers to changed keys, found {given!r}")
    return {seed: own or {} for seed, own in named.items()}


def _refuse_other(run: PlannedRun) -> None:
    try:
        refuse_other_recipe(run.path, run.config, free_sections=("checkpoint", "trackers"))
    except UserError as error:
        raise UserError(f"variants.{run.variant}: {error}") from None


def evaluate_teacher(runs: Sequence[PlannedRun], out: Path) -> Path | None:
    """The folder with the teacher's own results on the held-out problems: the goal of the recovery.

    None where the runs have not all the same one teacher in process and the same held-out problems.
    """
    first = runs[0].config
    options, limit = first.eval, first.eval.max_new_tokens or first.sampling.max_new_tokens
    asked = [(run.config.teachers, run.config.eval, run.config.sampling.max_new_tokens) for run in runs]
    (teacher,) = first.teachers.values() if len(first.teachers) == 1 else (None,)
    if teacher is None or teacher.model is None or any(other != asked[0] for other in asked):
        return None
    if options.environment is not None:
        problems = load_tasks(options.environment, "eval.environment")
    elif options.prompts is not None:
        problems = load_prompts(options.prompts, "eval.prompts")
    else:
        return None
    if teacher.urls or teacher.adapter or teacher.revision or teacher.quantization:
        return None  # not a model that `opd eval` can load
    from opd.evaluation import evaluate

    evaluate(
        teacher.model,
        problems,
        out / "teacher",
        suite="heldout",
        overwrite=True,
        samples=options.samples,
        temperature=options.temperature,
        top_p=options.top_p,
        max_new_tokens=limit,
        reward=options.reward,
        time_limit_s=options.time_limit_s,
        dtype=teacher.dtype,
    )
    return out / "teacher"


def run_sweep(runs: Sequence[PlannedRun], jobs: int, devices: Sequence[str], show: Callable[[str, int], None]) -> list[str]:
    """Trains what is not done yet, `jobs` at a time; a line for each run that failed. Every run ends with this process.

    `devices` are CUDA devices, one a job. `show` is told a run's name and how many steps it has done, now and then.
    """
    out = runs[0].recipe.parent
    with explain_unwritable(out):
        out.mkdir(parents=True, exist_ok=True)
    lock = FileLock(out / ".lock")
    try:
        lock.acquire(blocking=False)
    except Timeout:
        raise UserError(f"--out: another sweep is running in {out.parent}; wait for it, or name another folder") from None
    waiting = [run for run in runs if not run.done]
    free = list(range(jobs))
    going: dict[int, tuple[PlannedRun, subprocess.Popen[bytes]]] = {}
    failures = []
    try:
        while waiting or going:
            while waiting and free:
                job = free.pop(0)
                run = waiting.pop(0)
                going[job] = run, _start(run, jobs, devices[job % len(devices)] if devices else None)
            time.sleep(POLL_S)
            for job, (run, process) in list(going.items()):
                show(run.name, _steps_done(run.path))
                if process.poll() is not None:
                    del going[job]
                    free.append(job)
                    if process.returncode != 0:
                        failures.append(f"{run.name}: {_last_line(_log(run))}")
    finally:
        for _, process in going.values():
            process.send_signal(signal.SIGINT)
        for _, process in going.values():
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        lock.release()
    return failures


def _start(run: PlannedRun, jobs: int, device: str | None) -> "subprocess.Popen[bytes]":
    threads = str(max(1, len(os.sched_getaffinity(0)) // jobs))
    environment = {"OMP_NUM_THREADS": threads, **os.environ, **({"CUDA_VISIBLE_DEVICES": device} if device else {})}
    with explain_unwritable(run.recipe):
        write_text(run.recipe, OmegaConf.to_yaml(OmegaConf.create(dict(run.raw))))
        command = [sys.executable, "-m", "opd", "train", str(run.recipe), "--out", str(run.path), "--resume"]
        with _log(run).open("wb") as log:
            return subprocess.Popen(
                command, env=environment, stdout=log, stderr=log, start_new_session=True, preexec_fn=die_with_parent
            )


def _log(run: PlannedRun) -> Path:
    return run.recipe.with_suffix(".log")


def _steps_done(path: Path) -> int:
    try:
        *_, last = (path / "metrics.jsonl").read_bytes().split(b"\n")[:-1]
        return int(json.loads(last)["step"])
    except (OSError, ValueError, KeyError):
        return 0


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    mistakes = [line for line in lines if line.startswith("error: ")]
    return (mistakes or lines or [f"it wrote nothing; see {log}"])[-1].removeprefix("error: ")
