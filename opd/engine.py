"""The engine: prompts -> rollouts -> scores -> terms -> loss -> update -> sync -> evaluation, in this order.

It knows no strategy. What a run consists of is put together in `opd.assembly`; what is written down, in `opd.recorder`.
"""

import asyncio
from collections.abc import Sequence

import torch

from opd.assembly import Parts
from opd.checkpoint import save
from opd.config import RunConfig
from opd.eval.heldout import evaluate
from opd.objective.batching import Taught
from opd.recorder import Recorder
from opd.records import Prompt
from opd.rollouts import sample_rollout
from opd.students.noise import slot_seed


class Engine:
    """One run."""

    def __init__(self, config: RunConfig, parts: Parts, recorder: Recorder, step: int = 0) -> None:
        self.config, self.parts, self.recorder, self.step = config, parts, recorder, step

    def run(self) -> None:
        """From `self.step` to the recipe's last step."""
        config, parts, clock = self.config, self.parts, self.parts.clock
        parts.sampler.sync(parts.learner.student, version=self.step)
        if self.step == 0:
            self.recorder.evaluation(0, evaluate(config, parts))
        while self.step < config.steps:
            torch.manual_seed(slot_seed(config.seed, self.step, parts.accelerator.process_index))
            with clock("step"):
                with clock("prompts"):
                    prompts = parts.prompts.at(self.step, 0, config.batch.prompts)
                taught = asyncio.run(self.teach(prompts))
                with clock("update"):
                    metrics = parts.learner.update(taught)
                self.step += 1
                with clock("sync"):
                    parts.sampler.sync(parts.learner.student, version=self.step)
            self.recorder.step(self.step, taught, metrics)
            last = self.step == config.steps
            if last or (config.eval.every and self.step % config.eval.every == 0):
                self.recorder.evaluation(self.step, evaluate(config, parts))
            if last or (config.checkpoint.every and self.step % config.checkpoint.every == 0):
                self.save()

    async def teach(self, prompts: Sequence[Prompt]) -> list[Taught]:
        """This process's rollouts of the step, each with its terms. Slots are dealt to the processes by index."""
        accelerator, copies = self.parts.accelerator, self.config.batch.rollouts_per_prompt
        slots = range(accelerator.process_index, len(prompts) * copies, accelerator.num_processes)
        taught = await asyncio.gather(*(self.teach_one(prompts[slot // copies], slot) for slot in slots))
        return [pair for pair in taught if pair is not None]

    async def teach_one(self, prompt: Prompt, slot: int) -> Taught | None:
        """One rollout and its terms; scoring starts when it ends, while others still decode. None: prompt too long."""
        parts = self.parts
        context_ids = parts.contexts(prompt)
        if context_ids is None:
            return None
        seed = slot_seed(self.config.seed, self.step, slot)
        room = parts.contexts.room(context_ids)
        rollout = await sample_rollout(parts.sampler, prompt, slot, context_ids, seed, room, parts.sampling)
        terms = await asyncio.gather(*(maker.collect(rollout, parts.teachers) for maker in parts.makers))
        return rollout, [term for made in terms for term in made]

    def save(self) -> None:
        """A checkpoint of everything that has state."""
        parts, config = self.parts, self.config.checkpoint
        with parts.clock("checkpoint"):
            state = {"step": self.step, "recorder": self.recorder.state_dict()}
            save(self.recorder.directory.checkpoints, self.step, parts.learner, parts.tokenizer, state, config.keep)
