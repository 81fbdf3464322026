"""What a checkpoint's run has to do with the problems it is evaluated on."""

import dataclasses
import json

import pytest

import opd
from opd.config import build_config
from opd.data import Columns, DatasetConfig, load_prompts
from opd.errors import UserError
from opd.eval.provenance import (
    Checkpoint,
    find_checkpoint,
    overlap_notes,
    selected_step,
    selection_notes,
    steps_of,
    training_overlap,
)

LONG = "Fifteen red foxes jump over twenty lazy brown dogs while seven quiet cats watch from the warm old stone wall"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("problems")
    for name, words in {"train": ["abc", "de", "fghij"], "reported": ["za", "yb"], "chosen": ["ab", "ba"]}.items():
        rows = [{"problem": word, "answer": "1"} for word in words]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(scope="module")
def run(model_folder, tmp_path_factory, data):
    """A run of four steps whose verifier likes some steps' answers more than others'."""
    reward = data / "reward.py"
    reward.write_text("def score(response, answer, row):\n    return len(response) % 2\n")
    problems = {
        name: {"path": str(data / f"{name}.jsonl"), "columns": {"prompt": "problem"}} for name in ("reported", "chosen")
    }
    config = build_config(
        {
            "steps": 4,
            "student": {"model": str(model_folder(0))},
            "teachers": {"default": {"model": str(model_folder(1))}},
            "prompts": {"path": str(data / "train.jsonl"), "columns": {"prompt": "problem"}},
            "batch": {"prompts": 2},
            "sampling": {"max_new_tokens": 6},
            "terms": {"reverse_kl": {}},
            "optimizer": {"lr": 0.02},
            "eval": {
                "prompts": problems["reported"],
                "selection": problems["chosen"],
                "every": 1,
                "kl_prompts": 0,
                "temperature": 1.0,
                "samples": 8,
                "reward": f"{reward}:score",
            },
            "checkpoint": {"every": 0, "keep": 1},
        }
    )
    path = tmp_path_factory.mktemp("runs") / "run"
    opd.train(config, path)
    return path


def checkpoint_of(run, which: str = "last") -> Checkpoint:
    found = find_checkpoint(str(run), which)
    assert found is not None
    return found


def problems(path):
    return load_prompts(DatasetConfig(str(path), columns=Columns("problem")), "data")


def test_a_checkpoint_is_found_however_its_path_is_written(run, monkeypatch):
    monkeypatch.chdir(run / "checkpoints")
    for name in ("step-4", "./step-4", "../checkpoints/step-4"):
        assert checkpoint_of(name).run == run
    monkeypatch.chdir(run)
    assert checkpoint_of(".").path == run / "checkpoints" / "step-4"


def test_the_best_on_the_selection_set_is_kept(run):
    rows = [json.loads((run / "eval" / f"step-{step}.json").read_text()) for step in range(1, 5)]
    accuracies = [row["selection_accuracy"] for row in rows]
    assert len(set(accuracies)) > 1  # so that there is something to choose
    best = accuracies.index(max(accuracies)) + 1
    assert selected_step(run) == best
    assert steps_of(run) == sorted({best, 4})
    assert json.loads((run / "summary.json").read_text())["selected"] == {"step": best, "accuracy": max(accuracies)}
    assert checkpoint_of(run, "best").step == best


def test_finding_a_checkpoint(run, tmp_path):
    found = checkpoint_of(run)
    assert (found.step, found.path) == (4, run / "checkpoints" / "step-4")
    assert checkpoint_of(run / "checkpoints" / "step-4").step == 4
    assert find_checkpoint(str(tmp_path)) is None
    assert find_checkpoint("owner/name") is None
    with pytest.raises(UserError, match="has no step 9; it has"):
        find_checkpoint(str(run), "9")


def test_reporting_the_selection_set_is_warned_of(run, data):
    best = checkpoint_of(run, "best")
    (note,) = selection_notes(best, problems(data / "chosen.jsonl"))
    assert note.startswith(f"WARNING: step {best.step} was chosen for its accuracy on 2 of these 2 problems")
    assert selection_notes(best, problems(data / "reported.jsonl")) == []


