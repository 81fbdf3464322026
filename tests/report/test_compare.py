"""`opd compare` as a whole: tables, notes, files, and what it says of mistakes."""

import csv
import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.report_runs import write_results, write_run
from opd.errors import UserError
from opd.report.compare import Options, compare, write_page, write_tables


def table(found, name):
    return next(table for table in found.tables if table.name == name)


def cells(found, name, column):
    chosen = table(found, name)
    place = [c.head for c in chosen.columns].index(column)
    return {row[0]: row[place] for row in chosen.shown()}


def test_the_tables_of_a_sweep(sweep, teacher):
    found = compare([sweep], Options(baseline="weak", teacher=teacher))
    names = [table.name for table in found.tables]
    suites = ["heldout-scores", "heldout-verdicts", "gsm8k-scores", "gsm8k-verdicts"]
    assert names == [*suites, "sampled-tokens", "cost", "settings", "runs"]
    assert cells(found, "heldout-scores", "runs") == {"strong": "2 of 3 finished", "weak": "2", "(teacher)": "1"}
    assert set(cells(found, "heldout-scores", "step").values()) == {"40", "–"}
    assert cells(found, "gsm8k-scores", "problems") == {"strong": "40", "weak": "40"}
    difference = cells(found, "heldout-scores", "difference to weak")
    assert difference["weak"] == difference["(teacher)"] == "–"
    assert difference["strong"].startswith("+")
    tokens = cells(found, "heldout-scores", "sampled tokens")
    assert all(re.fullmatch(r"\d\d\.\dk", tokens[name]) for name in ("weak", "strong"))
    assert cells(found, "settings", "setting") == {"optimizer.lr": "optimizer.lr"}
    assert list(cells(found, "runs", "state").values()).count("unfinished") == 1
    verdicts = table(found, "heldout-verdicts")
    heads = [column.head for column in verdicts.columns]
    assert heads[2:7] == ["correct", "wrong", "no answer", "truncated", "timed out"]
    assert all(sum(row[2:7]) == pytest.approx(1.0) for row in verdicts.rows)
    assert heads[-2:] == ["at limit", "repetitive"]
    assert [column.head for column in table(found, "gsm8k-verdicts").columns][-2:] == ["pass@4", "maj@4"]


def test_the_target_is_nine_tenths_of_the_best_unless_named(sweep):
    found = compare([sweep], Options())
    best = max(row.score.value for row in found.scores["heldout"] if row.score)
    assert f"{90 * best:.1f} %" in table(found, "cost").title
    assert "90 % of the final accuracy of the best group, strong" in table(found, "cost").note
    assert cells(found, "cost", "steps")["weak"] == "not reached"
    assert cells(found, "cost", "runs that reached it") == {"strong": "2 of 2", "weak": "0 of 2"}
    easy = compare([sweep], Options(target=0.01))
    assert cells(easy, "cost", "steps") == {"strong": "0", "weak": "0"}


