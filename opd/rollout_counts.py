"""What a step's rollouts were like, counted: tokens, ends, turns, stops and restarts."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from opd.episodes import SUCCESS
from opd.objective.batching import Taught, counted, num_trainable
from opd.records import Rollout, Term
from opd.units import units_of

DOMAIN = "domain/"  # before its name
MOST_UNITS = 64  # counted one by one; those after it count with it


def counts_of(step: int, taught: Sequence[Taught], chunk_tokens: int) -> Counter[str]:
    """One process's counts of `step`; `step - 1` updates came before it. To be added up over processes.

    `sampled_tokens` are those that were kept; reused ones were sampled at another step.
    """
    counts: Counter[str] = Counter(trained_tokens=num_trainable(taught)[0])
    for rollout, terms in taught:
        counts += _of_rollout(step, rollout, chunk_tokens)
        counts += _of_weights(rollout, terms)
        trained = counted(rollout, terms)
        counts[f"{DOMAIN}{rollout.prompt.domain}"] += int(trained.sum())
        for number, tokens in enumerate(_by_unit(rollout, trained, chunk_tokens), start=1):
            counts[f"trained/{min(number, MOST_UNITS)}"] += tokens
    return counts


def figures_of(counts: Counter[str], *, steered: bool, domains: Iterable[str] = ()) -> dict[str, float]:
    """Metrics of a step from the counts of all processes; `steered`: rollouts had controllers; `domains`: those whose shares
    are of interest, though a step may have none of their prompts."""
    rollouts = max(1, counts["rollouts"])
    figures = {"response_tokens": counts["sampled_tokens"] / rollouts}
    figures |= {f"{name}_rate": counts[name] / rollouts for name in ("eos", "truncated")}
    if counts["episodes"]:
        figures["turns"] = counts["turns"] / counts["episodes"]
    if counts["weighted_tokens"]:
        figures["masked_share"] = counts["masked_tokens"] / counts["weighted_tokens"]
    if counts["judged"]:
        figures["success_rate"] = counts["successes"] / counts["judged"]
    if steered:
        figures |= {"discarded_tokens": counts["discarded_tokens"], "stopped_rate": counts["stopped"] / rollouts}
        figures |= {"restart_units": counts["reused_units"] / rollouts, "reused_tokens": counts["reused_tokens"]}
        figures |= {name: counts[name] for name in ("restore_failures", "long_prefixes")}
    total = max(1, sum(counts[name] for name in counts if name.startswith("trained/")))
    figures |= {f"tokens_share/{name}": counts[f"{DOMAIN}{name}"] / total for name in sorted(domains)}
    if steered or counts["episodes"]:
        for name in sorted((name for name in counts if not name.startswith(DOMAIN)), key=_place):
            kind, _, unit = name.partition("/")
            if unit:
                figures[f"{kind}_share/{unit}" if kind == "trained" else name] = counts[name] / (
                    total if kind == "trained" else 1
                )
    return figures


class FullLength:
    """A running mean of how long rollouts are that nobody stopped, by which what was saved is estimated."""

    def __init__(self, mean: float | None = None) -> None:
        self.mean = mean

    def saved(self, counts: Mapping[str, float]) -> float | None:
        """Tokens that full rollouts would have had and these had not, reused ones included; None before one was whole.

        An estimate: it takes those that were stopped to be as long as those that were not.
        """
        if counts["whole"]:
            now = counts["whole_tokens"] / counts["whole"]
            self.mean = now if self.mean is None else 0.9 * self.mean + 0.1 * now
        if self.mean is None:
            return None
        return self.mean * counts["rollouts"] - counts["sampled_tokens"] - counts["discarded_tokens"]


def _of_rollout(step: int, rollout: Rollout, chunk_tokens: int) -> Counter[str]:
    stopped = rollout.finish == "stopped"
    reused = sum(turn.num_reused for turn in rollout.turns)
    units = units_of(rollout.turns, chunk_tokens if rollout.prompt.single_turn else None)
    counts = Counter(
        rollouts=1,
        sampled_tokens=rollout.num_tokens - reused,
        reused_tokens=reused,
        discarded_tokens=sum(turn.num_discarded for turn in rollout.turns),
        eos=rollout.finish in ("eos", "env"),
        truncated=rollout.finish == "length",
        stopped=stopped,
        staleness=sum(int((step - 1 - turn.policy_versions[turn.trainable]).sum()) for turn in rollout.turns),
        reused_units=sum(unit.reused for unit in units),
        restored=rollout.restart == "restored",
        restore_failures=rollout.restart == "failed",
        long_prefixes=rollout.restart == "too long",
        whole=not stopped,
        whole_tokens=0 if stopped else rollout.num_tokens,
        episodes=not rollout.prompt.single_turn,
        turns=0 if rollout.prompt.single_turn else len(rollout.turns),
        judged=rollout.outcome is not None and not stopped,  # of others nobody knows what would have come of them
        successes=rollout.outcome is not None and not stopped and rollout.outcome >= SUCCESS,
    )
    if stopped:
        counts[f"stops/{min(len(units), MOST_UNITS)}"] += 1
    return counts


def _of_weights(rollout: Rollout, terms: Sequence[Term]) -> Counter[str]:
    """Trainable tokens where terms have weights, and those of them that have weight 0 in every term."""
    weights = [term.weight for term in terms if term.weight is not None]
    if not weights or len(weights) < len(terms):
        return Counter()
    silent = np.logical_and.reduce([weight == 0 for weight in weights]) & rollout.trainable
    return Counter(weighted_tokens=int(rollout.trainable.sum()), masked_tokens=int(silent.sum()))


def _by_unit(rollout: Rollout, trained: np.ndarray, chunk_tokens: int) -> Iterable[int]:
    """Trained tokens of each unit."""
    if rollout.prompt.single_turn:
        cuts = range(chunk_tokens, len(trained), chunk_tokens)
    else:
        cuts = np.cumsum([len(turn.sampled_ids) for turn in rollout.turns])[:-1].tolist()
    return [int(part.sum()) for part in np.split(trained, list(cuts))]


def _place(name: str) -> tuple[str, int]:
    kind, _, unit = name.partition("/")
    return kind, int(unit or 0)
