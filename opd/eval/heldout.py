"""Evaluation while training: accuracy on held-out problems, and how far the student is from its teacher there."""

import asyncio
from dataclasses import replace
from functools import partial
from typing import Any

from accelerate.utils import gather_object

from opd.alignment.coverage import Coverage
from opd.assembly import Parts
from opd.config import RunConfig
from opd.eval.collapse import distinct_4grams
from opd.eval.config import MAX_ROUNDS, EvalConfig
from opd.eval.evaluate import accuracy
from opd.judging import judge, read_hidden
from opd.objective.batching import Taught
from opd.records import Prompt, Sampling, Term
from opd.students.noise import slot_seed
from opd.teachers.pool import Tally

SEED = 20_000  # of evaluation's noise: the same at every evaluation of every run, so that these can be compared


async def evaluate(config: RunConfig, parts: Parts) -> dict[str, Any] | None:
    """What `opd.eval.evaluate.accuracy` returns, the distance from the teacher (nats a token; see `_distance`), and
    `selection_accuracy` where there is a selection set, `distinct_4grams` where it is asked for; None without problems."""
    if not parts.heldout or parts.grader is None:
        return None
    options = config.eval
    longest = options.max_new_tokens or config.sampling.max_new_tokens
    contexts = replace(parts.player.contexts, max_new_tokens=longest)
    measure = partial(
        accuracy,
        parts.sampler,
        contexts=contexts,
        grader=parts.grader,
        sampling=Sampling(options.temperature, options.top_p),
        samples=options.samples,
        seed=SEED,
        rank=parts.accelerator.process_index,
        num_processes=parts.accelerator.num_processes,
    )
    settings = {name: getattr(options, name) for name in ("samples", "temperature", "top_p")}
    with parts.clock("eval"):
        measured = await measure(problems=parts.heldout)
        result = {"suite": "heldout", "settings": settings, **measured, "overlap": parts.overlap}
        result["notes"] = [*parts.eval_notes, measured["power_note"]]
        if parts.selection:
            result["selection_accuracy"] = (await measure(problems=parts.selection))["accuracy"]
        if options.kl_prompts and config.teachers:
            result = {**await _distance(parts, parts.heldout[: options.kl_prompts]), **result}
        if options.collapse_tokens:
            result |= await _diversity(parts, options, result)
    return result


async def _diversity(parts: Parts, options: EvalConfig, result: dict[str, Any]) -> dict[str, Any]:
    """`distinct_4grams` of the student's samples with what makes it comparable, to lie over `result`; null with a note where
    it says too little."""
    prompts, num_tokens = parts.heldout[: options.collapse_prompts], options.collapse_tokens
    figure = await distinct_4grams(parts, prompts, num_tokens, slot_seed(SEED, 2))
    settings = {**result["settings"], "collapse_tokens": num_tokens, "collapse_prompts": options.collapse_prompts}
    notes = []
    if figure is None:
        few = f"{MAX_ROUNDS} answers to each of the first {len(prompts)} problems hold fewer than {num_tokens} tokens"
        notes = [f"distinct 4-grams: {few}: lower eval.collapse_tokens, or see whether the student has fallen silent"]
    return {"settings": settings, "distinct_4grams": figure, "notes": [*result["notes"], *notes]}


async def _distance(parts: Parts, prompts: list[Prompt]) -> dict[str, float]:
    """How far the student's rollouts are from the teacher: `reverse_kl`, or with a teacher of another tokenizer
    `reverse_kl_sampled`, `teacher_logp` (the mean log-prob of the student's tokens under the teacher) and `byte_coverage`.
    With several teachers the first two of each domain as well."""
    tally = Tally(parts.teachers)
    taught = await _scored(parts, tally, prompts)
    figures = parts.learner.measure(taught)
    names = ("reverse_kl", "reverse_kl_sampled")
    found = {name: value for name, value in figures.items() if name.partition("/")[0] in names}
    coverage = sum(gather_object([tally.coverage]), Coverage())
    if coverage.units:
        aligned = [term for _, (term,) in taught if term.kind == "policy_gradient"]
        mine = [(float(term.inputs["reward"][term.mask].sum()), int(term.mask.sum())) for term in aligned]
        total, tokens = (sum(column) for column in zip(*gather_object(mine)))
        found |= {"teacher_logp": total / max(1, tokens), "byte_coverage": coverage.byte_coverage}
    return found


async def _scored(parts: Parts, tally: Tally, prompts: list[Prompt]) -> list[Taught]:
    """The student's rollouts, sampled as in training, with a term that measures the reverse KL: the full one, or where the
    teacher has another tokenizer that of the sampled tokens."""

    async def one(index: int, prompt: Prompt) -> Taught | None:
        rollout = await parts.player.play(prompt, index, slot_seed(SEED, 1, index))
        if rollout is None:
            return None
        model = tally.teacher_for(prompt)
        if model in parts.teachers.aligners:
            judged = await judge(tally, model, rollout, temperature=parts.learner.spec.temperature)
            own = {"self_coef": 0.0, "unit_starts": judged.unit_starts, "advantage_clip": None, "ratio_clip": None}
            inputs = {**own, "importance_cap": None, "reward": judged.split, "teacher_sampled": judged.split}
            return rollout, [Term("policy_gradient", mask=rollout.trainable & judged.mask, inputs=inputs)]
        inputs = {"divergence": "reverse_kl", "beta": 0.5, "target": await read_hidden(tally, model, rollout)}
        return rollout, [Term("divergence", mask=rollout.trainable, inputs=inputs)]

    mine = range(parts.accelerator.process_index, len(prompts), parts.accelerator.num_processes)
    taught = await asyncio.gather(*(one(index, prompts[index]) for index in mine))
    return [pair for pair in taught if pair is not None]
