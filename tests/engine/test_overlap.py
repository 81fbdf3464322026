"""Runs that measure the overlap beside what they learn by: nothing else changes."""

import shutil

import pytest

from opd.assembly import assemble, make_accelerator
from opd.config import build_config
from opd.doctor import examine
from opd.errors import UserError

NAMES = {"student_topk_kl", "topk_overlap", "overlap_mass", "overlap_mass_teacher"}
MEASURED = {"overlap": {"k": 6, "num_rollouts": 3}}


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("reverse_kl", [{"form": "full"}, {"form": "sampled"}, {"form": "topk", "k": 4}])
def test_training_is_the_same_to_the_bit(raw_recipe, train, reverse_kl, lookahead):
    raw = raw_recipe(steps=3, lookahead=lookahead, terms={"reverse_kl": reverse_kl})
    plain, measured = train(raw, "plain"), train({**raw, "terms": {**raw["terms"], **MEASURED}}, "measured")
    for before, after in zip(plain, measured, strict=True):
        assert set(after) - set(before) == NAMES
        assert {name: value for name, value in after.items() if name not in NAMES} == before
        assert 0 < after["topk_overlap"] < 1
        assert 0 < after["overlap_mass"] < 1


def test_the_divergence_is_that_of_the_top_k_form(raw_recipe, train):
    """Of all rollouts, and with rollouts of the student as it is."""
    terms = {"reverse_kl": {"form": "topk", "k": 5}, "overlap": {"k": 5, "num_rollouts": 0}}
    for row in train(raw_recipe(steps=3, terms=terms)):
        assert row["student_topk_kl"] == pytest.approx(row["reverse_kl"], rel=1e-4)


def test_an_interrupted_run_goes_on_as_it_would_have(raw_recipe, train, tmp_path):
    """With rollouts in flight, whose likely tokens and their log-probs are in the checkpoint."""
    terms = {"reverse_kl": {"form": "full"}, **MEASURED}
    raw = raw_recipe(steps=4, lookahead=1, terms=terms, checkpoint={"every": 2, "keep": 9})
    whole = train(raw)
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-4")
    assert train(raw, resume=True) == whole
    assert len(whole) == 4


def test_alone_without_a_teacher_or_with_one_of_other_tokens_it_is_refused(raw_recipe, aligned_recipe):
    with pytest.raises(UserError, match=r"^terms: overlap only measures, so nothing would be learned"):
        build_config(raw_recipe(terms=MEASURED))
    with pytest.raises(UserError, match=r"^teachers: terms\.overlap asks one"):
        build_config(raw_recipe(terms={"self_distillation": {}, **MEASURED}, teachers=None))
    config = build_config(aligned_recipe(terms={"reverse_kl": {"form": "sampled"}, **MEASURED}))
    with pytest.raises(UserError, match=r"^terms\.overlap: teachers\.default\.model reads with another tokenizer"):
        assemble(config, make_accelerator())


def test_the_doctor_finds_nothing_wrong(raw_recipe):
    plain, measured = (
        examine(build_config(raw_recipe(terms=terms))) for terms in ({"reverse_kl": {}}, {"reverse_kl": {}, **MEASURED})
    )
    assert measured == plain
