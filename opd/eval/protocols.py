"""How the papers evaluate: suites, samples, temperature, limits, thinking, metric.

A preset fills what the command line leaves open. What a paper does not state is None here and keeps the command's default;
every result names these settings, and those that were asked for otherwise.
"""

from dataclasses import dataclass

from opd.errors import UserError
from opd.spelling import nearest


@dataclass(frozen=True)
class Protocol:
    """One paper's evaluation. Suites are averaged without weights."""

    paper: str
    suites: tuple[str, ...]
    samples: int
    caveat: str  # what the preset cannot know or do of the paper's evaluation
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    presence_penalty: float | None = None
    max_new_tokens: int | None = None
    thinking: bool | None = None  # None: as the model's chat template does by itself

    @property
    def metric(self) -> str:
        """What these papers report of each suite: the mean over problems and samples."""
        return f"avg@{self.samples}"


PROTOCOLS = {
    "compass": Protocol(
        paper="CompassOPD, arXiv 2609.10154",
        suites=("aime24", "aime25", "aime26", "hmmt25_feb", "hmmt25_nov", "hmmt26", "math500"),
        samples=16,
        temperature=0.7,
        top_p=1.0,
        top_k=40,
        presence_penalty=2.0,
        max_new_tokens=24576,
        caveat="the paper sampled through EvalScope",
    ),
    "df-opd": Protocol(
        paper="DF-OPD, arXiv 2609.14193",
        suites=("aime24", "aime25", "amc23", "math500", "minerva", "olympiadbench"),
        samples=8,
        max_new_tokens=16384,
        caveat="the paper chose its checkpoints on these suites and has no selection set",
    ),
    "nsd": Protocol(
        paper="Negative Self-Distillation, arXiv 2609.11699",
        suites=("aime24", "aime25", "aime26", "hmmt25_feb", "math500", "amc23", "olympiadbench"),
        samples=8,
        temperature=0.6,
        top_p=0.95,
        top_k=20,
        max_new_tokens=32768,
        thinking=False,
        caveat="the paper does not say which HMMT 2025 it used; February is taken",
    ),
    "stride": Protocol(
        paper="STRIDE, arXiv 2609.14636",
        suites=("aime24", "aime25"),
        samples=8,
        caveat="its mathematics part; the agent tasks (mean@16 and pass@16) are no suites of problems",
    ),
    "endpoint": Protocol(
        paper="Endpoint-trace masking, arXiv 2609.07103",
        suites=("aime24", "math500"),
        samples=8,
        caveat="the paper also has GPQA-Diamond and names neither its subset of MATH nor the number of samples; 8 are taken",
    ),
}


def find_protocol(name: str) -> Protocol:
    """Raises `UserError` naming the nearest preset."""
    if name not in PROTOCOLS:
        raise UserError(f"--protocol: there is no preset {name!r}{nearest(name, PROTOCOLS)}")
    return PROTOCOLS[name]