def test_an_earlier_checkpoint_on_held_out_problems_is_warned_of(run, data):
    last = checkpoint_of(run)
    chosen = Checkpoint(last.run, 3, last.config)
    (note,) = selection_notes(chosen, problems(data / "reported.jsonl"))
    assert "step 3 is not the run's last, and 2 of these 2 problems" in note
    assert selection_notes(last, problems(data / "reported.jsonl")) == []


def test_overlap_with_the_training_prompts(run, data):
    config, before = checkpoint_of(run).config, (data / "train.jsonl").read_text()
    clean = training_overlap(config, problems(data / "reported.jsonl"))
    assert clean is not None
    assert clean["num_overlapping"] == 0
    (data / "train.jsonl").write_text(json.dumps({"problem": f"Once more: {LONG}!"}) + "\n")
    (data / "leaked.jsonl").write_text(json.dumps({"problem": LONG.upper()}) + "\n")
    found = training_overlap(config, problems(data / "leaked.jsonl"))
    assert found is not None
    assert (found["num_overlapping"], found["num_training"]) == (1, 1)
    assert overlap_notes(found) == [
        "WARNING: 1 of 1 problems share 13 words in a row with one of 1 training prompts; 1 seem to be copies",
    ]
    (data / "train.jsonl").unlink()
    assert training_overlap(config, problems(data / "leaked.jsonl")) is None
    (data / "train.jsonl").write_text(before)


def test_evaluations_while_training_carry_overlap_and_notes(run):
    result = json.loads((run / "eval" / "step-4.json").read_text())
    assert result["overlap"]["num_overlapping"] == 0
    assert "2 problems x 8 samples" in result["notes"][-1]
    assert result["suite"] == "heldout"


@pytest.mark.parametrize(
    ("override", "expected"),
    [("eval.prompts=null", "eval.selection needs eval.prompts"), ("eval.every=0", "eval.selection needs eval.every")],
)
def test_a_selection_that_cannot_work_is_refused(data, override, expected):
    with pytest.raises(UserError, match=expected):
        opd.load_config("quickstart", [override, f"eval.selection.path={data / 'chosen.jsonl'}"])


def test_resuming_with_another_selection_set_is_refused(run, data):
    config = checkpoint_of(run).config
    assert config.eval.selection is not None
    other = dataclasses.replace(config.eval.selection, path=str(data / "reported.jsonl"))
    changed = dataclasses.replace(config, eval=dataclasses.replace(config.eval, selection=other))
    with pytest.raises(UserError, match=r"eval.selection.path: the run in"):
        opd.train(changed, run, resume=True)


def test_choosing_on_the_reported_problems_is_said_in_every_evaluation(run, data, tmp_path):
    config = checkpoint_of(run).config
    evaluation = dataclasses.replace(config.eval, selection=config.eval.prompts)
    opd.train(dataclasses.replace(config, steps=1, eval=evaluation), tmp_path / "run")
    result = json.loads((tmp_path / "run" / "eval" / "step-1.json").read_text())
    assert result["notes"][0].startswith("WARNING: eval.selection shares 2 problems with eval.prompts")
    assert result["notes"][0].partition(":")[2].strip() in (tmp_path / "run/checkpoints/step-1/README.md").read_text()


def test_the_model_card_tells_the_results(run, data, monkeypatch):
    from opd.cli import main

    card = run / "checkpoints" / "step-4" / "README.md"
    before = card.read_text()
    assert "2 problems x 8 samples" in before
    words = ["--model", str(run), "--suite", str(data / "reported.jsonl"), "--max-new-tokens", "4"]
    monkeypatch.setattr("sys.argv", ["opd", "eval", *words])
    with pytest.raises(SystemExit) as end:
        main()
    assert not end.value.code
    result = json.loads((run / "eval" / "step-4" / "reported.json").read_text())
    assert (result["model"], result["step"]) == ("run/step-4", 4)
    assert "reported" in card.read_text()
    assert "reported" not in before.partition("## Results")[2].partition("## Use")[0]
    assert str(run) not in card.read_text()
