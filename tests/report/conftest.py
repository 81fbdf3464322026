"""Runs with made-up figures (see `benchmarks.report_runs`)."""

import pytest

from benchmarks.report_runs import write_results, write_run


@pytest.fixture(scope="session")
def sweep(tmp_path_factory):
    """Two variants x two seeds, `weak` first; `strong` has an unfinished third seed. A suite at the start and at the end."""
    folder = tmp_path_factory.mktemp("sweep")
    for name, level, kl in (("weak", 0.5, "reverse_kl_sampled"), ("strong", 0.9, "reverse_kl")):
        for seed in range(3 if name == "strong" else 2):
            path, ended = folder / name / f"seed-{seed}", 25 if seed == 2 else None
            config = {"optimizer": {"lr": 0.001 if name == "weak" else 0.002}}
            write_run(path, level=level, seed=seed, kl=kl, config=config, suites={"gsm8k": 4}, ended=ended)
    return folder


@pytest.fixture(scope="session")
def teacher(tmp_path_factory):
    """What `opd eval` leaves of a teacher, its held-out problems under a name of their own."""
    folder = tmp_path_factory.mktemp("evaluated") / "teacher"
    return write_results(folder, {"heldout": 0.97})
