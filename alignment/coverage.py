"""How much of a text two tokenizers could be aligned on."""

from dataclasses import astuple, dataclass

from opd.records import SpanMap


@dataclass(frozen=True)
class Coverage:
    """Counts over alignments; they add up.

    Example: `Coverage.of(span_map).byte_coverage`
    """

    num_bytes: int = 0  # of the student's text
    aligned_bytes: int = 0
    student_tokens: int = 0
    aligned_tokens: int = 0  # student tokens in aligned units
    teacher_tokens: int = 0
    units: int = 0
    one_to_one: int = 0  # student tokens in aligned units of one token on either side

    @classmethod
    def of(cls, spans: SpanMap) -> "Coverage":
        return cls(
            num_bytes=int(spans.num_bytes.sum()),
            aligned_bytes=int(spans.num_bytes[spans.aligned].sum()),
            student_tokens=int(spans.student_sizes.sum()),
            aligned_tokens=int(spans.student_sizes[spans.aligned].sum()),
            teacher_tokens=len(spans.token_ids),
            units=len(spans.aligned),
            one_to_one=int(spans.one_to_one.sum()),
        )

    def __add__(self, other: "Coverage") -> "Coverage":
        return Coverage(*(mine + its for mine, its in zip(astuple(self), astuple(other))))

    @property
    def byte_coverage(self) -> float:
        """Share of the text's bytes in aligned units; 1 where there is no text."""
        return _share(self.aligned_bytes, self.num_bytes)

    @property
    def token_coverage(self) -> float:
        """Share of the student's tokens in aligned units; 1 where there are none."""
        return _share(self.aligned_tokens, self.student_tokens)

    @property
    def one_to_one_share(self) -> float:
        """Share of the student's tokens that are aligned to one teacher token each; 1 where there are none."""
        return _share(self.one_to_one, self.student_tokens)


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 1.0
