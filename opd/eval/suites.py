"""Evaluation suites by name: where each lies on the hub, or the file `NAME.jsonl` in a folder of your own.

A suite may also be any JSON lines file, `reasoning_gym:TASK` (see `opd.eval.gym`), or episodes of an environment,
`environment:NAME`, `environment:NAME@SEED` or `environment:NAME@SEED?OPTION=VALUE,...`.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from opd.config import parse_overrides
from opd.data import Columns, DatasetConfig, load_prompts
from opd.envs.config import EnvironmentConfig, check_environment, load_tasks
from opd.envs.opening import environment_class
from opd.errors import UserError
from opd.eval import gym
from opd.records import Prompt
from opd.spelling import nearest

EPISODES = "environment:"
NUM_EPISODES = 100  # where no limit is given
HELDOUT_SEED = 1  # recipes train on the tasks of seed 0
BOXED = "{prompt}\nPlease reason step by step, and put your final answer within \\boxed{}."


@dataclass(frozen=True)
class Suite:
    """A data set on the hub. `size`: its number of problems, by which a changed data set is noticed."""

    path: str
    split: str
    prompt: str
    answer: str
    size: int
    subset: str | None = None


# Names, splits and columns as published; none could be fetched where this was written, so all are unverified.
SUITES = {
    "aime24": Suite("HuggingFaceH4/aime_2024", "train", "problem", "answer", 30),
    "aime25": Suite("math-ai/aime25", "test", "problem", "answer", 30),
    "aime26": Suite("MathArena/aime_2026", "train", "problem", "answer", 30),
    "hmmt25_feb": Suite("MathArena/hmmt_feb_2025", "train", "problem", "answer", 30),
    "hmmt25_nov": Suite("MathArena/hmmt_nov_2025", "train", "problem", "answer", 30),
    "hmmt26": Suite("MathArena/hmmt_feb_2026", "train", "problem", "answer", 33),
    "amc23": Suite("AI-MO/aimo-validation-amc", "train", "problem", "answer", 83),
    "math500": Suite("HuggingFaceH4/MATH-500", "test", "problem", "answer", 500),
    "minerva": Suite("math-ai/minervamath", "test", "question", "answer", 272),
    "olympiadbench": Suite("Hothan/OlympiadBench", "train", "question", "final_answer", 674, "OE_TO_maths_en_COMP"),
    "gsm8k": Suite("openai/gsm8k", "test", "question", "answer", 1319, "main"),
}


@dataclass(frozen=True)
class Loaded:
    """A suite to evaluate on. `reward`: a verifier of the suite's own. `notes`: what a reader of its results must know."""

    name: str
    problems: Sequence[Prompt]
    reward: str | None = None
    notes: tuple[str, ...] = ()


def check_suite(name: str, folder: Path | None = None) -> None:
    """Refuses what is no suite, without loading anything. Raises `UserError`."""
    path = Path(name).expanduser()
    if gym.is_task(name):
        gym.check_task(name)
    elif name.startswith(EPISODES):
        check_environment(_episodes(name, None), "--suite")
    elif path.suffix:
        if not path.is_file():
            raise UserError(f"--suite: no such file {name!r}")
    elif folder is not None:
        if not (folder / f"{name}.jsonl").is_file():
            known = sorted(file.stem for file in folder.glob("*.jsonl"))
            raise UserError(f"--suite: no file {name}.jsonl in {folder}{nearest(name, known)}")
    elif name not in SUITES:
        known = f"{', '.join(SUITES)}, FILE.jsonl, reasoning_gym:TASK or environment:NAME"
        raise UserError(f"--suite: {name!r} is none of these: {known}{nearest(name, SUITES, listed=False)}")


def load_suite(name: str, style: DatasetConfig, folder: Path | None = None, limit: int | None = None) -> Loaded:
    """The suite called `name`, with the template, system message and chat template arguments of `style`.

    `folder` holds `NAME.jsonl` files (columns `id`, `problem`, `answer`), which are then read instead of the hub.
    Raises `UserError` as `opd.data.load_prompts` does.

    Example: `load_suite("gsm8k", DatasetConfig("", template=BOXED), limit=40)`
    """
    check_suite(name, folder)
    if gym.is_task(name):
        return Loaded(result_name(name), gym.load_task(name, style, limit), gym.VERIFIER)
    if name.startswith(EPISODES):
        asked = replace(_episodes(name, limit), system=style.system, chat_template_kwargs=dict(style.chat_template_kwargs))
        return Loaded(result_name(name), load_tasks(asked, "--suite"))
    file = Path(name).expanduser() if Path(name).suffix else folder / f"{name}.jsonl" if folder else None
    suite = SUITES.get(name)
    if file is not None:
        config = replace(style, path=str(file), columns=Columns("problem", "answer"), limit=limit)
    else:
        assert suite is not None
        columns = Columns(suite.prompt, suite.answer)
        config = replace(style, path=suite.path, split=suite.split, subset=suite.subset, columns=columns, limit=limit)
    problems = [_reduced(problem, Path(name).stem) for problem in load_prompts(config, "--suite")]
    notes = ()
    if file is None and suite and limit is None and len(problems) != suite.size:
        notes = (f"{suite.path} held {len(problems)} problems, where {suite.size} were expected: it has changed",)
    return Loaded(result_name(name), problems, notes=notes)


def result_name(name: str) -> str:
    """What a suite's files are called: `calculator@1` for `environment:calculator@1`."""
    if name.startswith(EPISODES):
        return re.sub(r"[^\w@.,=+-]", "-", name.removeprefix(EPISODES))
    return gym.short_name(name) if gym.is_task(name) else Path(name).stem


def _episodes(name: str, limit: int | None) -> EnvironmentConfig:
    """`limit` tasks of an environment. Where it has them as options, there are 100 `tasks` and the `seed` is 1."""
    asked, _, options = name.removeprefix(EPISODES).partition("?")
    environment, seed = gym.split_seed(asked)
    known = [field.name for field in fields(environment_class(environment, "--suite").Config)]
    values: dict[str, Any] = {"tasks": limit or NUM_EPISODES, "seed": HELDOUT_SEED}
    values = {option: value for option, value in values.items() if option in known}
    values |= {} if seed is None else {"seed": seed}
    values |= parse_overrides(re.split(r",(?![^\[]*\])", options)) if options else {}  # commas within [] are a list's
    return EnvironmentConfig(environment, values, limit=limit)


def _reduced(problem: Prompt, suite: str) -> Prompt:
    """GSM8K's answers are worked solutions that end with `#### 18`. Ids name the suite where the data have none."""
    answer, number = problem.answer, re.fullmatch(r"(?:line|row) (\d+)", problem.id)
    if suite == "gsm8k" and isinstance(answer, str):
        answer = answer.rpartition("####")[2].strip()
    return replace(problem, answer=answer, id=f"{suite}-{int(number[1]) - 1}" if number else problem.id)
