"""Masks laid over terms: weights are multiplied, and what counts in the normaliser is up to each mask."""

from typing import Any

import numpy as np
import pytest

from opd.masking import masked
from opd.objective.batching import counted
from opd.plugins import Mask
from opd.records import Rollout, Term

MODELS: Any = None  # the masks here ask nobody


class Given(Mask):
    """The weights that a test gives."""

    def __init__(self, weights: list[float], counted: bool = True) -> None:
        self.given, self.counted = weights, counted

    def weights(self, rollout, models):
        return np.array(self.given, np.float32)


@pytest.fixture
def rollout(random_rollout) -> Rollout:
    return random_rollout(0, (3, 4), num_reused=1)


@pytest.fixture
def terms(rollout) -> list[Term]:
    """One without weights, and one that already has some and is not about every token."""
    weight = np.array([1.0, 0.5, 0.5, 2.0], np.float32)
    mask = np.array([False, True, False, True])
    return [Term("penalty", rollout.trainable, {"gate": weight}), Term("divergence", mask, {}, weight, coef=0.3)]


def weights_of(terms: list[Term]) -> list[list[float]]:
    return [[] if term.weight is None else term.weight.tolist() for term in terms]


def test_without_masks_the_terms_stay_what_they_are(rollout, terms):
    assert masked({}, rollout, terms, MODELS) is terms


def test_weights_are_multiplied_with_the_terms_own(rollout, terms):
    found = masked({"one": Given([1.0, 0.0, 0.5, 1.0])}, rollout, terms, MODELS)
    assert weights_of(found) == [[1.0, 0.0, 0.5, 1.0], [1.0, 0.0, 0.25, 2.0]]
    for term, before in zip(found, terms):
        assert term.weight is not None
        assert term.weight.dtype == np.float32
        assert term.mask is before.mask
        assert (term.kind, term.inputs, term.coef) == (before.kind, before.inputs, before.coef)
    assert weights_of(terms) == [[], [1.0, 0.5, 0.5, 2.0]]  # those that came in are untouched


def test_several_masks_hold_together(rollout, terms):
    masks = {"one": Given([1.0, 0.0, 0.5, 1.0]), "other": Given([0.0, 1.0, 0.5, 1.0])}
    assert weights_of(masked(masks, rollout, terms, MODELS)) == [[0.0, 0.0, 0.25, 1.0], [0.0, 0.0, 0.125, 2.0]]


def test_tokens_of_weight_0_leave_the_normaliser_where_their_mask_says_so(rollout, terms):
    half = Given([1.0, 0.0, 0.5, 1.0], counted=False)
    found = masked({"half": half}, rollout, terms, MODELS)
    assert [term.mask.tolist() for term in found] == [[False, False, True, True], [False, False, False, True]]
    assert counted(rollout, found).tolist() == [False, False, True, True]  # half a weight counts as a whole token


def test_a_mask_that_counts_does_not_bring_back_what_another_left_out(rollout, terms):
    left_out, kept = Given([1.0, 1.0, 0.0, 1.0], counted=False), Given([1.0, 0.0, 1.0, 1.0])
    for masks in ({"a": left_out, "b": kept}, {"b": kept, "a": left_out}):
        found = masked(masks, rollout, terms, MODELS)
        assert counted(rollout, found).tolist() == [False, True, False, True]
        assert weights_of(found)[0] == [1.0, 0.0, 0.0, 1.0]


def test_a_rollout_without_terms_has_none(rollout):
    assert masked({"one": Given([1.0, 0.0, 1.0, 1.0])}, rollout, [], MODELS) == []
