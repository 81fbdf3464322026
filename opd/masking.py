"""The masks of a run, laid over every term of a rollout."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from opd.plugins import Mask, Models
from opd.records import Rollout, Term


def masked(masks: Mapping[str, Mask], rollout: Rollout, terms: list[Term], models: Models) -> list[Term]:
    """`terms` with the weights of all masks multiplied in.

    A token of weight 0 stays in the context and teaches nothing directly. It counts in the normaliser still, unless its mask
    says otherwise: then the other tokens' share of the loss grows.
    """
    for mask in masks.values():
        weights = mask.weights(rollout, models)
        terms = [_under(term, weights, mask.counted) for term in terms]
    return terms


def _under(term: Term, weights: np.ndarray, counted: bool) -> Term:
    before = np.ones(len(weights), np.float32) if term.weight is None else term.weight
    kept = term.mask if counted else term.mask & (weights > 0)
    return replace(term, mask=kept, weight=(before * weights).astype(np.float32))
