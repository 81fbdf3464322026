"""What a run writes down: a line of metrics a step, sample rollouts, evaluations, and the summary."""

import asyncio
import resource
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather_object

from opd.assembly import Parts
from opd.config import RunConfig
from opd.eval.provenance import results_of
from opd.flight import Landed
from opd.judging import judge
from opd.model_card import model_card
from opd.objective.batching import Taught
from opd.plugins import Mask, TermMaker
from opd.progress import ProgressBar
from opd.records import Array, Rollout, Turn
from opd.rollout_counts import FullLength, counts_of, figures_of
from opd.run_directory import RunDirectory
from opd.teachers.pool import Tally
from opd.tokenization import render_text
from opd.trackers import Tracker

AT_TIMES = ("written_tokens", "dropped_groups", "dropped_tokens")  # left out where there are none
TOTALS = ("sampled_tokens", "trained_tokens", "skipped_prompts", *AT_TIMES)


class Recorder:
    """Owns the counters of a run. Only the main process writes; every process must call."""

    def __init__(
        self, config: RunConfig, parts: Parts, directory: RunDirectory, bar: ProgressBar, trackers: Sequence[Tracker]
    ) -> None:
        self.config, self.parts, self.directory, self.bar, self.trackers = config, parts, directory, bar, trackers
        self.begin_s = time.perf_counter()
        self.totals = {"wall_s": 0.0, **dict.fromkeys(TOTALS, 0)}
        self.evaluations: dict[str, dict[str, Any]] = {}
        self.full_length = FullLength()
        self.warned = False  # of restarts that fail
        self.warned_empty = False  # of a step that trained nothing
        self.silent: list[TermMaker | Mask] = [*parts.makers, *parts.masks.values()]  # that have not warned yet
        self.selection: dict[str, float] = {}  # the step that is best on the selection set, and its accuracy there

    def step(self, step: int, landed: Landed, metrics: Mapping[str, float]) -> None:
        """Step `step` is done: one line of metrics."""
        counts = sum(gather_object([counts_of(step, landed.taught, self.parts.chunk_tokens)]), Counter())
        counts += sum(gather_object([landed.counts]), Counter())
        for name in TOTALS:
            self.totals[name] += int(counts[name])
        if not counts["trained_tokens"] and not self.warned_empty:
            self.warned_empty = True
            self.bar.say(
                f"WARNING: step {step} has trained nothing: no term learned from any of its tokens; see metrics.jsonl"
            )
        figures = dict(metrics)
        if not self._comparable:
            # two different distributions: their distance says nothing
            figures = {name: value for name, value in figures.items() if name.partition("/")[0] != "mismatch"}
        figures |= {name: counts[name] for name in ("sampled_tokens", "trained_tokens", "skipped_prompts", "floored_logps")}
        figures |= {name: counts[name] for name in AT_TIMES if counts[name]}
        figures |= landed.figures
        if (aligned := landed.coverage).units:
            figures |= {"align/byte_coverage": aligned.byte_coverage, "align/token_coverage": aligned.token_coverage}
            figures |= {"align/one_to_one": aligned.one_to_one_share}
        figures["staleness"] = counts["staleness"] / max(1, counts["sampled_tokens"])
        steering = self.parts.steering
        domains = self.config.teachers if len(self.config.teachers) > 1 else ()
        figures |= {**figures_of(counts, steered=bool(steering), domains=domains), **steering.figures()}
        if steering and not steering.limited(step - 1) and (saved := self.full_length.saved(counts)) is not None:
            figures["saved_tokens"] = saved
        timings = self.parts.clock.read()
        seconds = max(timings.get("perf/step_s", 0.0), 1e-9)
        timings |= {
            "perf/tokens_per_s": round(counts["sampled_tokens"] / seconds, 1),
            "perf/peak_gib": round(peak_gib(), 3),
        }
        row = {**figures, **timings}
        self.directory.append_metrics({"step": step, **row})
        for tracker in self.trackers:
            tracker.log(step, row)
        self.bar.step(step, row)
        self._warn_of_lost_restarts(step, counts)
        self._warn_of(step, figures)

    def _warn_of(self, step: int, figures: Mapping[str, float]) -> None:
        """What term makers and masks say of a step's metrics, each once a run."""
        for one in tuple(self.silent):
            if (text := one.warning(figures)) is not None:
                self.silent.remove(one)
                self.bar.say(f"WARNING: step {step}: {text}")

    def _warn_of_lost_restarts(self, step: int, counts: Mapping[str, float]) -> None:
        """Once a run: an environment may say that it restores, and not come back to where it was."""
        failed, tried = int(counts["restore_failures"]), int(counts["restore_failures"] + counts["restored"])
        if 2 * failed > tried and not self.warned:
            self.warned = True
            self.bar.say(
                f"WARNING: step {step}: {failed} of {tried} restarts began anew, since the environment did not come back to "
                "the state it had after the same replies (restore_failures); mend it, or give it `restores = False`"
            )

    @property
    def selected(self) -> int | None:
        """The step whose checkpoint is kept as the best one."""
        return int(self.selection["step"]) if self.selection else None

    def evaluation(self, step: int, result: Mapping[str, Any] | None) -> bool:
        """An evaluation after `step` steps; None where there is nothing to evaluate. Whether the step is the best so far."""
        timings = self.parts.clock.read()  # what an evaluation took is not the next step's
        if result is None:
            return False
        figures = {name: value for name, value in result.items() if isinstance(value, int | float)}
        self.evaluations["before" if step == 0 else "after"] = {
            "accuracy": figures["accuracy"],
            "reverse_kl": figures.get("reverse_kl"),
            **({"reverse_kl_sampled": figures["reverse_kl_sampled"]} if "reverse_kl_sampled" in figures else {}),
            **({"distinct_4grams": result["distinct_4grams"]} if "distinct_4grams" in result else {}),
            **(domains := {name: value for name, value in figures.items() if name.startswith("accuracy/")}),
        }
        self.directory.write_json(f"eval/step-{step}.json", {"step": step, **result, **timings})
        for tracker in self.trackers:
            tracker.log(step, {f"eval/{name}": value for name, value in figures.items()})
        best = step > 0 and figures.get("selection_accuracy", -1.0) > self.selection.get("accuracy", -1.0)
        if best:
            self.selection = {"step": step, "accuracy": figures["selection_accuracy"]}
        names = {"reverse_kl": "reverse KL", "reverse_kl_sampled": "sampled reverse KL"}
        kl = "".join(f", {what} {figures[name]:.4f} nats per token" for name, what in names.items() if name in figures)
        each = "".join(f", {name.removeprefix('accuracy/')} {value:.1%}" for name, value in domains.items())
        rates = f"no answer {figures['no_answer_rate']:.1%}, truncated {figures['truncated_rate']:.1%}"
        distinct = "" if "distinct_4grams" not in result else ", distinct 4-grams unknown"
        distinct = f", distinct 4-grams {figures['distinct_4grams']:.1%}" if "distinct_4grams" in figures else distinct
        self.bar.say(f"eval after step {step}: accuracy {figures['accuracy']:.1%}{each} ({rates}){kl}{distinct}")
        return best

    def card(self, step: int) -> str:
        """The model card of the checkpoint after `step` steps."""
        return model_card(self.config, step, results_of(self.directory.path, step))

    def finish(self) -> dict[str, Any]:
        """Writes and returns `summary.json`."""
        summary = {
            "steps": self.config.steps,
            "wall_s": round(self._wall_s(), 2),
            **{name: self.totals[name] for name in TOTALS if self.totals[name] or name not in AT_TIMES},
            "peak_gib": round(peak_gib(), 3),
            "eval": self.evaluations,
            **({"selected": self.selection} if self.selection else {}),
        }
        self.directory.write_json("summary.json", summary)
        return summary

    def state_dict(self) -> dict[str, Any]:
        totals = {**self.totals, "wall_s": self._wall_s()}
        return {
            "totals": totals,
            "evaluations": self.evaluations,
            "selection": self.selection,
            "full_length": self.full_length.mean,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.totals, self.evaluations = self.totals | state["totals"], dict(state["evaluations"])
        self.selection = dict(state.get("selection", {}))
        self.full_length = FullLength(state.get("full_length"))

    def _wall_s(self) -> float:
        return self.totals["wall_s"] + time.perf_counter() - self.begin_s

    @property
    def _comparable(self) -> bool:
        """Whether the sampler's log-probs are of the distribution that the loss is about."""
        same = self.config.loss_temperature == self.config.sampling.temperature
        return same and not self.parts.player.sampling.truncated

    async def sample_rollouts(self, step: int, taught: Sequence[Taught]) -> None:
        """Now and then writes the first rollouts of `step`, with what the teacher thinks of each token."""
        every = self.config.trackers.rollouts_every
        if not self.directory.writer or not every or step % every:
            return
        shown = taught[: self.config.trackers.num_rollouts]
        rows = await asyncio.gather(*(self._row(rollout) for rollout, _ in shown))
        self.directory.write_rows(f"rollouts/step-{step}.jsonl", rows)
        for tracker in self.trackers:
            tracker.log_rollouts(step, rows)

    async def _row(self, rollout: Rollout) -> dict[str, Any]:
        """`advantages`: the teacher's log-prob of each sampled token, less the student's; null where it has no counterpart.

        With another tokenizer both are those of the aligned unit, shared equally among its tokens. Left out where the
        sampler's log-probs are of another distribution than the loss's.
        """
        tokenizer, sampler_logps = self.parts.tokenizer, _joined(turn.sampler_logps for turn in rollout.turns)
        compared: dict[str, Any] = {}
        if self._comparable and self.parts.teachers.routed:
            pool = Tally(self.parts.teachers)
            model, unmasked = pool.teacher_for(rollout.prompt), [replace(turn, num_reused=0) for turn in rollout.turns]
            whole = replace(rollout, turns=tuple(unmasked))  # reused tokens are shown with the others
            judged = await judge(pool, model, whole, temperature=self.config.loss_temperature)
            gaps = judged.split - judged.own(sampler_logps)
            compared["advantages"] = _rounded(gaps, judged.mask)
            compared["teacher_logps"] = _rounded(judged.split, judged.mask)
        sampled_ids = _joined(turn.sampled_ids for turn in rollout.turns).tolist()
        single = rollout.prompt.single_turn
        return {
            "id": rollout.prompt.id,
            "slot": rollout.slot,
            "prompt": render_text(tokenizer, rollout.prompt),
            "response": tokenizer.decode(sampled_ids),
            "finish": rollout.finish,
            "outcome": rollout.outcome,
            "score": rollout.score,
            "restart": rollout.restart,
            "unit": "chunk" if single else "turn",
            "chunk_tokens": self.parts.chunk_tokens,
            "turns": [_turn_row(tokenizer, turn) for turn in rollout.turns],
            "sampled_ids": sampled_ids,
            "sampler_logps": [round(float(logp), 5) for logp in sampler_logps],
            "tokens": [tokenizer.decode([token]) for token in sampled_ids],
            "teacher_logps": [],
            **compared,
        }


def _turn_row(tokenizer: Any, turn: Turn) -> dict[str, Any]:
    return {
        "num_tokens": len(turn.sampled_ids),
        "num_reused": turn.num_reused,
        "finish": turn.finish,
        "mistake": turn.mistake,
        "text": tokenizer.decode(turn.sampled_ids),
        "observations": [message.get("content") for message in turn.observations],
    }


def _joined(parts: Iterable[Array]) -> Array:
    return np.concatenate(list(parts))


def _rounded(values: Array, known: Array) -> list[float | None]:
    return [round(float(value), 4) if there else None for value, there in zip(values, known)]


def peak_gib() -> float:
    """Largest memory use of this process so far: of its GPU where it has one, else resident."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