def test_scores_stand_against_what_was_sampled_for_them(tmp_path):
    for name in ("full", "stopped"):
        for seed in range(2):
            level, kept, discarded = (0.9, 100, {}) if name == "full" else (0.6, 50 + 20 * seed, {"discarded_tokens": 15})
            run = write_run(tmp_path / name / f"seed-{seed}", steps=4, every=2, seed=seed, level=level)
            lines = [json.dumps({"step": k, "sampled_tokens": kept, **discarded}) for k in range(1, 5)]
            (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    found = compare([tmp_path], Options())
    assert cells(found, "sampled-tokens", "sampled tokens") == {"full": "400", "stopped": "300"}
    assert cells(found, "sampled-tokens", "of the most") == {"full": "100.0", "stopped": "75.0"}
    scores = [row[3:] for row in table(found, "sampled-tokens").rows]
    for (mean, low, high, runs), row in zip(scores, found.scores["heldout"]):
        assert [runs, mean] == [2, pytest.approx(row.figure("accuracy"))]
        assert [low, high] == sorted(result.figures["accuracy"] for result in row.results)
    assert cells(found, "heldout-scores", "sampled tokens") == cells(found, "sampled-tokens", "sampled tokens")
    assert sorted(row[4] for row in table(found, "runs").shown()) == ["260", "340", "400", "400"]
    alone = compare([tmp_path / "full"], Options())
    assert "sampled-tokens" not in [each.name for each in alone.tables]
    assert not alone.spendings


def test_the_finding_names_the_best_and_what_speaks_for_it(sweep):
    first = compare([sweep], Options(baseline="weak")).findings[0]
    assert first.startswith("On held-out problems, strong has the highest accuracy: ")
    assert "points against weak, p " in first
    assert "it is the baseline" in compare([sweep], Options(baseline="strong")).findings[0]


def test_the_mean_of_the_suites_and_its_place_among_the_comparisons(tmp_path):
    for name, level in (("a", 0.3), ("b", 0.8)):
        write_run(tmp_path / name, steps=4, every=2, level=level, suites={"gsm8k": 4, "math500": 4})
    teacher = write_results(tmp_path / "teacher", {"heldout": 0.97, "gsm8k": 0.9, "math500": 0.9}, problems=40, samples=4)
    found = compare([tmp_path / "a", tmp_path / "b"], Options(teacher=teacher))
    mean = table(found, "mean-of-suites")
    rows = {row[0]: row for row in mean.rows}
    assert list(rows) == ["a", "b", "(teacher)"]
    for name, value in rows.items():
        alone = [
            {row[0]: row[1] for row in table(found, f"{suite}-scores").rows}[name].value for suite in ("gsm8k", "math500")
        ]
        assert value[1].value == pytest.approx(sum(alone) / 2)
        assert value[1].low < value[1].value < value[1].high
        assert value[-2:] == [2, 80]
    assert "gsm8k, math500" in mean.note
    assert "for all 4 comparisons of this report" in mean.note  # held-out problems, two suites, their mean
    assert "for all 4 comparisons of this report" in table(found, "gsm8k-scores").note
    assert rows["b"][3] is not None
    assert any(line.startswith("On the mean of 2 suites, b has the highest accuracy") for line in found.findings)
    assert 'id="mean"' in write_page(found, tmp_path / "out").read_text()
    one = compare([tmp_path / "a", tmp_path / "b"], Options(suites=["gsm8k"]))
    assert "mean-of-suites" not in [each.name for each in one.tables]


def test_two_equal_groups_are_never_apart(tmp_path):
    """Nothing solved by anyone: no seed and no problem differs, and that is no certainty."""
    for name in ("a", "b"):
        for seed in range(2):
            path = write_results(tmp_path / name / f"seed-{seed}", {"aime24": 0.5}, problems=30) / "aime24.json"
            raw = json.loads(path.read_text())
            rows = [{**row, "verdicts": ["wrong"], "classes": [None]} for row in raw["rows"]]
            path.write_text(json.dumps({**raw, "accuracy": 0.0, "rows": rows}))
    found = compare([tmp_path], Options())
    assert cells(found, "aime24-scores", "p (Holm)")["b"] == "1.000"
    assert "ahead of no other group beyond chance" in found.findings[0]


def test_notes_of_results_are_shown_once_with_who_has_them(sweep, tmp_path):
    shutil.copytree(sweep, tmp_path / "copy")
    for seed in (0, 1):
        path = tmp_path / "copy" / "weak" / f"seed-{seed}" / "eval" / "step-40" / "gsm8k.json"
        raw = json.loads(path.read_text())
        path.write_text(json.dumps({**raw, "notes": [*raw["notes"], "chosen on this suite"]}))
    notes = compare([tmp_path / "copy"], Options()).notes
    assert [note for note in notes if "chosen" in note] == ["gsm8k: chosen on this suite (weak)"]
    assert sum("separate differences" in note for note in notes) == 2  # one a suite


def test_notes_that_differ_in_numbers_alone_are_one(tmp_path):
    for name, number in (("a", "9.5"), ("b", "10.25")):
        path = write_results(tmp_path / name, {"gsm8k": 0.5}) / "gsm8k.json"
        note = f"60 problems separate {number} points"
        path.write_text(json.dumps({**json.loads(path.read_text()), "notes": [note]}))
    assert compare([tmp_path], Options()).notes == ["gsm8k: 60 problems separate 9.5 to 10.25 points"]


def test_partly_common_problems_are_said(tmp_path):
    write_results(tmp_path / "a", {"gsm8k": 0.5}, problems=40)
    write_results(tmp_path / "b", {"gsm8k": 0.5}, problems=38)
    found = compare([tmp_path], Options())
    assert "gsm8k: b and a share 38 problems; the difference is taken on these" in found.notes


def test_results_that_were_sampled_differently_are_said(tmp_path):
    write_results(tmp_path / "a", {"gsm8k": 0.5}, samples=2)
    write_results(tmp_path / "b", {"gsm8k": 0.5}, samples=4)
    found = compare([tmp_path], Options())
    assert "gsm8k: not all were evaluated alike: samples 2 or 4" in found.notes


def test_what_cannot_be_compared_is_said(tmp_path):
    write_results(tmp_path / "a", {"gsm8k": 0.5}, problems=40)
    write_results(tmp_path / "b", {"math500": 0.5}, problems=40)
    found = compare([tmp_path], Options())
    assert "math500: the baseline a has no results, so nothing is tested against it" in found.notes


def test_runs_that_were_not_evaluated_yet_are_listed(tmp_path):
    run = write_run(tmp_path / "run", steps=4, every=2, ended=3)
    shutil.rmtree(run / "eval")
    found = compare([run], Options())
    assert found.findings == ["No run has been evaluated yet."]
    assert "Training loss" in write_page(found, tmp_path / "out").read_text()


def test_only_the_suites_asked_for(sweep):
    assert list(compare([sweep], Options(suites=["gsm8k"])).scores) == ["gsm8k"]


def test_another_metric_leaves_out_what_has_too_few_samples(sweep):
    found = compare([sweep], Options(metric="pass@4"))
    assert cells(found, "heldout-scores", "pass@4") == {"strong": "–", "weak": "–"}
    assert cells(found, "gsm8k-scores", "pass@4")["strong"] != "–"
    assert any("has 1 sample a problem, too few for pass@4" in note for note in found.notes)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (Options(baseline="strnog"), "--baseline: no group 'strnog'; did you mean 'strong'"),
        (Options(reference="x"), "--reference: no group 'x'; known: strong, weak"),
        (Options(reference="weak", teacher=Path()), "--teacher and --reference are two goals"),
        (Options(suites=["gsmk"]), "--suite: no run has results of 'gsmk'; did you mean 'gsm8k'"),
        (Options(target=80.0), "--target: 80.0 is no accuracy; give a fraction"),
        (Options(metric="f1"), "--metric: 'f1' is no metric"),
        (Options(metric="pass@64"), r"--metric: pass@64 needs more samples a problem than any result has \(4\)"),
    ],
)
def test_mistakes_are_named_with_their_option(sweep, options, message):
    with pytest.raises(UserError, match=message):
        compare([sweep], options)


