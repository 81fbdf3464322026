"""Configuration of the alignment between tokenizers."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class AlignmentConfig:
    """How a teacher with another tokenizer reads what the student sampled. Without such a teacher it has no effect."""

    min_byte_coverage: float = 0.9
    """A step in which less than this share of the sampled text's bytes is aligned stops the run; 0 never does."""
    special_tokens: dict[str, str] = field(default_factory=dict)
    """The teacher's text for tokens of the student, as `{"<think>": "[THINK]"}`, over the table that `opd align` prints; an
    empty one leaves the token out of the teacher's text, and untrained."""
