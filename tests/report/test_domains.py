"""Held-out problems of several domains: each is compared as a suite of its own, and none counts twice."""

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.report_runs import write_results, write_run
from opd.report.compare import Options, _suites, compare
from opd.report.loading import Group, Run, load
from opd.report.results import title

DOMAINS = ["addition", "subtraction"]
WHOLE = ["heldout", "aime", "gsm8k"]


def with_domains(path):
    """The problems of every evaluation in turn of two domains."""
    for file in path.rglob("*.json"):
        raw = json.loads(file.read_text())
        if "rows" in raw:
            for place, row in enumerate(raw["rows"]):
                row["domain"] = DOMAINS[place % 2]
            file.write_text(json.dumps({**raw, "reverse_kl/addition": 0.5}))
    return path


def last(run, suite):
    result = run.last(suite)
    assert result is not None
    return result


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two variants of two seeds each, and their teacher."""
    folder = tmp_path_factory.mktemp("domains")
    for name, level in (("weak", 0.5), ("strong", 0.9)):
        for seed in range(2):
            path = write_run(folder / name / f"seed-{seed}", level=level, seed=seed, suites={"gsm8k": 1, "aime": 1})
            with_domains(path)
    return folder, with_domains(write_results(folder.with_name(folder.name + "-teacher"), {"heldout": 0.97}))


def test_a_result_is_read_whole_and_by_domain(runs):
    run = load(runs[0] / "weak" / "seed-0")
    suites, parts = ("heldout", "gsm8k", "aime"), ("", "/addition", "/subtraction")
    assert set(run.results) == {f"{name}{part}" for name in suites for part in parts}
    whole, *parts = (last(run, name) for name in ("heldout", "heldout/addition", "heldout/subtraction"))
    assert whole.keys[::2] == parts[0].keys
    assert whole.keys[1::2] == parts[1].keys
    assert [row[0] for row in whole.correct[::2]] == [row[0] for row in parts[0].correct]
    assert parts[0].classes is not None
    assert len(parts[0].classes) == len(parts[0].keys) == 30
    assert parts[0].figures["correct_rate"] == np.mean([row[0] for row in parts[0].correct])
    assert (parts[0].figures["reverse_kl"], parts[1].figures.get("reverse_kl")) == (0.5, None)


def test_each_domain_has_its_own_recovery(runs):
    folder, teacher = runs
    found = compare([folder], Options(teacher=teacher, baseline="weak"))
    assert list(found.scores)[:3] == ["heldout", "heldout/addition", "heldout/subtraction"]
    for domain in DOMAINS:
        (strong,) = [row for row in found.scores[f"heldout/{domain}"] if row.group.name == "strong"]
        starts = [run.results[f"heldout/{domain}"][0] for run in strong.group.runs]
        goals = [last(load(teacher), f"heldout/{domain}")]
        start, end, goal = (
            np.mean([np.mean(one.correct) for one in results]) for results in (starts, strong.results, goals)
        )
        assert strong.num_problems == 30
        assert strong.recovery is not None
        assert strong.recovery.value == pytest.approx((end - start) / (goal - start))
        shown = found.goals[f"heldout/{domain}"]
        assert shown.score is not None
        assert (shown.score.value, shown.num_problems) == (pytest.approx(goal), 30)


def test_the_mean_of_suites_is_of_whole_ones(runs):
    found = compare([runs[0]], Options())
    (mean,) = [table for table in found.tables if table.name == "mean-of-suites"]
    assert {row[4] for row in mean.rows} == {2}
    assert "aime, gsm8k." in mean.note


def of_whole(found):
    """What a comparison says of whole suites."""
    tests = {suite: [(row.group.name, row.adjusted_p) for row in found.scores[suite]] for suite in WHOLE}
    (mean,) = [table.rows for table in found.tables if table.name == "mean-of-suites"]
    return tests, mean, found.findings, found.notes


def test_domains_change_nothing_that_is_said_of_whole_suites(runs):
    """Their p-values are a family of their own, and what they say is no finding and no note."""
    folder, teacher = runs
    options = {"teacher": teacher, "baseline": "weak"}
    whole, all_of_them = (compare([folder], Options(suites, **options)) for suites in (WHOLE, ()))
    assert list(all_of_them.scores) == [f"{suite}{part}" for suite in WHOLE for part in ("", "/addition", "/subtraction")]
    assert of_whole(all_of_them) == of_whole(whole)
    assert len(whole.findings) == 4
    said = {table.name: table.note for table in all_of_them.tables}
    assert "adjusted (Holm) for all 4 comparisons of whole suites in this report." in said["gsm8k-scores"]
    assert "adjusted (Holm) for all 6 comparisons of domains in this report." in said["gsm8k/addition-scores"]
    assert "adjusted (Holm) for all 4 comparisons of this report." in {t.name: t.note for t in whole.tables}["gsm8k-scores"]


def test_domains_asked_for_alone_are_findings(runs):
    found = compare([runs[0]], Options(["heldout/addition"], baseline="weak"))
    assert [line.split(" has ")[0] for line in found.findings] == ["On held-out problems, addition, strong"]


def test_domains_stand_behind_their_suite():
    """Also where the name of another suite begins with that of theirs."""
    names = ["math", "math/a", "math-hard", "math-hard/a", "heldout", "heldout/a", "aime"]
    run = Run(Path("run"), {}, {}, {name: {} for name in names}, finished=True)
    assert _suites([Group("run", [run])]) == ["heldout", "heldout/a", "aime", "math", "math/a", "math-hard", "math-hard/a"]


def test_one_domain_alone_is_no_part(runs, tmp_path):
    path = write_run(tmp_path / "run", steps=4, every=2)
    assert set(load(path).results) == {"heldout"}


def test_domains_have_readable_names():
    assert title("heldout/addition") == "held-out problems, addition"
    assert title("gsm8k/easy") == "gsm8k, easy"