class Outline(HTMLParser):
    """Tags with their attributes, ids, and the text that is shown."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def ids(self):
        return [attributes["id"] for _, attributes in self.tags if "id" in attributes]


@pytest.fixture(scope="module")
def page(sweep, teacher, tmp_path_factory):
    out = tmp_path_factory.mktemp("out")
    found = compare([sweep], Options(baseline="weak", teacher=teacher))
    write_tables(found, out)
    return write_page(found, out)


def test_all_files_are_written(page):
    out = page.parent
    assert {path.suffix for path in (out / "tables").iterdir()} == {".csv", ".md"}
    names = {path.stem for path in (out / "figures").iterdir()}
    assert {
        "heldout-score-by-steps",
        "heldout-reverse_kl-by-time",
        "loss-by-tokens",
        "heldout-scores",
        "gsm8k-scores",
        "final-score-by-tokens",
    } <= names
    assert all((out / "figures" / f"{name}{suffix}").is_file() for name in names for suffix in (".svg", ".png"))
    assert not list(out.rglob(".*"))
    rows = list(csv.DictReader((out / "tables" / "heldout-scores.csv").read_text().splitlines()))
    assert float(rows[0]["accuracy_low"]) <= float(rows[0]["accuracy"]) <= float(rows[0]["accuracy_high"])


def test_the_page_needs_nothing_else(page):
    outline = Outline(page.read_text())
    assert not [tag for tag, _ in outline.tags if tag in {"script", "img", "iframe", "object", "embed"}]
    assert [attributes["href"] for tag, attributes in outline.tags if tag == "link"] == ["data:,"]
    policy = [attributes["content"] for tag, attributes in outline.tags if attributes.get("http-equiv")]
    assert policy == ["default-src 'none'; style-src 'unsafe-inline'; img-src data:"]
    assert "url(http" not in page.read_text()


def test_the_page_is_a_document_that_a_screen_reader_can_follow(page):
    outline = Outline(page.read_text())
    tags = [tag for tag, _ in outline.tags]
    assert {"header", "nav", "main", "footer", "h1", "caption", "figcaption"} <= set(tags)
    assert tags.count("h1") == 1
    levels = [int(tag[1]) for tag in tags if re.fullmatch("h[1-6]", tag)]
    assert all(after <= before + 1 for before, after in pairwise(levels))
    ids = outline.ids()
    assert len(ids) == len(set(ids))
    targets = {str(attributes.get("href"))[1:] for tag, attributes in outline.tags if tag == "a"}
    targets |= {str(attributes["aria-labelledby"]) for _, attributes in outline.tags if "aria-labelledby" in attributes}
    assert targets <= set(ids)
    assert all(attributes.get("scope") for tag, attributes in outline.tags if tag == "th")
    figures = [attributes for tag, attributes in outline.tags if tag == "svg" and attributes.get("role") == "img"]
    assert len(figures) == tags.count("figure")
    assert all("Last values" in str(f["aria-label"]) or "(%)" in str(f["aria-label"]) for f in figures)


def test_the_page_shows_scores_against_tokens(page):
    text = page.read_text()
    assert re.search(r'<h2 id="tokens">Held-out accuracy against sampled tokens</h2>', text)
    assert re.search(r'aria-label="Held-out accuracy against sampled tokens\. strong [\d.]+ at [\d.]+k; weak ', text)


def test_the_page_shows_tokens_by_their_advantage(page):
    text = page.read_text()
    assert re.search(r'<span class="m4"> \w+</span>', text)
    assert re.search(r'<span class="l4"> \w+</span>', text)
    assert "Largest differences" in text


def test_hostile_texts_are_shown_and_do_nothing(tmp_path):
    names = ["<script>alert(1)<\\script>", "a$_{b\x1b[31m", "\u202egnp", "[bold]"]
    for place, name in enumerate(names):
        settings = {"note": f"</style><script>alert({place})</script>"}
        run = write_run(tmp_path / "runs" / name / "seed-0", steps=4, every=2, problems=5, config=settings)
        path = run / "rollouts" / "step-4.jsonl"
        rows = [json.loads(row) for row in path.read_text().splitlines()]
        rows[0] |= {"prompt": "</pre></style><img src=x onerror=alert(1)>" + "x" * 10**6, "id": "<b>\u202e"}
        rows[0]["tokens"][:2] = ["<script>alert('token')</script>", "\u202e" + "y" * 10**6]
        answers = ["<script>alert('answer')</script>\u202e" + "z" * 10**6]
        rows[0]["turns"] = [{"num_tokens": 60, "num_reused": 0, "observations": answers}]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = write_page(compare([tmp_path / "runs"], Options()), tmp_path / "out")
    text = page.read_text()
    outline = Outline(text)
    assert not [tag for tag, _ in outline.tags if tag in {"script", "img", "b"}]
    assert [tag for tag, _ in outline.tags].count("style") == text.count("</style>") == 1
    assert len(text) < 2_000_000
    assert "\u202e" not in text
    assert "\x1b" not in text
    for place in ("token", "answer"):
        assert f"&lt;script&gt;alert(&#39;{place}&#39;)&lt;/script&gt;" in text


def test_results_alone_make_a_page_without_curves(tmp_path):
    write_results(tmp_path / "a", {"gsm8k": 0.5})
    found = compare([tmp_path / "a"], Options())
    assert found.findings[0].startswith("On gsm8k, a alone has results")
    text = write_page(found, tmp_path / "out").read_text()
    assert "Training curves" not in text
    assert 'id="rollouts"' not in text
    assert 'id="tokens"' not in text


def opd_compare(*arguments, block: tuple[str, ...] = ()):
    """The command in a process that cannot import `block`."""
    code = (
        "import sys\n"
        f"for name in {block!r}: sys.modules[name] = None\n"
        "from opd.cli import main\n"
        "try: main()\n"
        "finally:\n"
        "    heavy = {'torch', 'transformers', 'pandas', 'datasets'} & set(sys.modules)\n"
        "    assert not heavy, heavy"
    )
    command = [sys.executable, "-c", code, "compare", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


def test_the_command_prints_tables_and_needs_no_torch(sweep, tmp_path):
    done = opd_compare(sweep, "--out", tmp_path / "out", "--reference", "strong")
    assert done.returncode == 0, done.stderr
    for words in ("Accuracy on held-out problems", "recovery (%)", "Verdicts on gsm8k", "Findings", "Notes"):
        assert words in done.stdout
    assert (tmp_path / "out" / "report.html").is_file()


def test_without_the_extra_only_tables_are_written(sweep, tmp_path):
    done = opd_compare(sweep, "--out", tmp_path / "out", block=("matplotlib", "jinja2"))
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "pip install 'opd[report]'" in done.stderr
    done = opd_compare(sweep, "--out", tmp_path / "out", "--no-html", block=("matplotlib", "jinja2"))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "tables" / "heldout-scores.csv").is_file()
    assert not (tmp_path / "out" / "report.html").exists()


def test_a_folder_that_cannot_be_written_is_one_line(sweep, tmp_path):
    (tmp_path / "file").write_text("")
    done = opd_compare(sweep, "--out", tmp_path / "file", "--no-html")
    assert done.returncode == 2
    assert "cannot be written" in done.stderr
