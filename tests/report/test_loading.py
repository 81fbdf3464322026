"""Runs and results are found and read as they are."""

import json
import shutil

import numpy as np
import pytest

from benchmarks.report_runs import write_results, write_run
from opd.errors import UserError
from opd.report.loading import flatten, load, load_groups, load_one


def test_seeds_form_the_group_of_their_folder(sweep):
    groups = load_groups([sweep])
    assert [(group.name, len(group.runs)) for group in groups] == [("strong", 3), ("weak", 2)]


def test_any_other_run_is_a_group_of_its_own_and_a_path_counts_once(tmp_path):
    for name in ("run-2", "run-10"):
        write_run(tmp_path / name, steps=4, every=2)
    groups = load_groups([tmp_path / "run-10", tmp_path])
    assert [(group.name, len(group.runs)) for group in groups] == [("run-10", 1), ("run-2", 1)]


def test_groups_of_one_name_are_told_apart_by_their_folders(tmp_path):
    for name in ("first/full", "second/full", "second/other"):
        write_run(tmp_path / name / "seed-0", steps=4, every=2)
    assert [group.name for group in load_groups([tmp_path])] == ["first/full", "second/full", "other"]


def test_steps_and_seeds_sort_as_numbers(tmp_path):
    for seed in (10, 9):
        write_run(tmp_path / f"seed-{seed}", steps=4, every=2)
    assert [run.path.name for run in load_groups([tmp_path])[0].runs] == ["seed-9", "seed-10"]


def test_what_a_run_holds(sweep):
    run = load(sweep / "strong" / "seed-0")
    assert run.finished
    assert run.steps == 40
    assert run.settings["optimizer.lr"] == 0.002
    assert set(run.results) == {"heldout", "gsm8k"}
    assert sorted(run.results["heldout"]) == [0, 10, 20, 30, 40]
    first, last = run.start("heldout"), run.last("heldout")
    assert first is not None
    assert last is not None
    assert (first.step, last.step) == (0, 40)
    spent = run.spent("sampled_tokens", [0, 1, 40])
    assert spent[0] == 0
    assert spent[1] == run.metrics["sampled_tokens"][0]
    assert spent[2] == run.metrics["sampled_tokens"].sum()


def test_what_was_thrown_away_and_what_was_written_was_sampled_too(tmp_path):
    run = write_run(tmp_path / "run", steps=4, every=2)
    lines = [{"step": step, "sampled_tokens": 10, "discarded_tokens": step} for step in range(1, 5)]
    del lines[3]["discarded_tokens"]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    np.testing.assert_array_equal(load(run).spent("sampled_tokens", [0, 1, 2, 4]), [0, 11, 23, 46])
    lines[1] |= {"dropped_tokens": 100, "written_tokens": 1000}
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    np.testing.assert_array_equal(load(run).spent("sampled_tokens", [0, 1, 2, 4]), [0, 11, 1123, 1146])


def test_a_killed_run_is_read_as_far_as_it_goes(sweep):
    run = load(sweep / "strong" / "seed-2")
    assert not run.finished
    assert run.steps == 24  # the 25th line is cut in half
    assert max(run.results["heldout"]) == 20


def test_a_group_counts_its_finished_runs_or_all_where_none_is(sweep):
    strong = load_groups([sweep / "strong"])[0]
    assert [run.path.name for run in strong.counted] == ["seed-0", "seed-1"]
    only = load_groups([sweep / "strong" / "seed-2"])[0]
    assert len(only.counted) == 1


def test_a_run_that_was_prolonged_is_unfinished(tmp_path):
    run = write_run(tmp_path / "run", steps=4, every=2)
    settings = json.loads((run / "config.yaml").read_text())
    (run / "config.yaml").write_text(json.dumps({**settings, "steps": 8}))
    assert not load(run).finished


def test_results_of_opd_eval_are_runs_without_training(tmp_path):
    write_results(tmp_path / "models" / "base", {"gsm8k": 0.4, "math500": 0.3})
    groups = load_groups([tmp_path])
    assert [group.name for group in groups] == ["base"]
    run = groups[0].runs[0]
    assert set(run.results) == {"gsm8k", "math500"}
    assert run.finished
    assert run.start("gsm8k") is None
    assert np.isnan(run.spent("sampled_tokens", [1])).all()


