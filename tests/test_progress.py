"""The line that a run writes about a step where there is no terminal."""

import pytest

from opd.progress import ProgressBar


@pytest.mark.parametrize(
    ("metrics", "line"),
    [
        ({"reverse_kl": 0.25}, "step 1/2  loss 0.5000  KL 0.2500  1,234 tokens/s"),
        (
            {"success_rate": 0.5, "live_groups": 0.25},
            "step 1/2  loss 0.5000  success 0.50  live groups 0.25  1,234 tokens/s",
        ),
        ({"gate_share": 0.125, "entropy": 3.0}, "step 1/2  loss 0.5000  gated 0.12  1,234 tokens/s"),
        ({}, "step 1/2  loss 0.5000  1,234 tokens/s"),
    ],
)
def test_figures_are_shown_where_they_are(capsys, metrics, line):
    with ProgressBar(2, 0, shown=True) as bar:
        bar.step(1, {"loss": 0.5, "perf/tokens_per_s": 1234.0, **metrics})
    assert capsys.readouterr().err.strip() == line
