"""A run's directory, which is an interface: others read these files while the run goes on and after it.

`config.yaml` (resolved), `env.json` (versions, hardware, git, and the digest of prompts that have one), `metrics.jsonl` (a
line a step), `rollouts/step-N.jsonl`, `checkpoints/step-N/`, `eval/step-N.json`, `summary.json`.
"""

import json
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from opd.config import RunConfig, build_config, to_mapping, to_yaml
from opd.errors import UserError
from opd.files import explain_full_disk, explain_unwritable, write_text
from opd.recipes import read_recipe

FREE_TO_CHANGE = ("steps", "eval", "checkpoint", "trackers")  # sections that a resumed run may set anew
MAY_MOVE = ("url", "token_file", "timeout_s", "deadline_s", "max_in_flight")  # of servers: the same model elsewhere


class RunDirectory:
    """A run's files. Looks and locks first and changes nothing; `begin` makes, resumes or replaces the run.

    Raises `UserError` for a directory in use, for one that holds something else, or for a resume with another recipe.
    """

    RECIPE = "config.yaml"

    def __init__(self, path: Path, config: Any, *, resume: bool, overwrite: bool, writer: bool = True) -> None:
        self.path, self.config, self.resume, self.writer = path.absolute(), config, resume, writer
        if not writer:
            return  # another process of the run owns the files
        if path.exists() and not path.is_dir():
            raise UserError(f"--out: {path} is a file; name a folder")
        with explain_unwritable(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._lock = FileLock(self.path.with_name(f".{path.name}.lock"))
            try:
                self._lock.acquire(blocking=False)
            except Timeout:
                raise UserError(f"--out: another process is writing to {path}; wait, or name another folder") from None
        try:
            self.used = self._refuse_conflicts(overwrite)
        except UserError:
            self._lock.release()
            raise

    def begin(self, step: int, prompts_digest: str | None = None) -> None:
        """Called when everything is loaded: drops what a replaced run wrote, or what came after `step` of a resumed one."""
        if not self.writer:
            return
        with explain_unwritable(self.path):
            if self.used and not self.resume:
                shutil.rmtree(self.path)
            self.path.mkdir(parents=True, exist_ok=True)
            prompts = {} if prompts_digest is None else {"prompts": prompts_digest}
            write_text(self.path / "env.json", json.dumps({**environment(), **prompts}, indent=2) + "\n")
            write_text(self.path / self.RECIPE, self._recipe())
            self._truncate_metrics(step)

    def refuse_other_prompts(self, digest: str | None) -> None:
        """Raises `UserError` where a run that is to be resumed began with other prompts under the same name."""
        path = self.path / "env.json"
        if not self.resume or digest is None or not path.exists():
            return
        before = json.loads(path.read_text(encoding="utf-8")).get("prompts", digest)
        if before != digest:
            raise UserError(
                f"prompts: the run in {self.path} began with the pool {before}, and it is {digest} now; bring the first one "
                "back, or name another --out"
            )

    def close(self) -> None:
        """Lets others write here."""
        if self.writer:
            self._lock.release()

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def append_metrics(self, row: Mapping[str, Any]) -> None:
        """One line of `metrics.jsonl`."""
        if self.writer:
            with explain_full_disk(self.path / "metrics.jsonl"), (self.path / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(row) + "\n")

    def _truncate_metrics(self, step: int) -> None:
        """Keeps the whole lines up to `step`: the run goes on from there."""
        path = self.path / "metrics.jsonl"
        if path.exists():
            lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
            write_text(path, "".join(line for line in lines if 0 < _step_of(line) <= step))

    def write_json(self, name: str, content: Any) -> None:
        if self.writer:
            write_text(self.path / name, json.dumps(content, indent=2) + "\n")

    def write_rows(self, name: str, rows: Iterable[Mapping[str, Any]]) -> None:
        """A JSON lines file."""
        if self.writer:
            write_text(self.path / name, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))

    def _refuse_conflicts(self, overwrite: bool) -> bool:
        """Whether the directory holds a run; refuses one that was not to be touched."""
        path = self.path
        used = (path / "env.json").exists() and (path / self.RECIPE).exists()
        if used and not (self.resume or overwrite):
            raise UserError(f"--out: {path} holds a run; continue it with --resume or replace it with --overwrite")
        if not used and path.exists() and any(path.iterdir()):
            raise UserError(f"--out: {path} holds files that are no run's; name another folder")
        if used and self.resume:
            self._refuse_other_recipe()
        return used

    def _recipe(self) -> str:
        return to_yaml(self.config)

    def _refuse_other_recipe(self) -> None:
        refuse_other_recipe(self.path, self.config)


def refuse_other_recipe(run: Path, config: RunConfig, free_sections: Container[str] = FREE_TO_CHANGE) -> None:
    """Raises `UserError` where the run in `run` began with another recipe, but for what may change."""
    try:
        before = to_mapping(build_config(read_recipe(run / "config.yaml")))
    except UserError as error:
        raise UserError(f"{run / 'config.yaml'} is damaged ({error}); restore it, or use --overwrite") from None

    def free(key: str) -> bool:
        section, field = key.partition(".")[0], key.rpartition(".")[2]
        chooses = key.startswith("eval.selection")  # accuracies on other problems could not be compared
        moves = section in ("teachers", "sampler") and field in MAY_MOVE
        return (section in free_sections and not chooses) or moves or key == "alignment.min_byte_coverage"

    refuse_differences(run, before, to_mapping(config), free)


def refuse_differences(run: Path, before: Mapping[str, Any], now: Mapping[str, Any], free: Callable[[str], bool]) -> None:
    """Raises `UserError` naming the first dotted key that has another value now and is not `free` to have one."""
    for key, old, new in _differences(before, now):
        if not free(key):
            began = f"with {old!r}, not {new!r}"
            if isinstance(old, Mapping) or isinstance(new, Mapping):
                began = "with this section, not without it" if isinstance(old, Mapping) else "without this section"
            raise UserError(f"{key}: the run in {run} began {began}; resume it with the same recipe, or name another --out")


def _step_of(line: str) -> int:
    """The step of a line of metrics; 0 for one that a kill cut short."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return 0


def _differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(dotted key, value in `old`, value in `new`); a section that one of them lacks is one difference."""
    for name in sorted(old.keys() | new.keys()):
        mine, other = (list(value) if isinstance(value, tuple) else value for value in (old.get(name), new.get(name)))
        if isinstance(mine, Mapping) and isinstance(other, Mapping):
            yield from _differences(mine, other, f"{prefix}{name}.")
        elif mine != other:
            yield f"{prefix}{name}", mine, other


def environment() -> dict[str, Any]:
    """Versions, hardware and commit of this machine, and how the processes of the run share the student."""
    import torch
    from accelerate.state import AcceleratorState

    packages = ("opd", "torch", "transformers", "tokenizers", "accelerate", "numpy", "peft", "vllm")
    cuda = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "versions": {name: found for name in packages if (found := _version(name))},
        "cuda": cuda,
        "distributed": AcceleratorState().distributed_type.value,
        "num_processes": AcceleratorState().num_processes,
        "num_threads": torch.get_num_threads(),
        "git": _commit(),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    try:
        found = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip()
