"""Configuration of evaluation while training."""

from dataclasses import dataclass

from opd.data import DatasetConfig
from opd.envs.config import EnvironmentConfig

MAX_ROUNDS = 8  # answers to each problem, at most, for `collapse_tokens`


@dataclass(frozen=True)
class EvalConfig:
    """Accuracy on held-out problems, and the reverse KL to the teacher on the student's own rollouts of them."""

    prompts: DatasetConfig | None = None
    """The held-out problems, with the fields of prompt source `dataset`; null evaluates nothing."""
    environment: EnvironmentConfig | None = None
    """In place of `prompts`: held-out episodes, judged by their environment's own verifier."""
    selection: DatasetConfig | None = None
    """Other problems, by whose accuracy the best checkpoint is chosen and kept; null chooses none."""
    every: int = 0
    """Evaluate after every so many steps; 0 only before the first and after the last."""
    samples: int = 1
    """Completions a problem."""
    temperature: float = 0.0
    """Sampling temperature of the completions that are graded; 0 is greedy."""
    top_p: float = 1.0
    """Nucleus of the completions that are graded."""
    max_new_tokens: int | None = None
    """Longest completion; null takes that of `sampling`."""
    kl_prompts: int = 32
    """Problems for the reverse KL, sampled as in training; 0 leaves it out, as does a recipe without teachers."""
    collapse_tokens: int = 0
    """So many tokens are sampled as in training, for held-out problems, and the share of distinct ones among their 4-grams
    is `distinct_4grams`; it falls when the student repeats itself. 0 leaves it out."""
    collapse_prompts: int = 32
    """The first so many problems are answered, again and again until there are enough tokens."""
    reward: str | None = None
    """`FILE.py:FUNCTION`, a verifier of your own: (response, answer, row) -> bool or number."""
    time_limit_s: float = 5.0
    """Longest time to grade one answer."""
