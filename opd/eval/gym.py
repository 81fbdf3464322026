"""Tasks of reasoning-gym (extra `gym`) as suites: `reasoning_gym:TASK` or `reasoning_gym:TASK@SEED`.

Problems are generated, so a seed and a size fix them; answers are judged by the task's own verifier, full credit only.
"""

from collections.abc import Sequence
from dataclasses import replace
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
    import reasoning_gym

    entries = reasoning_gym.create_dataset(task, size=limit or SIZE, seed=seed)
    rows = [{"id": f"{task}-{i}", "prompt": entry["question"], "entry": entry} for i, entry in enumerate(entries)]
    return [prompt_of(row, row["id"], replace(style, path=name), "--suite") for row in rows]


def score(response: str, answer: Any, prompt: dict[str, Any]) -> bool:
    """A verifier for `opd.eval.grading`: whether the task gives full credit for the answer that the response commits to.

    A response without a box or `<answer>` element, or a phrase in their place, has no answer.
    """
    import reasoning_gym

    entry = prompt["entry"]
    found = extract_answer(response)
    judge: Any = reasoning_gym.get_score_answer_fn(entry["metadata"]["source_dataset"])
    return found is not None and float(judge(found, entry)) >= 1.0


score.judges_extracted = True  # type: ignore[attr-defined]  # see `opd.eval.grading.Grader`


def _parse(name: str) -> tuple[str, int]:
    task, at, seed = name.removeprefix(PREFIX).partition("@")
    try:
        from reasoning_gym.factory import DATASETS
    except ImportError:
        raise UserError("--suite: reasoning_gym is not installed; run: pip install 'opd[gym]'") from None
    if task not in DATASETS:
        raise UserError(f"--suite: reasoning-gym has no task {task!r}{nearest(task, DATASETS)}")
    if at and not seed.isdigit():
        raise UserError(f"--suite: {name!r}: the seed after @ must be a number")
    return task, int(seed or 0)
