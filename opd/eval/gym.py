"""Tasks of reasoning-gym (extra `gym`) as suites: `reasoning_gym:TASK` or `reasoning_gym:TASK@SEED`.

Problems are generated, so a seed and a size fix them; answers are judged by the task's own verifier, full credit only.
"""

import json
import os
import pickle
import random
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from opd.data import DatasetConfig, prompt_of
from opd.errors import UserError
from opd.eval.answers.extract import extract_answer
from opd.records import Prompt
from opd.spelling import nearest

PREFIX = "reasoning_gym:"
SIZE = 100  # problems, where no limit is given
VERIFIER = f"{Path(__file__).resolve()}:score"

_GENERATE = (
    "import pickle, sys; path, asked = pickle.load(sys.stdin.buffer); sys.path[:] = path; answers = sys.stdout.buffer; "
    "sys.stdout = sys.stderr; from opd.eval import gym; answers.write(pickle.dumps(gym.generated(*asked)))"
)


def is_task(name: str) -> bool:
    return name.startswith(PREFIX)


def short_name(name: str) -> str:
    """The name of the result files: `chain_sum` for `reasoning_gym:chain_sum`."""
    return name.removeprefix(PREFIX)


def check_task(name: str) -> None:
    """Raises `UserError` for a task that reasoning-gym does not have, or where it is not installed."""
    _parse(name)


def load_task(name: str, style: DatasetConfig, limit: int | None) -> Sequence[Prompt]:
    """`limit` problems (default 100) of a task. Raises `UserError` as `check_task` does."""
    task, seed = _parse(name)
    found = entries(task, limit or SIZE, seed, {}, "--suite")
    rows = [{"id": f"{task}-{i}", "prompt": entry["question"], "entry": entry} for i, entry in enumerate(found)]
    return [prompt_of(row, row["id"], replace(style, path=name), "--suite") for row in rows]


def score(response: str, answer: Any, prompt: dict[str, Any]) -> bool:
    """A verifier for `opd.eval.grading`: whether the task gives full credit for the answer that the response commits to.

    A response without a box or `<answer>` element, or a phrase in their place, has no answer.
    """
    entry = prompt["entry"]
    return credit(response, entry, entry["metadata"]["source_dataset"], {}) >= 1.0


score.judges_extracted = True  # type: ignore[attr-defined]  # see `opd.eval.grading.Grader`


def credit(response: str, entry: Mapping[str, Any], task: str, config: Mapping[str, Any]) -> float:
    """What the task's own verifier gives for the answer that the response commits to, from 0 to 1.

    0, too, for an answer that it fails to read. Some verifiers run an answer as a program, or never end: call this in a
    process that may be killed.
    """
    found = extract_answer(response)
    if found is None:
        return 0.0
    judge = _data_set(task, 1, 0, json.dumps(config)).score_answer
    try:
        given = float(judge(found, entry))
    except Exception:  # they raise whatever they please, `ValueError` for words in the place of a number, say
        return 0.0
    return min(given, 1.0) if given > 0 else 0.0


def check_name(task: str, field: str) -> None:
    """Raises `UserError` naming `field` for a task that reasoning-gym does not have, or where it is not installed."""
    try:
        from reasoning_gym.factory import DATASETS
    except ImportError:
        raise UserError(f"{field}: reasoning_gym is not installed; run: pip install 'opd[gym]'") from None
    if task not in DATASETS:
        raise UserError(f"{field}: reasoning-gym has no task {task!r}{nearest(task, DATASETS, listed=False)}")


def entries(task: str, size: int, seed: int, config: Mapping[str, Any], field: str) -> Sequence[dict[str, Any]]:
    """The problems of a task, the same ones in every process. Raises `UserError` naming `field` for a `config` that the task
    refuses.

    They are made in an interpreter of their own: some tasks go through sets of strings, whose order changes from process to
    process unless the hash seed is fixed, or draw from the global random state.
    """
    found = _entries(task, size, seed, json.dumps(config, sort_keys=True))
    if isinstance(found, str):
        raise UserError(f"{field}: reasoning-gym's task {task!r} refuses it: {found}")
    return found


@lru_cache(maxsize=16)
def _entries(task: str, size: int, seed: int, config: str) -> list[dict[str, Any]] | str:
    done = subprocess.run(
        [sys.executable, "-c", _GENERATE],
        input=pickle.dumps((sys.path, (task, size, seed, config))),
        env={**os.environ, "PYTHONHASHSEED": "0"},
        capture_output=True,
    )
    if done.returncode:
        raise RuntimeError(
            f"reasoning-gym's task {task} cannot be generated:\n{done.stderr.decode(errors='replace')[-2000:]}"
        )
    return pickle.loads(done.stdout)


def generated(task: str, size: int, seed: int, config: str) -> list[dict[str, Any]] | str:
    """What `entries` asks of its interpreter; text where the task refuses its configuration."""
    import numpy as np

    found = []
    try:
        data_set = _data_set(task, size, seed, config)
        for index in range(size):
            random.seed(f"{task} {seed} {index}")
            np.random.seed([seed % 2**32, index])
            found.append(data_set[index])
    except (AssertionError, TypeError, ValueError) as error:
        return " ".join(f"{error or type(error).__name__}".split())
    return found


@lru_cache(maxsize=64)
def _data_set(task: str, size: int, seed: int, config: str) -> Any:
    import reasoning_gym
    from reasoning_gym.composite import DatasetSpec

    options = json.loads(config)
    if task == "composite":
        options["datasets"] = [DatasetSpec(**{"weight": 1.0, "config": {}, **spec}) for spec in options.get("datasets", [])]
    return reasoning_gym.create_dataset(task, size=size, seed=seed, **options)


def _parse(name: str) -> tuple[str, int]:
    task, seed = split_seed(name.removeprefix(PREFIX))
    check_name(task, "--suite")
    return task, seed or 0


def split_seed(name: str) -> tuple[str, int | None]:
    """(`NAME`, `SEED`) of `NAME@SEED`; None without one. Raises `UserError` for what is no seed."""
    plain, at, seed = name.partition("@")
    if at and not (seed.isascii() and seed.isdigit()):
        raise UserError(f"--suite: {name!r}: the seed after @ must be a whole number, at least 0")
    return plain, int(seed) if at else None
