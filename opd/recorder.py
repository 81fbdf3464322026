"""What a run writes down: a line of metrics a step, sample rollouts, evaluations, and the summary."""

import asyncio
import resource
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from accelerate.utils import gather_object

from opd.assembly import Parts
from opd.config import RunConfig
from opd.eval.provenance import results_of
from opd.flight import Landed
from opd.judging import judge
from opd.model_card import model_card
from opd.objective.batching import Taught, num_trainable
from opd.progress import ProgressBar
from opd.records import Rollout
from opd.run_directory import RunDirectory
from opd.tokenization import render_text
from opd.trackers import Tracker


class Recorder:
    """Owns the counters of a run. Only the main process writes; every process must call."""

    def __init__(
        self, config: RunConfig, parts: Parts, directory: RunDirectory, bar: ProgressBar, trackers: Sequence[Tracker]
    ) -> None:
        self.config, self.parts, self.directory, self.bar, self.trackers = config, parts, directory, bar, trackers
        self.begin_s = time.perf_counter()
        self.totals = {"wall_s": 0.0, "sampled_tokens": 0, "trained_tokens": 0, "skipped_prompts": 0}
        self.evaluations: dict[str, dict[str, Any]] = {}
        self.selection: dict[str, float] = {}  # the step that is best on the selection set, and its accuracy there

    def step(self, step: int, landed: Landed, metrics: Mapping[str, float]) -> None:
        """Step `step` is done: one line of metrics."""
        counts = _summed(gather_object([_counts(step, landed)]))
        for name in ("sampled_tokens", "trained_tokens", "skipped_prompts"):
            self.totals[name] += int(counts[name])
        rollouts = max(1, counts["rollouts"])
        figures = dict(metrics)
        if not self._comparable:
            figures.pop("mismatch", None)  # two different distributions: their distance says nothing
        figures |= {name: counts[name] for name in ("sampled_tokens", "trained_tokens", "skipped_prompts", "floored_logps")}
        if self.parts.controllers:
            figures |= {"discarded_tokens": counts["discarded_tokens"], "stopped_rate": counts["stopped"] / rollouts}
        if (aligned := landed.coverage).units:
            figures |= {"align/byte_coverage": aligned.byte_coverage, "align/token_coverage": aligned.token_coverage}
            figures |= {"align/one_to_one": aligned.one_to_one_share}
        figures["staleness"] = counts["staleness"] / max(1, counts["sampled_tokens"])
        figures["response_tokens"] = counts["sampled_tokens"] / rollouts
        figures |= {f"{name}_rate": counts[name] / rollouts for name in ("eos", "truncated")}
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
        }
        self.directory.write_json(f"eval/step-{step}.json", {"step": step, **result, **timings})
        for tracker in self.trackers:
            tracker.log(step, {f"eval/{name}": value for name, value in figures.items()})
        best = step > 0 and figures.get("selection_accuracy", -1.0) > self.selection.get("accuracy", -1.0)
        if best:
            self.selection = {"step": step, "accuracy": figures["selection_accuracy"]}
        names = {"reverse_kl": "reverse KL", "reverse_kl_sampled": "sampled reverse KL"}
        kl = "".join(f", {what} {figures[name]:.4f} nats per token" for name, what in names.items() if name in figures)
        rates = f"no answer {figures['no_answer_rate']:.1%}, truncated {figures['truncated_rate']:.1%}"
        self.bar.say(f"eval after step {step}: accuracy {figures['accuracy']:.1%} ({rates}){kl}")
        return best

    def card(self, step: int) -> str:
        """The model card of the checkpoint after `step` steps."""
        return model_card(self.config, step, results_of(self.directory.path, step))

    def finish(self) -> dict[str, Any]:
        """Writes and returns `summary.json`."""
        summary = {
            "steps": self.config.steps,
            "wall_s": round(self._wall_s(), 2),
            **{name: self.totals[name] for name in ("sampled_tokens", "trained_tokens", "skipped_prompts")},
            "peak_gib": round(peak_gib(), 3),
            "eval": self.evaluations,
            **({"selected": self.selection} if self.selection else {}),
        }
        self.directory.write_json("summary.json", summary)
        return summary

    def state_dict(self) -> dict[str, Any]:
        totals = {**self.totals, "wall_s": self._wall_s()}
        return {"totals": totals, "evaluations": self.evaluations, "selection": self.selection}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.totals, self.evaluations = dict(state["totals"]), dict(state["evaluations"])
        self.selection = dict(state.get("selection", {}))

    def _wall_s(self) -> float:
        return self.totals["wall_s"] + time.perf_counter() - self.begin_s

    @property
    def _comparable(self) -> bool:
        """Whether the sampler's log-probs are of the distribution that the loss is about."""
        same = self.config.loss_temperature == self.config.sampling.temperature
        return same and not self.parts.sampling.truncated

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
        turn, tokenizer = rollout.turns[-1], self.parts.tokenizer
        advantages = {}
        if self._comparable:
            pool = self.parts.teachers
            model, last = pool.teacher_for(rollout.prompt), replace(rollout, turns=(turn,))
            judged = await judge(pool, model, last, temperature=self.config.loss_temperature)
            gaps = judged.split - judged.own(turn.sampler_logps)
            advantages["advantages"] = [round(float(gap), 4) if known else None for gap, known in zip(gaps, judged.mask)]
        return {
            "id": rollout.prompt.id,
            "slot": rollout.slot,
            "prompt": render_text(tokenizer, rollout.prompt),
            "response": tokenizer.decode(turn.sampled_ids),
            "finish": turn.finish,
            "sampled_ids": turn.sampled_ids.tolist(),
            "sampler_logps": [round(float(logp), 5) for logp in turn.sampler_logps],
            "tokens": [tokenizer.decode([token]) for token in turn.sampled_ids.tolist()],
            **advantages,
        }


def peak_gib() -> float:
    """Largest memory use of this process so far: of its GPU where it has one, else resident."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def _summed(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: sum(part[name] for part in parts) for name in parts[0]}


def _counts(step: int, landed: Landed) -> dict[str, float]:
    """This process's counts of a step; `step - 1` updates came before it."""
    rollouts = [rollout for rollout, _ in landed.taught]
    turns = [turn for rollout in rollouts for turn in rollout.turns]
    return {
        "rollouts": len(rollouts),
        "sampled_tokens": sum(rollout.num_tokens for rollout in rollouts),
        "discarded_tokens": sum(turn.num_discarded for turn in turns),
        "trained_tokens": num_trainable(landed.taught)[0],
        "eos": sum(rollout.finish == "eos" for rollout in rollouts),
        "truncated": sum(rollout.finish == "length" for rollout in rollouts),
        "stopped": sum(rollout.finish == "stopped" for rollout in rollouts),
        "staleness": sum(int((step - 1 - turn.policy_versions).sum()) for turn in turns),
        "skipped_prompts": landed.num_skipped,
        "floored_logps": landed.num_floored,
    }
