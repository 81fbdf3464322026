"""Prompt source `dataset`: the rows of a file or of a hub data set, in one seeded permutation per epoch."""

from collections.abc import Sequence

import numpy as np

from opd.data import DatasetConfig, load_prompts
from opd.records import Prompt


class DatasetPrompts:
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
        size = len(self.prompts)
        places = np.arange(step * count, (step + 1) * count)
        chosen: list[Prompt] = []
        for epoch in np.unique(places // size):
            order = np.random.default_rng([self.seed, attempt, int(epoch)]).permutation(size)
            chosen += [self.prompts[order[place % size]] for place in places[places // size == epoch]]
        return chosen
