"""The figures of an evaluation, from its problem x sample matrix."""

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any, get_args

import numpy as np

from opd.eval.at_k import avg_at_k, maj_at_k, pass_at_k
from opd.eval.grading import Verdict
from opd.eval.power import power_note
from opd.eval.statistics import interval
from opd.records import DEFAULT_DOMAIN, Array


def summarise(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Everything a result says beside its settings and rows.

    A row is a problem with lists over its samples: `verdicts`, `classes`, `num_tokens`, `finish`, `repetitive`; it may
    have a `domain`. Returns

        accuracy, pass@k, maj@k     for k = 1, 2, 4, ... and the number of samples (the smallest, where rows differ)
        accuracy/D                  of the problems of domain D, where there are several domains
        num_problems, num_samples, num_X and X_rate for each verdict X
        at_limit_rate               samples that ended at the token limit, whatever their verdict
        repetitive_rate             samples that ended in a loop
        mean_tokens                 response length, first averaged over a problem's samples
        mean_tokens_correct, mean_tokens_wrong      over correct samples and all others; None where there are none
        intervals                   95 % limits of accuracy, pass@k, maj@k, mean_tokens where they are defined
        power_note                  what the suite can show (see `opd.eval.power`)

    Raises ValueError for no rows, or a row without samples.
    """
    verdicts = [list(row["verdicts"]) for row in rows]
    if not verdicts or not all(verdicts):
        raise ValueError("summarise needs at least one problem, and a sample of each problem")
    correct = [[verdict == "correct" for verdict in row] for row in verdicts]
    lengths = [np.asarray(row["num_tokens"], np.float64) for row in rows]
    vectors = _vectors(rows, correct) | {"mean_tokens": np.array([length.mean() for length in lengths])}
    flat = [verdict for row in verdicts for verdict in row]
    tokens, right = np.concatenate(lengths), np.array([value for row in correct for value in row])
    summary: dict[str, Any] = {name: float(vector.mean()) for name, vector in vectors.items()}
    summary |= _by_domain(rows, vectors["accuracy"])
    summary |= {"num_problems": len(rows), "num_samples": len(flat)}
    for verdict in get_args(Verdict):
        summary |= {f"num_{verdict}": flat.count(verdict), f"{verdict}_rate": flat.count(verdict) / len(flat)}
    return summary | {
        "at_limit_rate": sum(list(row["finish"]).count("length") for row in rows) / len(flat),
        "repetitive_rate": sum(sum(row["repetitive"]) for row in rows) / len(flat),
        "mean_tokens_correct": float(tokens[right].mean()) if right.any() else None,
        "mean_tokens_wrong": float(tokens[~right].mean()) if not right.all() else None,
        "intervals": _intervals(vectors),
        "power_note": power_note(correct),
    }


def _vectors(rows: Sequence[Mapping[str, Any]], correct: list[list[bool]]) -> dict[str, Array]:
    """Per-problem values of accuracy, pass@k and maj@k, by name."""
    vectors = {"accuracy": avg_at_k(correct)}
    most = min(map(len, correct))
    sizes = sorted({2**i for i in range(most.bit_length())} | {most})
    classes = [row["classes"] for row in rows]
    vectors |= {f"pass@{k}": pass_at_k(correct, k) for k in sizes}
    return vectors | {f"maj@{k}": maj_at_k(classes, correct, k) for k in sizes}


def _by_domain(rows: Sequence[Mapping[str, Any]], accuracy: Array) -> dict[str, float]:
    domains = np.array([row.get("domain", DEFAULT_DOMAIN) for row in rows])
    names = sorted(set(domains.tolist()))
    return {f"accuracy/{name}": float(accuracy[domains == name].mean()) for name in names if len(names) > 1}


def _intervals(vectors: Mapping[str, Array]) -> dict[str, list[float]]:
    intervals = {name: interval(vector) for name, vector in vectors.items()}
    return {name: [found.low, found.high] for name, found in intervals.items() if isfinite(found.low)}
