import json

import pytest

from opd.eval.summary import summarise


def row(verdicts, tokens=None, classes=None, finish=None, repetitive=None):
    n = len(verdicts)
    default = [0 if v == "correct" else 1 if v == "wrong" else None for v in verdicts]
    return {
        "verdicts": verdicts,
        "classes": classes or default,
        "num_tokens": tokens or [10] * n,
        "finish": finish or ["eos"] * n,
        "repetitive": repetitive or [False] * n,
    }


def test_every_figure_of_a_small_evaluation():
    rows = [
        row(["correct", "correct", "wrong"], [10, 20, 60]),
        row(
            ["truncated", "no_answer", "correct"],
            [100, 40, 30],
            finish=["length", "eos", "length"],
            repetitive=[True] + [False] * 2,
        ),
        row(["timeout", "wrong", "wrong"], [5, 5, 5]),
    ]
    summary = summarise(rows)
    assert summary["accuracy"] == pytest.approx((2 / 3 + 1 / 3) / 3)
    assert (summary["num_problems"], summary["num_samples"]) == (3, 9)
    counts = {name: summary[f"num_{name}"] for name in ("correct", "wrong", "no_answer", "truncated", "timeout")}
    assert counts == {"correct": 3, "wrong": 3, "no_answer": 1, "truncated": 1, "timeout": 1}
    assert summary["timeout_rate"] == pytest.approx(1 / 9)
    assert summary["at_limit_rate"] == pytest.approx(2 / 9)  # whatever the verdict
    assert summary["repetitive_rate"] == pytest.approx(1 / 9)
    assert summary["mean_tokens"] == pytest.approx((30 + 170 / 3 + 5) / 3)
    assert summary["mean_tokens_correct"] == pytest.approx(20)
    assert summary["mean_tokens_wrong"] == pytest.approx(215 / 6)
    assert [name for name in summary if "@" in name] == ["pass@1", "pass@2", "pass@3", "maj@1", "maj@2", "maj@3"]
    assert summary["pass@1"] == summary["maj@1"] == pytest.approx(summary["accuracy"])
    assert summary["pass@3"] == pytest.approx(2 / 3)
    assert summary["maj@3"] == pytest.approx(2 / 3)  # one answer against two that have none
    for name, (low, high) in summary["intervals"].items():
        assert low <= summary[name] <= high
    assert set(summary["intervals"]) == {"accuracy", "mean_tokens", *(name for name in summary if "@" in name)}
    assert summary["power_note"].startswith("3 problems x 3 samples")
    json.dumps(summary, allow_nan=False)


def test_ragged_rows_count_problems_alike_and_k_goes_to_the_shortest():
    summary = summarise([row(["correct"] * 5), row(["wrong", "correct"])])
    assert summary["accuracy"] == pytest.approx(0.75)
    assert [name for name in summary if name.startswith("pass")] == ["pass@1", "pass@2"]
    assert summary["correct_rate"] == pytest.approx(6 / 7)


def test_one_problem_and_one_outcome():
    summary = summarise([row(["correct"], [7])])
    assert summary["mean_tokens_wrong"] is None
    assert "mean_tokens" not in summary["intervals"]  # one problem has no spread
    assert summary["intervals"]["accuracy"] == pytest.approx([0.025, 1.0])
    json.dumps(summary, allow_nan=False)


@pytest.mark.parametrize("rows", [[], [row(["correct"]), row([])]])
def test_nothing_to_summarise(rows):
    with pytest.raises(ValueError, match="at least one problem"):
        summarise(rows)


def test_accuracy_of_each_domain():
    rows = [{**row([verdict]), "domain": domain} for verdict, domain in (("correct", "a"), ("wrong", "b"), ("wrong", "a"))]
    summary = summarise(rows)
    assert (summary["accuracy/a"], summary["accuracy/b"]) == (0.5, 0.0)
    assert not [name for name in summarise(rows[::2]) if name.startswith("accuracy/")]  # one domain is the whole
    assert "accuracy/default" in summarise([*rows, row(["correct"])])
