"""A run's directory, which is an interface: others read these files while the run goes on and after it.

`config.yaml` (resolved), `env.json` (versions, hardware, git), `metrics.jsonl` (a line a step), `rollouts/step-N.jsonl`,
`checkpoints/step-N/`, `eval/step-N.json`, `summary.json`.
"""

import json
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from opd.config import RunConfig, build_config, to_mapping, to_yaml
from opd.errors import UserError
from opd.files import explain_full_disk, write_text

FREE_TO_CHANGE = ("steps", "eval", "checkpoint", "trackers")  # sections that a resumed run may set anew


class RunDirectory:
    """Opens, or resumes, a run's directory. Raises `UserError` for one in use, or for a resume with another recipe."""

    def __init__(self, path: Path, config: RunConfig, *, resume: bool, overwrite: bool, writer: bool = True) -> None:
        self.path, self.writer = path, writer
        if not writer:
            return  # another process of the run owns the files
        if path.exists() and not path.is_dir():
            raise UserError(f"--out: {path} is a file; name a folder")
        used = (path / "env.json").exists() and (path / "config.yaml").exists()
        if used and not (resume or overwrite):
            raise UserError(f"--out: {path} holds a run; continue it with --resume or replace it with --overwrite")
        if not used and path.exists() and any(path.iterdir()):
            raise UserError(f"--out: {path} holds files that are no run's; name another folder")
        if used and resume:
            self._refuse_other_recipe(config)
        elif used:
            shutil.rmtree(path)
        with explain_full_disk(path):
            path.mkdir(parents=True, exist_ok=True)
        write_text(path / "config.yaml", to_yaml(config))
        write_text(path / "env.json", json.dumps(environment(), indent=2) + "\n")

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def append_metrics(self, row: Mapping[str, Any]) -> None:
        """One line of `metrics.jsonl`."""
        if self.writer:
            with explain_full_disk(self.path / "metrics.jsonl"), (self.path / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(row) + "\n")

    def truncate_metrics(self, step: int) -> None:
        """Drops the lines after `step`: the run goes on from there."""
        path = self.path / "metrics.jsonl"
        if self.writer and path.exists():
            lines = [line for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("\n")]
            write_text(path, "".join(line for line in lines if json.loads(line)["step"] <= step))

    def write_json(self, name: str, content: Any) -> None:
        if self.writer:
            write_text(self.path / name, json.dumps(content, indent=2) + "\n")

    def write_rows(self, name: str, rows: Iterable[Mapping[str, Any]]) -> None:
        """A JSON lines file."""
        if self.writer:
            write_text(self.path / name, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))

    def read_json(self, name: str) -> Any | None:
        path = self.path / name
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None

    def _refuse_other_recipe(self, config: RunConfig) -> None:
        saved = OmegaConf.to_container(OmegaConf.load(self.path / "config.yaml"))
        assert isinstance(saved, dict)
        before = _flat(to_mapping(build_config({str(k): v for k, v in saved.items()})))
        now = _flat(to_mapping(config))
        for key in sorted(before.keys() | now.keys()):
            if key.partition(".")[0] not in FREE_TO_CHANGE and before.get(key) != now.get(key):
                raise UserError(
                    f"{key}: the run in {self.path} began with {before.get(key)!r}, not {now.get(key)!r}; "
                    "resume it with the same recipe, or name another --out"
                )


def _flat(mapping: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in mapping.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = list(value) if isinstance(value, tuple) else value
    return flat


def environment() -> dict[str, Any]:
    """Versions, hardware and commit of this machine."""
    import torch

    packages = ("opd", "torch", "transformers", "tokenizers", "accelerate", "numpy", "peft", "vllm")
    cuda = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "versions": {name: found for name in packages if (found := _version(name))},
        "cuda": cuda,
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
