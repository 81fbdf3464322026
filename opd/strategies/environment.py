"""Prompt source `environment`: the tasks of an environment, in one seeded permutation per epoch."""

from collections.abc import Sequence

from opd.envs.config import EnvironmentConfig, load_tasks
from opd.plugins import PromptSource
from opd.records import Prompt
from opd.strategies.epochs import drawn


class EnvironmentPrompts(PromptSource):
    """See the module."""

    Config = EnvironmentConfig

    def __init__(self, config: EnvironmentConfig, seed: int) -> None:
        self.prompts = load_tasks(config, "prompts")
        self.seed = seed

    def known(self) -> Sequence[Prompt]:
        """See `opd.plugins.PromptSource.known`."""
        return self.prompts

    def at(self, step: int, attempt: int, count: int) -> Sequence[Prompt]:
        """See `opd.plugins.PromptSource.at`. Every task comes once before any comes twice."""
        return [self.prompts[row] for row in drawn(len(self.prompts), self.seed, step, attempt, count)]