def test_evaluating_held_out_problems_anew_replaces_nothing(tmp_path):
    run = write_run(tmp_path / "run", steps=4, every=2, problems=20)
    before = load(run).last("heldout")
    write_results(run / "eval" / "step-4", {"heldout": 0.9}, problems=20, samples=4)
    loaded = load(run)
    again = loaded.last("heldout (opd eval)")
    assert before is not None
    assert again is not None
    assert loaded.results["heldout"][4].correct == before.correct
    assert (again.samples, sorted(loaded.results["heldout (opd eval)"])) == (4, [4])
    for path in (run / "eval").glob("step-*.json"):
        path.unlink()
    assert set(load(run).results) == {"heldout"}  # a run that was not evaluated while training


def test_other_files_among_evaluations_are_left_alone(tmp_path):
    run = write_run(tmp_path / "run", steps=4, every=2)
    (run / "eval" / "step-best.json").write_text("{}")
    assert sorted(load(run).results["heldout"]) == [0, 2, 4]


def test_lines_of_metrics_may_lack_figures(tmp_path):
    run = write_run(tmp_path / "run", steps=2, every=1)
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0, "jsd": null}\n{"step": 2, "loss": Infinity, "jsd": 0.5}\n')
    metrics = load(run).metrics
    np.testing.assert_array_equal(metrics["loss"], [2.0, np.nan])
    np.testing.assert_array_equal(metrics["jsd"], [np.nan, 0.5])


def test_older_rows_without_digests_are_known_by_their_ids(tmp_path):
    run = write_run(tmp_path / "run", steps=2, every=1, problems=3)
    path = run / "eval" / "step-2.json"
    raw = json.loads(path.read_text())
    rows = [{"id": "same", "verdicts": row["verdicts"]} for row in raw["rows"]]
    path.write_text(json.dumps({"accuracy": 0.5, "rows": rows}))
    last = load(run).last("heldout")
    assert last is not None
    assert last.keys == ["same", "same#2", "same#3"]
    assert last.classes is None


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"eval/step-2.json": "{"}, "step-2.json: damaged"),
        ({"eval/step-2.json": "{}"}, "step-2.json: no result of an evaluation .'rows' is missing"),
        ({"eval/step-2.json": "[1]"}, "step-2.json: damaged or not readable .no JSON object"),
        ({"eval/step-2.json": '{"rows": [1]}'}, "step-2.json: no result of an evaluation"),
        ({"summary.json": "[]"}, "summary.json: damaged"),
        ({"eval/step-2.json": '{"rows": []}'}, "no result of an evaluation .no problems"),
        ({"eval/step-2.json": '{"rows": [{"id": "a", "verdicts": []}]}'}, "no result of an evaluation .no problems"),
        ({"eval/step-2.json": '{"rows": [{"id": "a", "verdicts": ["x"], "classes": []}]}'}, "differ in number"),
        ({"eval/step-2.json": '{"rows": [{"id": "a", "verdicts": ["x"]}], "step": "two"}'}, "no result of an evaluation"),
        ({"metrics.jsonl": '{"step": NaN}\n{"step": 3}\n'}, "metrics.jsonl: line 1 is damaged"),
        ({"metrics.jsonl": '{"step": 1}\n{"st\n{"step": 3}\n'}, "metrics.jsonl: line 2 is damaged"),
        ({"config.yaml": "a: ["}, "config.yaml: not valid YAML"),
    ],
)
def test_damaged_files_are_named(tmp_path, damage, message):
    run = write_run(tmp_path / "run", steps=2, every=1)
    for name, text in damage.items():
        (run / name).write_text(text)
    with pytest.raises(UserError, match=message) as found:
        load(run)
    assert len(str(found.value).splitlines()) == 1


def test_paths_without_runs_are_refused(tmp_path):
    with pytest.raises(UserError, match="no such folder"):
        load_groups([tmp_path / "missing"])
    with pytest.raises(UserError, match="holds neither a run"):
        load_groups([tmp_path])


def test_a_teacher_is_one_run(sweep, teacher):
    assert set(load_one(teacher, "--teacher").results) == {"heldout"}
    with pytest.raises(UserError, match=r"--teacher: .* holds 5 runs"):
        load_one(sweep, "--teacher")


def test_a_run_without_metrics_yet_is_read(tmp_path):
    run = write_run(tmp_path / "run", steps=2, every=1)
    shutil.rmtree(run / "eval")
    for name in ("metrics.jsonl", "summary.json"):
        (run / name).unlink()
    loaded = load(run)
    assert not loaded.finished
    assert loaded.steps == 0
    assert loaded.results == {}


def test_settings_are_flat():
    assert flatten({"a": {"b": {"c": 1}, "d": {}}, "e": [1]}) == {"a.b.c": 1, "a.d": {}, "e": [1]}
