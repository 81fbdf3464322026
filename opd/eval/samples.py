"""The completions of an evaluation on disk: `SUITE.samples.jsonl`, a header line and then a line each as they end.

They are sampled in blocks. A block that a kill cut short is sampled again as a whole, because a completion depends on its
neighbours in the batch by rounding: so a resumed evaluation equals one that was never stopped.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from opd.errors import UserError
from opd.files import explain_full_disk, explain_unwritable, write_text

Pair = tuple[int, int]  # (problem, sample)


@dataclass(frozen=True)
class Sampled:
    """One completion. `index` is its problem's place, `sample` its own among the problem's."""

    index: int
    sample: int
    response: str
    num_tokens: int
    finish: str  # "eos", or "length" at the token limit
    repetitive: bool
    outcome: float | None = None  # what the environment's verifier said of an episode


class SampleFile:
    """Raises `UserError` for samples of other settings, and for any at all unless `resume` or `overwrite` is given.

    `digests`: in words what differs where one of the header's values does that tells a reader nothing.
    """

    def __init__(
        self,
        path: Path,
        header: Mapping[str, Any],
        *,
        resume: bool = False,
        overwrite: bool = False,
        digests: Mapping[str, str] | None = None,
    ) -> None:
        self.path, self.header, self.digests = path, json.loads(json.dumps(header)), digests or {}
        self.done: dict[Pair, Sampled] = {}
        if path.exists() and not overwrite:
            if not resume:
                raise UserError(f"--out: {path} exists; continue it with --resume or replace it with --overwrite")
            self._read()

    def blocks(self, pairs: Sequence[Pair], size: int | None) -> list[list[Pair]]:
        """What is left to sample, `size` pairs at a time; None: all at once, for a sampler that is not batched by us.

        Rewrites the file with what is kept.
        """
        if size is None:
            left = [[pair for pair in pairs if pair not in self.done]]
        else:
            blocks = [list(pairs[start : start + size]) for start in range(0, len(pairs), size)]
            left = [block for block in blocks if not all(pair in self.done for pair in block)]
        redone = {pair for block in left for pair in block}
        self.keep(pair for pair in pairs if pair in self.done and pair not in redone)
        return [block for block in left if block]

    def keep(self, pairs: Iterable[Pair]) -> None:
        """Rewrites the file with these alone, which it has."""
        self.done = {pair: self.done[pair] for pair in pairs}
        with explain_unwritable(self.path.parent):
            lines = [json.dumps(self.header), *(_line(sampled) for sampled in self.done.values())]
            write_text(self.path, "".join(f"{line}\n" for line in lines))

    def add(self, sampled: Sampled) -> None:
        with explain_full_disk(self.path), self.path.open("a", encoding="utf-8") as file:
            file.write(_line(sampled) + "\n")
        self.done[sampled.index, sampled.sample] = sampled

    def _read(self) -> None:
        try:
            first, *lines = self.path.read_text(encoding="utf-8", errors="replace").split("\n")
        except OSError as error:
            raise UserError(f"--out: {self.path} cannot be read: {error.strerror}; name another folder") from None
        try:
            before = json.loads(first)
        except ValueError:
            return  # killed while it wrote the first line
        if not isinstance(before, dict):
            raise UserError(f"--out: {self.path} is no file of samples; name another folder, or use --overwrite")
        for key, value in self.header.items():
            if before.get(key) != value:
                differs = f"has {key} {before.get(key)!r}, not {value!r}"
                if key in self.digests:
                    differs = f"was begun with {self.digests[key]}"
                raise UserError(f"--resume: {self.path} {differs}; give the same options, another --out, or --overwrite")
        for line in lines:
            try:
                sampled = Sampled(**json.loads(line))
                self.done[sampled.index, sampled.sample] = sampled
            except (ValueError, TypeError):
                continue  # the line that a kill cut short, or the end of the file


def _line(sampled: Sampled) -> str:
    return json.dumps(asdict(sampled), ensure_ascii=False)
