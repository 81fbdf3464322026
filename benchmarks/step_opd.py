"""One process of `benchmarks.step`: this toolkit. Argument: the task as JSON."""

import asyncio
import json
import sys
import time
from collections.abc import Mapping, Sequence

from benchmarks.machine import peak_rss_gib
from opd.assembly import Parts, assemble, make_accelerator
from opd.config import build_config
from opd.engine import Engine
from opd.flight import Landed
from opd.objective.batching import Taught


def main() -> None:
    task = json.loads(sys.argv[1])
    config = build_config(
        {
            "steps": task["steps"] + 2,  # the last step would write a checkpoint: it is not reached
            "student": {"model": task["model"]},
            "teachers": {"default": {"model": task["teacher"]}},
            "prompts": {"path": task["prompts"], "columns": {"prompt": "problem"}},
            "batch": {"prompts": task["batch"]},
            "sampling": {"max_new_tokens": task["new_tokens"]},
            "terms": {"reverse_kl": {"form": "full"}},
            "objective": {"precision": task["precision"]},
            "checkpoint": {"every": 0},
        }
    )
    parts = assemble(config, make_accelerator())
    watch = Stopwatch(parts)
    asyncio.run(run(Engine(config, parts, watch), task["steps"] + 1))  # type: ignore[arg-type]
    seconds = [after - before for before, after in zip(watch.ends_s, watch.ends_s[1:])]
    after_warmup = {"step_s": seconds, "tokens": watch.tokens[1:], "stages": watch.stages[1:]}
    print(json.dumps({**after_warmup, "peak_gib": peak_rss_gib()}))


async def run(engine: Engine, steps: int) -> None:
    for _ in range(steps):
        await engine.take_step()


class Stopwatch:
    """Takes the recorder's place; the first step, which warms up, only starts the clock."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.ends_s: list[float] = []
        self.tokens: list[int] = []
        self.stages: list[dict[str, float]] = []

    def step(self, step: int, landed: Landed, metrics: Mapping[str, float]) -> None:
        self.ends_s.append(time.perf_counter())
        self.tokens.append(sum(rollout.num_tokens for rollout, _ in landed.taught))
        self.stages.append(self.parts.clock.read())

    async def sample_rollouts(self, step: int, taught: Sequence[Taught]) -> None:
        """None are written."""


if __name__ == "__main__":
    main()
