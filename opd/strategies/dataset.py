"""Prompt source `dataset`: the rows of a file or of a hub data set, in one seeded permutation per epoch."""

from collections.abc import Sequence

from opd.data import DatasetConfig, load_prompts
from opd.plugins import PromptSource
from opd.records import Prompt
from opd.strategies.epochs import drawn


class DatasetPrompts(PromptSource):
    """See the module."""

    Config = DatasetConfig

    def __init__(self, config: DatasetConfig, seed: int) -> None:
        self.prompts = load_prompts(config, "prompts")
        self.seed = seed

    def known(self) -> Sequence[Prompt]:
        """See `opd.plugins.PromptSource.known`."""
        return self.prompts

    def at(self, step: int, attempt: int, count: int) -> Sequence[Prompt]:
        """See `opd.plugins.PromptSource.at`. Every row comes once before any comes twice."""
        return [self.prompts[row] for row in drawn(len(self.prompts), self.seed, step, attempt, count)]
