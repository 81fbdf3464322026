"""Sample rollouts of the same prompt from several groups, each token with the teacher's log-prob less the student's.

That difference says where the two disagree, whatever the loss; for sampled reverse KL it is the token's advantage, and so
the rows call it. Runs without comparable log-probs (say, with truncated sampling) write none: their tokens have no colours.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from opd.report.loading import Group, Run
from opd.report.text import visible

MAX_TOKENS = 400  # shown of a rollout
MAX_TOKEN, MAX_TEXT, MAX_ANSWER = 100, 2000, 400  # characters shown of a token, a prompt, an environment's answer
NUM_PROMPTS = 3
NUM_STEPS = 10  # the latest sampled steps, in which a prompt common to most groups is looked for
STRONGEST = 8  # tokens of a rollout that are listed with their numbers
LEVELS = 4  # of colour on either side; the strongest two are underlined too

Key = tuple[str, int]  # of a rollout: the prompt's id and its slot in the batch


@dataclass(frozen=True)
class Token:
    """`advantage`: the teacher's log-prob less the student's, in nats; None where none was written down.

    `level` -4..4 is the same in steps of a quarter of the scale.
    """

    text: str
    advantage: float | None
    level: int


@dataclass(frozen=True)
class Part:
    """A turn, or the part of it that was `reused` from an earlier rollout; then the environment's `answers` to it."""

    tokens: Sequence[Token]
    reused: bool = False
    answers: Sequence[str] = ()


@dataclass(frozen=True)
class Completion:
    """One group's rollout. `num_hidden` tokens at its end are left out."""

    group: Group
    run: Run
    finish: str
    parts: Sequence[Part]
    num_hidden: int

    @property
    def tokens(self) -> list[Token]:
        return [token for part in self.parts for token in part.tokens]

    @property
    def strongest(self) -> list[tuple[int, Token]]:
        """(place from 1, token) of the largest advantages in size, in the order of the text."""
        known = [(place, token) for place, token in enumerate(self.tokens, 1) if token.advantage is not None]
        largest = sorted(known, key=lambda pair: -abs(pair[1].advantage or 0.0))[:STRONGEST]
        return sorted(largest, key=lambda pair: pair[0])


@dataclass(frozen=True)
class Sample:
    """A prompt as several groups answered it at one step."""

    step: int
    id: str
    prompt: str
    completions: Sequence[Completion]


@dataclass(frozen=True)
class Gallery:
    """`scale`: the advantage in nats from which on the colour is fullest."""

    samples: Sequence[Sample]
    scale: float


def gallery(groups: Sequence[Group]) -> Gallery:
    """The prompts that most groups sampled at the same step: the latest such step, and the first run of each group."""
    runs = [(group, group.counted[0]) for group in groups]
    files = [(group, run, _files(run.path)) for group, run in runs]
    step, found = _most_shared([(group, run, steps) for group, run, steps in files if steps])
    scale = _scale([row for _, members in found for _, _, row in members])
    samples = [
        Sample(step, visible(key[0]), _cut(members[0][2]["prompt"]), [_completion(*member, scale) for member in members])
        for key, members in found
    ]
    return Gallery(samples, scale)


Member = tuple[Group, Run, Mapping[str, Any]]


def _files(run: Path) -> dict[int, Path]:
    return {int(file.stem.removeprefix("step-")): file for file in run.glob("rollouts/step-*.jsonl")}


def _most_shared(files: Sequence[tuple[Group, Run, dict[int, Path]]]) -> tuple[int, list[tuple[Key, list[Member]]]]:
    """(step, its prompts with their rollouts) where a prompt was sampled by the most groups; later steps first."""
    best: tuple[int, list[tuple[Key, list[Member]]]] = (0, [])
    most = 0
    for step in sorted({step for *_, steps in files for step in steps}, reverse=True)[:NUM_STEPS]:
        by_key: dict[Key, list[Member]] = {}
        for group, run, steps in files:
            for row in _rows(steps[step]) if step in steps else []:
                by_key.setdefault((str(row["id"]), int(row.get("slot", 0))), []).append((group, run, row))
        shared = sorted(by_key.items(), key=lambda item: -len(item[1]))[:NUM_PROMPTS]
        if shared and len(shared[0][1]) > most:
            most, best = len(shared[0][1]), (step, [item for item in shared if len(item[1]) == len(shared[0][1])])
        if most == len(files):
            break
    return best


def _rows(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file of rollouts."""
    rows = []
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue  # cut short by a kill, or the end of the file
    return [row for row in rows if isinstance(row, dict) and "id" in row and "prompt" in row]


def _scale(rows: Sequence[Mapping[str, Any]]) -> float:
    """Near the largest advantages of the median rollout, to one digit: one group that went astray does not hide the rest."""
    sizes = [[abs(value) for value in _advantages(row) if value is not None] for row in rows]
    largest = [np.quantile(found, 0.98) for found in sizes if found]
    return max(0.1, float(f"{np.median(largest):.1g}")) if largest else 1.0


def _advantages(row: Mapping[str, Any]) -> list[float | None]:
    return [value if value is not None and np.isfinite(value) else None for value in row.get("advantages") or ()]


def _completion(group: Group, run: Run, row: Mapping[str, Any], scale: float) -> Completion:
    finish, texts = str(row.get("finish", "")), row.get("tokens")
    if not texts:  # runs of earlier versions wrote no tokens
        return Completion(group, run, finish, [Part([Token(_cut(row.get("response", "")), None, 0)])], 0)
    tokens = [
        Token(_cut(text, MAX_TOKEN), value, int(np.clip(round(LEVELS * (value or 0.0) / scale), -LEVELS, LEVELS)))
        for text, value in zip_longest(texts[:MAX_TOKENS], _advantages(row)[:MAX_TOKENS], fillvalue=None)
        if text is not None
    ]
    parts = list(_parts(tokens, row.get("turns") or ()))
    return Completion(group, run, finish, parts, max(0, len(texts) - MAX_TOKENS))


def _parts(tokens: Sequence[Token], turns: Sequence[Mapping[str, Any]]) -> Iterator[Part]:
    """The shown tokens by turns. Where they end within a turn, what came after it is not shown."""
    start = 0
    for turn in turns:
        end, new = start + turn["num_tokens"], start + turn["num_reused"]
        answers = [_cut(str(text), MAX_ANSWER) for text in turn.get("observations", ())] if end <= len(tokens) else []
        if new > start:
            yield Part(tokens[start:new], reused=True, answers=answers if new == end else ())
        if new < end:
            yield Part(tokens[new:end], answers=answers)
        start = end
        if start >= len(tokens):
            return
    if start < len(tokens):  # a run of an earlier version wrote no turns
        yield Part(tokens[start:])


def _cut(text: str, limit: int = MAX_TEXT) -> str:
    return visible(text) if len(text) <= limit else f"{visible(text[:limit])}… ({len(text) - limit:,} more characters)"
