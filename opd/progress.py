"""Progress bars: of a run, with loss, KL, successes, tokens a second and time left, and of commands that count something."""

from collections.abc import Mapping
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

DIVERGENCES = ("reverse_kl", "reverse_kl_sampled", "reverse_kl_shared", "forward_kl", "jsd")

WITHOUT_TEACHER = {"success_rate": "success", "live_groups": "live groups", "gate_share": "gated"}  # shown where they are


def counting_bar(time: ProgressColumn | None = None) -> Progress:
    """So many of so many, on stderr; `time` is the last column, by default what is left."""
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), time or TimeRemainingColumn())
    return Progress(*columns, console=Console(stderr=True))


class ProgressBar:
    """Of a run. Draws on stderr; on something that is no terminal it prints a line now and then instead."""

    LINES = 20  # in a whole run, where there is no terminal

    def __init__(self, num_steps: int, done: int, shown: bool) -> None:
        self.num_steps, self.shown = num_steps, shown
        self.console = Console(stderr=True)
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self.console,
            disable=not (shown and self.console.is_terminal),
        )
        self.task = self.bar.add_task("distilling", total=num_steps, completed=done, figures="")

    def __enter__(self) -> "ProgressBar":
        self.bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.bar.stop()

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """`step` steps are done."""
        kl = next((metrics[name] for name in DIVERGENCES if name in metrics), None)
        figures = f"loss {metrics['loss']:.4f}" + ("" if kl is None else f"  KL {kl:.4f}")
        figures += "".join(f"  {text} {metrics[name]:.2f}" for name, text in WITHOUT_TEACHER.items() if name in metrics)
        figures += f"  {metrics['perf/tokens_per_s']:,.0f} tokens/s"
        self.bar.update(self.task, completed=step, figures=figures)
        if not self.console.is_terminal and step % max(1, self.num_steps // self.LINES) == 0:
            self.say(f"step {step}/{self.num_steps}  {figures}")

    def say(self, text: str) -> None:
        """A line above the bar."""
        if self.shown:
            self.console.print(text, highlight=False, soft_wrap=True)
