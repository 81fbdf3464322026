"""How an evaluation samples and grades."""

from dataclasses import asdict, dataclass
from typing import Any

from opd.errors import UserError
from opd.records import Sampling


@dataclass(frozen=True)
class EvalOptions:
    """Raises `UserError` for options that cannot work together."""

    samples: int = 1  # completions a problem
    temperature: float = 0.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 keeps everything
    presence_penalty: float = 0.0
    max_new_tokens: int = 1024
    seed: int = 0
    reward: str | None = None  # FILE.py:FUNCTION, a verifier of one's own
    time_limit_s: float = 5.0  # for grading one answer
    dtype: str = "auto"  # of the weights, in this process
    max_rows: int = 64  # completions decoded at once, in this process
    url: str | None = None  # of a running vLLM server, which then samples
    served_as: str | None = None  # the model's name there; None: the only one it serves
    token_file: str | None = None  # the file with the server's bearer token
    max_in_flight: int = 256  # requests to the server at once
    deadline_s: float = 3600.0  # for one completion there, with all attempts

    def __post_init__(self) -> None:
        if self.samples > 1 and self.temperature == 0.0:
            raise UserError("--samples above 1 repeats the same greedy completion: set --temperature")
        for name in ("served_as", "token_file"):
            if getattr(self, name) is not None and self.url is None:
                raise UserError(f"--{name.replace('_', '-')} has no effect without --url; leave it out")

    @property
    def sampling(self) -> Sampling:
        return Sampling(self.temperature, self.top_p, self.top_k, presence_penalty=self.presence_penalty)

    def fixing_numbers(self) -> dict[str, Any]:
        """Those that the sampled text depends on: an evaluation can be resumed only with the same."""
        free = ("reward", "time_limit_s", "url", "served_as", "token_file", "max_in_flight", "deadline_s")
        mine = {name: value for name, value in asdict(self).items() if name not in free}
        elsewhere = ("dtype", "max_rows") if self.url else ()
        return {name: value for name, value in mine.items() if name not in elsewhere} | {
            "sampler": "vllm" if self.url else "hf"
        }
