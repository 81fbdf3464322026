"""The shipped quick starts on the real tiny family, end to end. Slow: the family is trained from nothing."""

import pytest

import opd

GAIN = {"quickstart": 0.40, "quickstart-topk": 0.40, "quickstart-sampled": 0.15}  # in accuracy, at least
GAIN |= {"data-free-quickstart": 0.40, "data_free/two-teachers": 0.25}
GAIN |= {"compass-quickstart": 0.10, "compass-quickstart-moe": 0.10}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("recipe", GAIN)
def test_accuracy_rises(recipe, tmp_path):
    summary = opd.train(opd.load_config(recipe), tmp_path / "run")
    before, after = summary["eval"]["before"], summary["eval"]["after"]
    assert 0.05 <= before["accuracy"] <= 0.5
    assert after["accuracy"] - before["accuracy"] >= GAIN[recipe]
    closer = 0.9 if recipe.startswith("compass") else 0.5  # CompassOPD does not aim at the teacher itself
    assert after["reverse_kl"] < closer * before["reverse_kl"]
