"""`opd.train`: a recipe and a directory in, a trained student out."""

import asyncio
import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from opd.config import RunConfig


def train(
    config: RunConfig, out: str | Path = "runs/run", *, resume: bool = False, overwrite: bool = False
) -> dict[str, Any]:
    """Runs a recipe and returns the content of `summary.json`.

    Raises `opd.errors.UserError` (a `ValueError`) for anything the user can mend, before the first step where that can be
    seen; a directory that holds a run is refused unless it is to be resumed or overwritten.
    """
    import torch

    from opd.assembly import assemble, make_accelerator
    from opd.checkpoint import latest, load_in_flight, load_optimizer, load_steering, read_state, step_of
    from opd.engine import Engine
    from opd.progress import ProgressBar
    from opd.recorder import Recorder
    from opd.run_directory import RunDirectory
    from opd.trackers import open_trackers
    from opd.validation import open_prompts

    accelerator = make_accelerator()
    main = accelerator.is_main_process
    with ExitStack() as closing:
        directory = RunDirectory(Path(out), config, resume=resume, overwrite=overwrite, writer=main)
        closing.callback(directory.close)
        accelerator.wait_for_everyone()
        checkpoint = latest(directory.checkpoints) if resume else None
        done, state = (step_of(checkpoint), read_state(checkpoint)) if checkpoint else (0, {})
        torch.manual_seed(config.seed)
        prompts = open_prompts(config)
        directory.refuse_other_prompts(prompts.digest)
        parts = assemble(config, accelerator, checkpoint, prompts)
        closing.callback(parts.close)
        known, remembers = {}, True
        if checkpoint is not None:
            load_optimizer(checkpoint, parts.learner, state)
            parts.teachers.check_digests(state.get("teachers", {}))
            remembers = load_steering(checkpoint, parts.steering, state)
            if remembers:  # else what stopped them no longer holds
                known = load_in_flight(checkpoint, config.batch, parts.prompts, done)
        directory.begin(done, prompts.digest)  # everything is loaded: only now may an older run be replaced
        trackers = open_trackers(config.trackers, config, directory.path) if main else []
        for tracker in trackers:
            closing.callback(tracker.close)
        bar = closing.enter_context(ProgressBar(config.steps, done, shown=main))
        recorder = Recorder(config, parts, directory, bar, trackers)
        for note in parts.notes:
            bar.say(note if note.startswith("WARNING") else f"note: {note}")
        if checkpoint is not None:
            recorder.load_state_dict(state["recorder"])
            if not remembers:
                bar.say("note: teacher, tokenizer or template changed: the rollout controllers begin anew")
            bar.say(f"resuming after step {done} from {os.path.relpath(checkpoint)}")
        elif resume:
            bar.say(f"note: nothing to resume in {out}: starting at step 1")
        asyncio.run(Engine(config, parts, recorder, done, known).run())
        return recorder.finish()
