"""Drafts of prompts: which can be used, and which are still to be written.

Drafts are decoded in blocks of so many prompts, and those of a block that cannot be used are drawn again within it. A block
is always whole, whoever asks for how many prompts, and one that a kill cut short is written anew: a draft depends on its
neighbours in the batch by rounding, so this is what makes row i the same however many rows there are.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from opd.eval.samples import Sampled, SampleFile

Kind = Literal["", "empty", "truncated", "too_long"]  # why a draft cannot be used; "" where it can
KINDS: tuple[Kind, ...] = ("empty", "truncated", "too_long")


class Drafts:
    """What `file` holds: `Sampled.index` is the prompt, `Sampled.sample` the attempt, `Sampled.response` the problem."""

    def __init__(self, file: SampleFile, max_attempts: int, kind: Callable[[Sampled], Kind]) -> None:
        self.file, self.max_attempts, self._kind = file, max_attempts, kind
        self._kinds: dict[tuple[int, int], Kind] = {}

    def blocks(self, num: int, size: int | None) -> list[Sequence[int]]:
        """What is left to write of `num` prompts, `size` of them at a time; None: each for itself.

        Rewrites the file without the drafts of blocks that are not complete.
        """
        last = max([num, *(index + 1 for index, _ in self.file.done)])
        blocks = [range(start, start + (size or 1)) for start in range(0, last, size or 1)]
        whole = {index for block in blocks for index in block if all(map(self.settled, block))}
        self.file.keep(pair for pair in self.file.done if size is None or pair[0] in whole)
        return [block for block in blocks if block[0] < num and block[0] not in whole]

    def add(self, draft: Sampled) -> None:
        self.file.add(draft)

    def of(self, index: int) -> list[Sampled]:
        """The drafts of one prompt in order; only the last one may be usable."""
        found: list[Sampled] = []
        while len(found) < self.max_attempts and (draft := self.file.done.get((index, len(found)))) is not None:
            found.append(draft)
        return found

    def kind(self, draft: Sampled) -> Kind:
        pair = draft.index, draft.sample
        if pair not in self._kinds:
            self._kinds[pair] = self._kind(draft)
        return self._kinds[pair]

    def usable(self, index: int) -> Sampled | None:
        """The draft that is the prompt, once there is one."""
        found = self.of(index)
        return found[-1] if found and not self.kind(found[-1]) else None

    def settled(self, index: int) -> bool:
        """Whether nothing more is to be written for this prompt."""
        return self.usable(index) is not None or len(self.of(index)) == self.max_attempts

    def unusable(self, indices: Iterable[int]) -> dict[Kind, int]:
        """How many drafts of each kind there were for these prompts."""
        counts = Counter(self.kind(draft) for index in indices for draft in self.of(index))
        return {kind: counts[kind] for kind in KINDS}
