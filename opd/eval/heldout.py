"""Evaluation while training: accuracy on held-out problems, and how far the student is from its teacher there."""

import asyncio
from functools import partial
from typing import Any

from opd.assembly import Parts
from opd.config import RunConfig
from opd.eval.evaluate import accuracy
from opd.objective.batching import Taught
from opd.records import Hidden, Prompt, Sampling, ScoreRequest, Term
from opd.rollouts import Contexts, sample_rollout
from opd.students.noise import slot_seed

SEED = 20_000  # of evaluation's noise: the same at every evaluation of every run, so that these can be compared


async def evaluate(config: RunConfig, parts: Parts) -> dict[str, Any] | None:
    """What `opd.eval.evaluate.accuracy` returns, `reverse_kl` (nats a token), and `selection_accuracy` where there is a
    selection set; None without problems."""
    if not parts.heldout or parts.grader is None:
        return None
    options = config.eval
    contexts = Contexts(
        parts.tokenizer, parts.contexts.max_context, options.max_new_tokens or config.sampling.max_new_tokens
    )
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
        if options.kl_prompts:
            as_trained = Contexts(parts.tokenizer, parts.contexts.max_context, config.sampling.max_new_tokens)
            taught = await _scored(parts, as_trained, parts.heldout[: options.kl_prompts])
            result = {"reverse_kl": parts.learner.measure(taught).get("reverse_kl"), **result}
    return result


async def _scored(parts: Parts, contexts: Contexts, prompts: list[Prompt]) -> list[Taught]:
    """The student's rollouts, sampled as in training, with the full reverse KL as their term."""

    async def one(index: int, prompt: Prompt) -> Taught | None:
        ids = contexts(prompt)
        if ids is None:
            return None
        seed, room = slot_seed(SEED, 1, index), contexts.room(ids)
        rollout = await sample_rollout(parts.sampler, prompt, index, ids, seed, room, parts.sampling)
        turn = rollout.turns[0]
        model = parts.teachers.teacher_for(prompt)
        scores = await parts.teachers.score(model, ScoreRequest(turn.context_ids, turn.sampled_ids, hidden=True))
        assert scores.head is not None
        inputs = {"divergence": "reverse_kl", "beta": 0.5, "target": Hidden((scores.hidden,), scores.head)}
        return rollout, [Term("divergence", mask=rollout.trainable, inputs=inputs)]

    mine = range(parts.accelerator.process_index, len(prompts), parts.accelerator.num_processes)
    taught = await asyncio.gather(*(one(index, prompts[index]) for index in mine))
    return [pair for pair in taught if pair is not None]
