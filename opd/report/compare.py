"""`opd compare`: from paths to tables, figures and a page."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from opd.errors import UserError
from opd.files import explain_unwritable, write_bytes, write_text
from opd.report.comparison import Question
from opd.report.contents import Contents, contents
from opd.report.loading import Group, load_groups, load_one
from opd.report.results import HELDOUT, parse_metric, title, whole_of
from opd.spelling import nearest


@dataclass(frozen=True)
class Options:
    """What to compare, as on the command line."""

    suites: Sequence[str] = ()
    baseline: str | None = None
    teacher: Path | None = None
    reference: str | None = None
    target: float | None = None
    metric: str = "accuracy"


def compare(paths: Sequence[Path], options: Options) -> Contents:
    """The comparison of the runs and results below `paths`. Raises `UserError`."""
    if options.teacher is not None and options.reference is not None:
        raise UserError("--teacher and --reference are two goals for the recovery; name one of them")
    if options.target is not None and not 0 < options.target <= 1:
        raise UserError(f"--target: {options.target} is no accuracy; give a fraction such as 0.8")
    metric = parse_metric(options.metric)
    groups = load_groups(paths)
    question = Question(
        metric,
        groups[0] if options.baseline is None else _named(groups, options.baseline, "--baseline"),
        None if options.teacher is None else load_one(options.teacher, "--teacher"),
        None if options.reference is None else _named(groups, options.reference, "--reference"),
    )
    known = _suites(groups)
    for suite in options.suites:
        if suite not in known:
            raise UserError(f"--suite: no run has results of {suite!r}{nearest(suite, known)}")
    found = contents(groups, list(dict.fromkeys(options.suites or known)), question, options.target)
    if found.scores and not any(row.score for rows in found.scores.values() for row in rows):
        most = max(result.samples for rows in found.scores.values() for row in rows for result in row.results)
        raise UserError(
            f"--metric: {options.metric} needs more samples a problem than any result has ({most}); use a smaller K"
        )
    return found


def _named(groups: Sequence[Group], name: str, option: str) -> Group:
    for group in groups:
        if group.name == name:
            return group
    raise UserError(f"{option}: no group {name!r}{nearest(name, [group.name for group in groups])}")


def _suites(groups: Sequence[Group]) -> list[str]:
    """The held-out problems first, each suite before its domains."""
    found = {suite for group in groups for run in group.counted for suite in run.results}
    return sorted(found, key=lambda suite: (whole_of(suite) != HELDOUT, whole_of(suite), suite))


def write_tables(found: Contents, out: Path) -> None:
    """`OUT/tables/NAME.csv` and `.md`."""
    with explain_unwritable(out):
        for table in found.tables:
            write_text(out / "tables" / f"{_file_name(table.name)}.csv", table.csv())
            write_text(out / "tables" / f"{_file_name(table.name)}.md", table.markdown())


def write_page(found: Contents, out: Path) -> Path:
    """`OUT/figures/NAME.svg` and `.png`, and `OUT/report.html`. Raises `UserError` without the extra `report`."""
    try:
        from opd.report.figures import draw_curves, draw_scores, draw_spendings
        from opd.report.page import render
    except ModuleNotFoundError as error:
        need = f"the page and the figures need {error.name}: pip install 'opd[report]', or give --no-html for tables alone"
        raise UserError(need) from None
    from opd.report.curves import AXES, panels
    from opd.report.rollouts import gallery

    names = [group.name for group in found.styled]
    places = {name: place for place, name in enumerate(names)}
    goals = {suite: goal.score.value for suite, goal in found.goals.items() if goal.score is not None}
    curves = {
        (panel.name, axis): (panel, draw_curves(panel, axis, names))
        for panel in panels(found.styled, found.question.metric, goals.get(HELDOUT))
        for axis in AXES
    }
    metric = found.question.metric.name
    scores = {
        suite: draw_scores(_file_name(suite), f"{metric} on {title(suite)}", f"{metric} (%)", scored, goals.get(suite))
        for suite, rows in found.scores.items()
        if (scored := [(places[row.group.name], row) for row in rows if row.score is not None])
    }
    spendings = [(places[row.group.name], row) for row in found.spendings]
    tokens = draw_spendings(metric, spendings, names, goals.get(HELDOUT)) if spendings else None
    with explain_unwritable(out):
        for drawing in [*(drawing for _, drawing in curves.values()), *scores.values(), *([tokens] if tokens else [])]:
            write_text(out / "figures" / f"{drawing.name}.svg", drawing.svg)
            write_bytes(out / "figures" / f"{drawing.name}.png", drawing.png)
        write_text(out / "report.html", render(found, curves, scores, tokens, gallery(found.groups)))
    return out / "report.html"


def _file_name(name: str) -> str:
    """A suite's name without what a file name cannot hold."""
    return "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in name)[:100]
