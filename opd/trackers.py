"""Where metrics go beside `metrics.jsonl`: TensorBoard and wandb, both optional."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from opd.config import RunConfig, TrackersConfig, to_mapping
from opd.errors import UserError


class Tracker(Protocol):
    """Takes the figures and the sample rollouts of a step."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def log_rollouts(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Event files below the run directory."""

    def __init__(self, path: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise UserError("trackers.tensorboard: install it with: pip install 'opd[tensorboard]'") from None
        self.writer = SummaryWriter(str(path / "tensorboard"))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)

    def log_rollouts(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        for number, row in enumerate(rows):
            self.writer.add_text(f"rollouts/{number}", f"{row['prompt']}\n\n---\n\n{row['response']}", step)

    def close(self) -> None:
        self.writer.close()


class Wandb:
    """A run at wandb."""

    def __init__(self, path: Path, config: RunConfig) -> None:
        try:
            import wandb  # type: ignore[import-not-found]
        except ImportError:
            raise UserError("trackers.wandb: install it with: pip install 'opd[wandb]'") from None
        self.wandb = wandb
        self.run = wandb.init(dir=str(path), config=to_mapping(config), **config.trackers.wandb)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.run.log(dict(metrics), step=step)

    def log_rollouts(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        columns = ["prompt", "response", "finish"]
        table = self.wandb.Table(columns=columns, data=[[row[name] for name in columns] for row in rows])
        self.run.log({"rollouts": table}, step=step)

    def close(self) -> None:
        self.run.finish()


def open_trackers(config: TrackersConfig, run: RunConfig, path: Path) -> list[Tracker]:
    """The trackers a recipe asks for. Raises `UserError` for one that is not installed."""
    trackers: list[Tracker] = [TensorBoard(path)] if config.tensorboard else []
    return [*trackers, Wandb(path, run)] if config.wandb else trackers
