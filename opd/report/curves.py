"""Training curves: one line a group, the mean over its runs with the range between them, against three measures of cost."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from opd.report.loading import Group, Run
from opd.report.results import HELDOUT, Metric, Result

MAX_POINTS = 100  # of a line: neighbouring steps are averaged into one
AXES = {"steps": "training steps", "tokens": "sampled tokens", "time": "wall time of training"}
DIVERGENCES = {  # different quantities, so each has a figure of its own
    "reverse_kl": "Reverse KL in training",
    "reverse_kl_sampled": "Sampled reverse KL in training",
    "reverse_kl_shared": "Reverse KL on shared tokens in training",
    "forward_kl": "Forward KL in training",
    "jsd": "JS divergence in training",
}
ROLLOUTS = {  # of training: (title, unit)
    "success_rate": ("Success rate of training rollouts", "%"),
    "live_groups": ("Live groups in training", "%"),
    "phantom_groups": ("Groups that fail alike and teach all the same", "%"),
    "student_topk_kl": ("Reverse KL on the student's top-k in training", "nats/token"),
    "topk_overlap": ("Top-k tokens that student and teacher share in training", "%"),
    "overlap_mass": ("Student's probability of shared top-k tokens in training", "%"),
    "response_tokens": ("Length of training rollouts", "tokens"),
    "stopped_rate": ("Stopped rollouts in training", "%"),
    "restart_units": ("Mean restart index in training", "turns or chunks"),
}
DISTANCES = {  # from the teacher at an evaluation; the latter two where it reads with another tokenizer
    "reverse_kl": "Held-out reverse KL",
    "reverse_kl_sampled": "Held-out sampled reverse KL",
    "teacher_logp": "Held-out log-prob of the student's tokens under the teacher",
}
DIVERSITY = "Distinct 4-grams of the student's samples"


@dataclass(frozen=True)
class Line:
    """`place` is the group's among all groups; all arrays are [N]: mean, lowest and highest over the runs."""

    place: int
    x: dict[str, np.ndarray]  # by name of the axis: steps, tokens, seconds
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray


@dataclass(frozen=True)
class Panel:
    """One quantity. `marked`: few points, each with its mark. In the unit `%` values are fractions."""

    name: str
    title: str
    lines: Sequence[Line]
    unit: str
    marked: bool = False
    levels: Sequence[tuple[str, float]] = ()  # horizontal lines: what they are, and where

    @property
    def percent(self) -> bool:
        return self.unit == "%"

    @property
    def logarithmic(self) -> bool:
        """Whether it is a loss or a divergence, positive, and spans so much that a linear axis would flatten its end."""
        means = np.concatenate([line.mean for line in self.lines])
        lows = np.concatenate([line.low for line in self.lines])
        return self.unit in ("", "nats/token") and bool(lows.min() > 0) and bool(means.max() > 20 * means.min())


def panels(groups: Sequence[Group], metric: Metric, goal: float | None) -> list[Panel]:
    """Held-out score, distances and diversity, then of training the divergences, the loss and what its rollouts were like;
    only those that some group has."""
    levels = [] if goal is None else [("teacher", goal)]
    found = [
        Panel("heldout-score", f"Held-out {metric.name}", _evaluated(groups, metric.mean), "%", True, levels),
    ]
    for name, title in DISTANCES.items():
        found.append(Panel(f"heldout-{name}", title, _evaluated(groups, _figure(name)), "nats/token", True))
    found.append(Panel("heldout-distinct_4grams", DIVERSITY, _evaluated(groups, _figure("distinct_4grams")), "%", True))
    for name, title in DIVERGENCES.items():
        found.append(Panel(f"training-{name}", title, _trained(groups, name), "nats/token"))
    found.append(Panel("loss", "Training loss", _trained(groups, "loss"), ""))
    for name, (title, unit) in ROLLOUTS.items():
        found.append(Panel(f"training-{name}", title, _trained(groups, name), unit))
    return [panel for panel in found if panel.lines]


def _figure(name: str) -> Callable[[Result], float | None]:
    return lambda result: result.figures.get(name)


def _evaluated(groups: Sequence[Group], value: Callable[[Result], float | None]) -> list[Line]:
    """Lines through the evaluations that all counted runs of a group have."""
    lines = []
    for place, group in enumerate(groups):
        runs = [run for run in group.counted if run.metrics and HELDOUT in run.results]
        tables = [
            {step: y for step, result in run.results[HELDOUT].items() if (y := value(result)) is not None} for run in runs
        ]
        steps = sorted(set.intersection(*map(set, tables))) if tables else []
        if steps:
            lines.append(
                _line(place, runs, np.array(steps), np.array([[table[step] for step in steps] for table in tables]))
            )
    return lines


def _trained(groups: Sequence[Group], name: str) -> list[Line]:
    """Lines through a metric of the steps that all counted runs of a group have."""
    lines = []
    for place, group in enumerate(groups):
        runs = [run for run in group.counted if name in run.metrics]
        steps = np.array([])
        for number, run in enumerate(runs):
            steps = run.metrics["step"] if number == 0 else np.intersect1d(steps, run.metrics["step"])
        if steps.size:
            values = np.array([run.metrics[name][np.searchsorted(run.metrics["step"], steps)] for run in runs])
            kept = np.isfinite(values).all(axis=0)
            if kept.any():
                lines.append(_line(place, runs, steps[kept], values[:, kept]))
    return lines


def _line(place: int, runs: Sequence[Run], steps: np.ndarray, values: np.ndarray) -> Line:
    """`values` [R, T] at `steps` [T], in at most `MAX_POINTS` points."""
    tokens = np.mean([run.spent("sampled_tokens", steps) for run in runs], axis=0)
    seconds = np.mean([run.spent("perf/step_s", steps) for run in runs], axis=0)
    width = -(-len(steps) // MAX_POINTS)
    x = {name: _binned(axis, width) for name, axis in zip(AXES, (steps.astype(float), tokens, seconds))}
    y = np.array([_binned(row, width) for row in values])
    return Line(place, x, y.mean(axis=0), y.min(axis=0), y.max(axis=0))


def _binned(values: np.ndarray, width: int) -> np.ndarray:
    """Means of `width` neighbours."""
    starts = np.arange(0, len(values), width)
    return np.add.reduceat(values, starts) / np.diff(np.append(starts, len(values)))


def samples_of(line: Line, axis: str, count: int = 6) -> Iterator[tuple[float, float]]:
    """About `count` points of a line, evenly spread, with the first and the last: (x, mean)."""
    for place in np.unique(np.linspace(0, len(line.mean) - 1, count).round().astype(int)):
        yield float(line.x[axis][place]), float(line.mean[place])
