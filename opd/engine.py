"""The engine: prompts -> rollouts -> scores -> terms -> loss -> update -> sync -> evaluation, in this order.

It knows no strategy. What a run consists of is put together in `opd.assembly`; what is written down, in `opd.recorder`.
One event loop drives a whole run: scoring overlaps sampling, and with `lookahead: 1` both overlap the update.
"""

import asyncio
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import count
from typing import Any

import torch
from accelerate.utils import gather_object

from opd.assembly import Parts
from opd.checkpoint import save
from opd.config import RunConfig
from opd.eval.heldout import evaluate
from opd.flight import Flight
from opd.groups import dealt, each, together
from opd.masking import masked
from opd.objective.batching import Taught
from opd.objective.learner import Metrics
from opd.recorder import Recorder
from opd.records import Prompt, Rollout
from opd.rollouts import Plan
from opd.students.noise import slot_seed
from opd.teachers.pool import Tally


class Engine:
    """One run. `known` are rollouts of the next step, by slot, that a checkpoint found in flight."""

    def __init__(
        self, config: RunConfig, parts: Parts, recorder: Recorder, step: int = 0, known: Mapping[int, Rollout] | None = None
    ) -> None:
        self.config, self.parts, self.recorder, self.step, self.known = config, parts, recorder, step, known or {}
        self.flight: Flight | None = None  # the next step's rollouts, where they have started
        self.prompts = lru_cache(16)(parts.prompts.at)  # groups of one step ask for the same attempts

    async def run(self) -> None:
        """From `self.step` to the recipe's last step."""
        try:
            if self.step == 0:
                await self.evaluate()
            while self.step < self.config.steps:
                await self.take_step()
        finally:
            if self.flight is not None:
                await self.flight.cancel()
            await self.parts.teachers.close()

    async def take_step(self) -> None:
        config, parts, clock = self.config, self.parts, self.parts.clock
        with clock("step"):
            self.flight = self.flight or self.begin(self.step)
            with clock("wait"):
                landed = await self.flight.landed()
            if parts.rewards is not None and (warning := parts.rewards.review(self.step + 1, landed.figures)):
                self.recorder.bar.say(warning)
            await self.recorder.sample_rollouts(self.step + 1, landed.taught)
            parts.steering.landed(self.step, [rollout for rollout, _ in landed.taught])
            self.flight = self.begin(self.step + 1) if config.lookahead and self.step + 1 < config.steps else None
            if self.flight is not None and not parts.sampler.concurrent:
                await self.flight.sampled()  # it decodes with the weights that are about to change
                await asyncio.sleep(0)  # and puts its things away
            if self.flight is None:
                parts.sampler.release()  # until the next rollouts or evaluation
            with clock("update"):
                metrics = await self.update(landed.taught)
            self.step += 1
        self.recorder.step(self.step, landed, metrics)
        last, best = self.step == config.steps, False
        if last or (config.eval.every and self.step % config.eval.every == 0):
            best = await self.evaluate()
        if last or best or (config.checkpoint.every and self.step % config.checkpoint.every == 0):
            await self.save()

    def begin(self, step: int) -> Flight:
        """Starts this process's rollouts of `step` under the student as it is. Slots are dealt to processes by index."""
        parts, copies = self.parts, self.config.batch.rollouts_per_prompt
        with parts.clock("sync"):
            parts.sampler.sync(parts.learner.student, version=self.step)
        with parts.clock("prompts"):
            prompts = self.prompts(step, 0, self.config.batch.prompts)
        known, self.known = self.known, {}
        tally = Tally(parts.teachers, slot_seed(self.config.seed, step))
        started: list[asyncio.Task[Any]] = []
        sampling, teaching = [], []
        process, processes = parts.accelerator.process_index, parts.accelerator.num_processes
        for slots in dealt(len(prompts), copies, process, processes, together=parts.compares_groups):
            group = []
            for slot in slots:
                prompt = prompts[slot // copies]
                plan = parts.steering.plan(prompt, step, slot)  # now, while nothing of this step is known
                group.append(asyncio.create_task(self.sample(prompt, step, slot, plan, known)))
            if parts.compares_groups:
                started += [*group, asyncio.create_task(self.settle(step, slots, group, tally))]
                group = each(started[-1], len(slots))
            sampling += group
            teaching += [asyncio.create_task(self.teach(one, tally)) for one in group]
        return Flight(step, sampling, teaching, tally, started)

    async def sample(
        self, prompt: Prompt, step: int, slot: int, plan: Plan, known: Mapping[int, Rollout], attempt: int = 0
    ) -> Rollout | None:
        """One rollout. None: its prompt is too long."""
        if slot in known:
            return known[slot]
        seed = slot_seed(self.config.seed, step, slot, *([attempt] if attempt else []))
        return await self.parts.player.play(prompt, slot, seed, plan, self.parts.watch(prompt, slot))

    async def settle(
        self, step: int, slots: Sequence[int], sampling: Sequence["asyncio.Task[Rollout | None]"], tally: Tally
    ) -> list[Rollout | None]:
        """The rollouts of one prompt, judged and compared with each other; where they teach nothing, those of another prompt
        may take their place."""
        parts, batch = self.parts, self.config.batch
        for attempt in count(1):
            rollouts = await together(sampling)
            group = [rollout for rollout in rollouts if rollout is not None]
            if parts.rewards is not None:
                group = await parts.rewards.judged(group, tally.note)
            too_long = not group and attempt == 1  # of another prompt that is too long a further one takes the place
            if too_long or all(maker.keeps(group, attempt - 1) for maker in parts.makers):
                tally.groups |= dict.fromkeys((rollout.slot for rollout in group), group)
                return [next((one for one in group if one.slot == slot), None) for slot in slots]
            tally.drop(group)
            prompt = self.prompts(step, attempt, batch.prompts)[slots[0] // batch.rollouts_per_prompt]
            plans = {slot: parts.steering.plan(prompt, step, slot) for slot in slots}  # still, nothing of this step is known
            sampling = [asyncio.create_task(self.sample(prompt, step, slot, plans[slot], {}, attempt)) for slot in slots]
        raise AssertionError("unreachable")

    async def teach(self, sampling: "asyncio.Task[Rollout | None]", tally: Tally) -> Taught | None:
        """A rollout with its terms; scoring starts when it ends, while others still decode."""
        rollout = await sampling
        if rollout is None:
            return None
        made = await asyncio.gather(*(maker.collect(rollout, tally) for maker in self.parts.makers))
        return rollout, masked(self.parts.masks, rollout, [term for terms in made for term in terms], tally)

    async def update(self, taught: list[Taught]) -> Metrics:
        """The learner's work; in a thread where other machines' answers would otherwise wait for it."""
        torch.manual_seed(slot_seed(self.config.seed, self.step, self.parts.accelerator.process_index))  # for dropout
        if self.flight is None or self.parts.update_thread is None:
            return self.parts.learner.update(taught)
        return await asyncio.get_running_loop().run_in_executor(self.parts.update_thread, self.parts.learner.update, taught)

    async def evaluate(self) -> bool:
        """Held-out accuracy and KL of the student as it is. Whether it is the best on the selection set so far."""
        if self.flight is not None:
            await self.flight.sampled()
        self.parts.sampler.sync(self.parts.learner.student, version=self.step)
        return self.recorder.evaluation(self.step, await evaluate(self.config, self.parts))

    async def save(self) -> None:
        """A checkpoint of everything that has state, rollouts in flight included: the weights that sampled them are gone."""
        parts, config = self.parts, self.config.checkpoint
        in_flight = await self.flight.sampled() if self.flight is not None else []
        with parts.clock("checkpoint"):
            state = {"step": self.step, "recorder": self.recorder.state_dict(), "teachers": parts.teachers.digests}
            folder = self.recorder.directory.checkpoints
            save(
                folder,
                self.step,
                parts.learner,
                parts.tokenizer,
                state,
                gather_object(in_flight),
                parts.steering,
                keep=config.keep,
                selected=self.recorder.selected,
                card=self.recorder.card(self.step),
            )
