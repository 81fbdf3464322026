"""`opd replay` as a command: its tables, its file, and what it says of mistakes."""

import json
import subprocess
import sys

import pytest

from opd.cli import main


def row(means, mistakes, outcome, **more):
    """A rollout of turns of one token."""
    turns = [{"num_tokens": 1, "num_reused": 0, "finish": "eos", "mistake": mistake} for mistake in mistakes]
    found = {"id": "p", "slot": 0, "finish": "eos", "outcome": outcome, "unit": "turn", "chunk_tokens": 2}
    return {**found, "teacher_logps": means, "turns": turns, **more}


@pytest.fixture
def run(tmp_path):
    def write(*rows):
        path = tmp_path / "run" / "rollouts" / "step-3.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(each) + "\n" for each in rows))
        return tmp_path / "run"

    return write


@pytest.fixture
def opd_replay(monkeypatch, capsys):
    """(exit code, stdout, stderr) of a call."""

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["opd", "replay", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            main()
        printed = capsys.readouterr()
        return end.value.code or 0, printed.out, printed.err

    return call


EPISODES = [row([-0.1, -0.2], [False, False], 1.0), row([-0.1, -3.0, -0.1], [False, True, False], 0.0)]


def test_tables_notes_and_what_cannot_be_known(opd_replay, run, tmp_path):
    out = tmp_path / "replay.json"
    code, said, _ = opd_replay(run(*EPISODES), "--stop-below", "-0.15,-1", "--keep-above", "-0.8", "--out", out)
    assert code == 0
    lines = [line.split() for line in said.splitlines()]
    assert ["no", "stop", "2", "5", "100.0", "0.0", "0.0", "–"] in lines
    assert ["-0.15", "2", "4", "80.0", "50.0", "50.0", "2.0"] in lines
    assert ["-1", "1", "0.0", "100.0", "0.0", "0.0"] in lines
    assert ["-1", "1", "0.0", "0.0", "100.0"] in lines
    assert "restarts" not in said.split("Restarts that keep turns above -0.8")[0]
    assert "What a replay cannot know" in said
    assert "no rollout was sampled anew" in said
    found = json.loads(out.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert (found["unit"], found["stop_stat"], found["keep_above"], found["steps"]) == ("turn", "cumulative", -0.8, 1)
    assert [each["stop_below"] for each in found["rows"]] == [None, -0.15, -1.0]
    assert [each["tokens"] for each in found["rows"]] == [5, 4, 4]
    assert len(found["unknown"]) == 2


def test_single_answers_have_outcomes_alone(opd_replay, run):
    answers = [row([-1.0, -0.1, -0.1, -2.0], [None], 1.0, unit="chunk")]
    answers[0]["turns"] = [{"num_tokens": 4, "num_reused": 0, "finish": "eos", "mistake": None}]
    code, said, _ = opd_replay(run(*answers), "--stop-below=-0.5", "--keep-above=-inf")
    assert code == 0
    assert "Where in a single answer a mistake stands is unknown" in " ".join(said.split())
    assert "falsely" not in said
    assert "mean stop chunk" in said
    assert ["-0.5", "100.0", "–"] in [line.split() for line in said.splitlines()]


def test_what_the_figures_rest_on_is_said(opd_replay, run):
    cut = row([-0.1, -0.4], [None, None], None, finish="stopped")
    folder = run(cut, {**cut, "teacher_logps": []})
    _, said, _ = opd_replay(folder, "--stop-below", "0", "--keep-above", "-1")
    text = " ".join(said.split())
    for words in (
        "The environment marked no mistakes", "No rollout has an outcome", "A threshold of 0 or more stops every rollout",
        "1 rollouts without log-probs of the teacher are left out", "1 rollouts were stopped when they were sampled",
    ):  # fmt: skip
        assert words in text
    _, said, _ = opd_replay(folder, "--stop-below", "0", "--keep-above", "-1", "--stop-stat", "excess")
    text = " ".join(said.split())
    assert "excess is measured against -0.2500 nats, the mean over all new turns; in training, a running mean" in text
    assert "A threshold of 0" not in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--stop-below", "-1,x", "--keep-above", "-1"], "--stop-below: 'x' is no number"),
        (["--stop-below", "-1,", "--keep-above", "-1"], "--stop-below: '' is no number"),
        (["--stop-below", "nan", "--keep-above", "-1"], "--stop-below: nan is no threshold"),
        (["--stop-below", "inf", "--keep-above", "-1"], "--stop-below: inf is no threshold"),
        (["--stop-below", "-1", "--keep-above", "nan"], "--keep-above: nan is no threshold"),
        (["--stop-below", "-1", "--keep-above", "any"], "--keep-above: 'any' is no number; give nats such as -0.8, or null"),
        (["--stop-below", "-1", "--keep-above", "-1", "--out", "."], "--out . is a folder"),
        (["--stop-below", "-1", "--keep-above", "-1", "--chunk-tokens", "4"], "--chunk-tokens: the units are turns"),
    ],
)
def test_mistakes_are_one_line(opd_replay, run, arguments, message):
    code, said, err = opd_replay(run(*EPISODES), *arguments)
    assert (code, said) == (2, "")
    assert err.startswith(f"error: {message}")
    assert err.count("\n") == 1


def test_it_needs_no_torch(run):
    code = (
        "import sys\nfrom opd.cli import main\ntry: main()\n"
        "finally:\n    assert not {'torch', 'transformers', 'matplotlib'} & set(sys.modules)"
    )
    command = [sys.executable, "-c", code, "replay", run(*EPISODES), "--stop-below", "-1", "--keep-above", "-1"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Stops beside the first mistake" in done.stdout


@pytest.mark.parametrize("floor", ["null", "none", "-inf"])
def test_no_floor_and_a_folder_that_is_not_there_yet(opd_replay, run, tmp_path, floor):
    out = tmp_path / "new" / "folder" / "replay.json"
    code, said, _ = opd_replay(run(*EPISODES), "--stop-below", "-1", "--keep-above", floor, "--out", out)
    assert code == 0
    assert "Restarts that keep turns above -inf" in said
    assert json.loads(out.read_text())["keep_above"] is None
