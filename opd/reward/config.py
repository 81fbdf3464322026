"""Configuration of rewards. Imports nothing, so that reading a recipe stays quick."""

from dataclasses import dataclass


@dataclass(frozen=True)
class RewardConfig:
    """Outcome and score of rollouts while training."""

    outcome: str = "answer"
    """Who says what came of a single answer: `answer` compares it with the prompt's, `majority` with the most frequent
    answer to the same prompt, which needs no labels, and `FILE.py:FUNCTION` is a verifier of your own: (response, answer,
    row) -> bool, or a number from 0 to 1. Of an episode its environment says so, whose verdict takes the place of `answer`;
    the others are refused."""
    score: str | None = None
    """`FILE.py:FUNCTION`, a shaped score beside the outcome: (response, answer, row) -> number; `row` has `outcome` and
    `num_tokens` as well. Null: the score is the outcome."""
    length_cost: float = 0.0
    """Taken from the score for each sampled token."""
    time_limit_s: float = 5.0
    """Longest time to judge one answer; one that takes longer counts as wrong, and its score as 0. A function's file may
    take as long to load."""

    @property
    def verifier(self) -> str | None:
        """The user's own function that says what came of an answer."""
        return None if self.outcome in ("answer", "majority") else self.outcome
