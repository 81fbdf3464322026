"""`opd.train`: a recipe and a directory in, a trained student out."""

import os
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
    from opd.checkpoint import latest, load_optimizer, read_state, step_of
    from opd.engine import Engine
    from opd.progress import ProgressBar
    from opd.recorder import Recorder
    from opd.run_directory import RunDirectory
    from opd.trackers import open_trackers

    accelerator = make_accelerator()
    main = accelerator.is_main_process
    with accelerator.main_process_first():
        directory = RunDirectory(Path(out), config, resume=resume, overwrite=overwrite, writer=main)
    checkpoint = latest(directory.checkpoints) if resume else None
    done = step_of(checkpoint) if checkpoint else 0
    torch.manual_seed(config.seed)
    parts = assemble(config, accelerator, checkpoint)
    trackers = open_trackers(config.trackers, config, directory.path) if main else []
    with ProgressBar(config.steps, done, shown=main) as bar:
        recorder = Recorder(config, parts, directory, bar, trackers)
        for note in parts.notes:
            bar.say(f"note: {note}")
        if checkpoint is not None:
            state = read_state(checkpoint)
            load_optimizer(checkpoint, parts.learner, state)
            recorder.load_state_dict(state["recorder"])
            bar.say(f"resuming after step {done} from {os.path.relpath(checkpoint)}")
        directory.truncate_metrics(done)
        try:
            Engine(config, parts, recorder, done).run()
        finally:
            if parts.grader is not None:
                parts.grader.close()
        return recorder.finish()
