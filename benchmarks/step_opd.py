"""One process of `benchmarks.step`: this toolkit. Argument: the task as JSON."""

import asyncio
import json
import sys
import time

from benchmarks.machine import peak_rss_gib
from opd.assembly import assemble, make_accelerator
from opd.config import build_config
from opd.engine import Engine


def main() -> None:
    task = json.loads(sys.argv[1])
    config = build_config(
        {
            "steps": task["steps"] + 1,
            "student": {"model": task["model"]},
            "teachers": {"default": {"model": task["teacher"]}},
            "prompts": {"path": task["prompts"], "columns": {"prompt": "problem"}},
            "batch": {"prompts": task["batch"]},
            "sampling": {"max_new_tokens": task["new_tokens"]},
            "terms": {"reverse_kl": {"form": "full"}},
            "objective": {"precision": task["precision"]},
        }
    )
    parts = assemble(config, make_accelerator())
    engine = Engine(config, parts, recorder=None)  # type: ignore[arg-type]  # the loop below is its own, without files
    seconds, tokens, stages = [], [], []
    for step in range(config.steps):
        engine.step = step
        begin = time.perf_counter()
        taught = asyncio.run(engine.teach(parts.prompts.at(step, 0, task["batch"])))
        parts.learner.update(taught)
        parts.sampler.sync(parts.learner.student, step + 1)
        seconds.append(time.perf_counter() - begin)
        tokens.append(sum(rollout.num_tokens for rollout, _ in taught))
        stages.append(parts.clock.read())
    print(json.dumps({"step_s": seconds[1:], "tokens": tokens[1:], "stages": stages[1:], "peak_gib": peak_rss_gib()}))


if __name__ == "__main__":
    main()
