"""Stages that only take their time, in the shape the engine drives: for `benchmarks.stream` and its test."""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from opd.clock import Clock
from opd.config import BatchConfig, CheckpointConfig, EvalConfig, RunConfig
from opd.contexts import Contexts
from opd.engine import Engine
from opd.flight import Landed
from opd.objective.batching import Taught
from opd.records import Chunk, Prompt, Rollout, SampleRequest, Sampling, ScoreRequest, Scores, Term
from opd.rollouts import InPlay, Player
from opd.steering import Steering
from opd.teachers.pool import TeacherPool


@dataclass(frozen=True)
class Stages:
    """Seconds that a whole batch spends in each stage."""

    sample_s: float
    score_s: float
    update_s: float

    @property
    def slowest_s(self) -> float:
        return max(self.sample_s, self.score_s, self.update_s)

    @property
    def sum_s(self) -> float:
        return self.sample_s + self.score_s + self.update_s


class StubSampler:
    """Rollouts of a batch end one after another, the last after `seconds`; it runs beside everything else."""

    concurrent, busy = True, False

    def __init__(self, seconds: float, batch: int) -> None:
        self.seconds, self.batch, self.version, self._next = seconds, batch, 0, 0

    def sync(self, student: Any, version: int) -> None:
        self.version, self._next = version, 0

    def release(self) -> None:
        """Nothing is held."""

    async def generate(self, request: SampleRequest) -> AsyncIterator[Chunk]:
        self._next += 1
        await asyncio.sleep(self.seconds * self._next / self.batch)
        yield Chunk(np.array([3, 2], np.int32), np.zeros(2, np.float32), "eos", self.version)


class StubTeacher:
    """Scores one rollout after another, a batch in `seconds`."""

    head: Any = None
    head_id, digest = "stub", None

    def __init__(self, seconds: float, batch: int) -> None:
        self.seconds, self.batch, self._free_s = seconds, batch, 0.0

    async def score(self, request: ScoreRequest) -> Scores:
        now = time.perf_counter()
        self._free_s = max(now, self._free_s) + self.seconds / self.batch
        await asyncio.sleep(self._free_s - now)
        return Scores(logps=np.zeros(len(request.token_ids), np.float32))

    def close_stream(self, name: str) -> None: ...

    async def close(self) -> None: ...


class StubMaker:
    """Asks for every sampled token's log-prob."""

    async def collect(self, rollout: Rollout, models: Any) -> list[Term]:
        turn = rollout.turns[0]
        scores = await models.score("stub", ScoreRequest(turn.context_ids, turn.sampled_ids))
        return [Term("policy_gradient", mask=rollout.trainable, inputs={"reward": scores.logps})]


class StubLearner:
    """Blocks its thread for `seconds`, as an update does."""

    student = None

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def update(self, taught: Sequence[Any]) -> dict[str, float]:
        time.sleep(self.seconds)
        return {}


class OnePrompt(Contexts):
    """Every prompt is the same three tokens."""

    def __init__(self) -> None: ...

    def __call__(self, prompt: Prompt) -> np.ndarray:
        return np.array([1, 4, 5], np.int32)

    def room(self, context_ids: np.ndarray) -> int:
        return 8


class Stopwatch:
    """Takes the recorder's place: when each step ended, and how stale its rollouts were."""

    def __init__(self) -> None:
        self.ends_s: list[float] = []
        self.staleness: list[int] = []

    async def sample_rollouts(self, step: int, taught: Sequence[Taught]) -> None:
        """Shows none."""

    def step(self, step: int, landed: Landed, metrics: Mapping[str, float]) -> None:
        self.ends_s.append(time.perf_counter())
        self.staleness.append(max(step - 1 - int(r.turns[0].policy_versions.min()) for r, _ in landed.taught))


def measure(stages: Stages, lookahead: int, *, batch: int = 32, steps: int = 10) -> tuple[list[float], list[int]]:
    """(seconds of each step after the first two, which fill the pipeline; staleness in updates of every step)."""
    from concurrent.futures import ThreadPoolExecutor

    config = RunConfig(
        steps=10**6,
        lookahead=lookahead,
        batch=BatchConfig(prompts=batch),
        eval=EvalConfig(every=0),
        checkpoint=CheckpointConfig(every=0),
    )
    with ThreadPoolExecutor(1) as thread:
        watch, sampler = Stopwatch(), StubSampler(stages.sample_s, batch)
        parts = SimpleNamespace(
            accelerator=SimpleNamespace(process_index=0, num_processes=1),
            clock=Clock(),
            prompts=SimpleNamespace(at=lambda step, attempt, count: [Prompt(id=str(i), text="") for i in range(count)]),
            player=Player(sampler, OnePrompt(), Sampling(), InPlay()),  # type: ignore[arg-type]
            steering=Steering({}),
            sampler=sampler,
            teachers=TeacherPool({"stub": StubTeacher(stages.score_s, batch)}),
            makers=[StubMaker()],
            masks={},
            compares_groups=False,
            rewards=None,
            learner=StubLearner(stages.update_s),
            watch=lambda prompt, slot: None,
            update_thread=thread,
        )
        engine = Engine(config, parts, watch)  # type: ignore[arg-type]

        async def run() -> None:
            for _ in range(steps):
                await engine.take_step()
            if engine.flight is not None:
                await engine.flight.cancel()

        asyncio.run(run())
    return np.diff(watch.ends_s)[1:].tolist(), watch.staleness
